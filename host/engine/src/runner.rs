//! The seam between the engine and whatever runs a model's steps.

use opencoti_compute::cpu::executor::Executor;
use opencoti_compute::plan::{Step, StoreView};

/// Results of a step: one row for each output that the step asked for, in their order.
#[derive(Debug, Default)]
pub struct StepOutputs<'a> {
    /// Logits, `n_vocab` a row.
    pub logits: Vec<&'a [f32]>,
    /// Hidden states after the final norm, `n_embd` a row.
    pub hidden: Vec<&'a [f32]>,
}

/// Runs planned steps on the pages that their plans name.
pub trait StepRunner: Send {
    /// Runs a step. The results live until the next one. An error is one sentence; the step's pages are undefined then.
    fn run(&mut self, step: &Step) -> Result<StepOutputs<'_>, String>;

    /// Encodes the pages that the plans of a step without rows seal. An error is one sentence; the pages to write are
    /// undefined then.
    fn seal(&mut self, _step: &Step) -> Result<(), String> {
        Err("this runner does not seal pages".to_owned())
    }

    /// Brings pages of a store to where the cache reads them, before a sequence is saved. A runner that works in the cache's own
    /// memory has nothing to do.
    fn pages_to_host(&mut self, _store: &StoreView, _pages: &[u32]) -> Result<(), String> {
        Ok(())
    }

    /// Takes over pages that the cache has filled, after a sequence was restored.
    fn pages_from_host(&mut self, _store: &StoreView, _pages: &[u32]) -> Result<(), String> {
        Ok(())
    }
}

impl StepRunner for Executor {
    fn seal(&mut self, step: &Step) -> Result<(), String> {
        Executor::seal(self, step).map_err(|e| e.to_string())
    }

    fn run(&mut self, step: &Step) -> Result<StepOutputs<'_>, String> {
        let outputs = Executor::run(self, step).map_err(|e| e.to_string())?;
        Ok(StepOutputs {
            logits: (0..outputs.rows()).map(|i| outputs.logits(i)).collect(),
            hidden: (0..outputs.rows()).map(|i| outputs.hidden(i)).collect(),
        })
    }
}
