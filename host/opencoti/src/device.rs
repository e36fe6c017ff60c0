//! Which device runs the model.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use opencoti_compute::cpu::attention::Attention;
use opencoti_compute::cpu::executor::{Config as CpuConfig, Executor as CpuExecutor};
use opencoti_compute::plan::{Step, StoreView};
use opencoti_cuda::CudaError;
use opencoti_cuda::driver::Gpu;
use opencoti_cuda::executor::{Config as CudaConfig, Executor as CudaExecutor};
use opencoti_engine::StepBudget;
use opencoti_engine::runner::{StepOutputs, StepRunner};
use opencoti_kv::CacheConfig;
use opencoti_model::Model;

use crate::settings::{DeviceChoice, Settings};

/// Bytes of the card that are left for activations, kernels and partial results.
const CARD_RESERVE: u64 = 2 << 30;

/// The device that was found.
pub struct Device {
    gpu: Option<Arc<Gpu>>,
    /// Whether the card was asked for by name, so that the processor is no substitute.
    required: bool,
    /// One line for people.
    pub line: String,
}

impl Device {
    /// The device that the settings ask for; with `auto` the card if there is one.
    ///
    /// # Errors
    /// A card was asked for and there is none.
    pub fn find(settings: &Settings) -> Result<Device> {
        let cpu = |line: String| Device { gpu: None, required: false, line };
        if settings.device == DeviceChoice::Cpu {
            return Ok(cpu("CPU".to_owned()));
        }
        let required = settings.device == DeviceChoice::Cuda;
        match Gpu::open(0) {
            Ok(gpu) => {
                let (name, arch) = (&gpu.name, gpu.arch);
                let line = format!("{name} (CUDA, compute capability {}.{})", arch / 10, arch % 10);
                Ok(Device { gpu: Some(gpu), required, line })
            }
            Err(error) if required => Err(error).context("`engine.device` is cuda"),
            Err(error) => Ok(cpu(format!("CPU: {error}"))),
        }
    }

    /// Bytes of the card that a cache may take beside the model; `None` for the processor.
    pub fn cache_budget(&self, model: &Model) -> Option<u64> {
        let (free, _) = self.gpu.as_ref()?.memory().ok()?;
        Some((free as u64).saturating_sub(model.sizes.tensor_bytes).saturating_sub(CARD_RESERVE))
    }

    /// Makes what runs the steps. A model that the card's kernels do not have runs on the processor, unless the card was asked
    /// for.
    pub fn runner(
        &self,
        settings: &Settings,
        model: &Model,
        cache: &CacheConfig,
        channels: &str,
        budget: StepBudget,
        threads: usize,
    ) -> Result<Box<dyn StepRunner>> {
        if let Some(gpu) = &self.gpu {
            match cuda(gpu, settings, model, cache, channels, budget) {
                Ok(runner) => return Ok(Box::new(runner)),
                Err(error) if self.required => return Err(error.into()),
                Err(error) => tracing::warn!("the model runs on the CPU: {error}"),
            }
        }
        let config = CpuConfig { threads, max_rows: budget.n_batch, max_outputs: budget.max_outputs };
        let attention = Box::new(Attention::new(&model.graph));
        Ok(Box::new(CpuExecutor::new(model.graph.clone(), model.weights.clone(), attention, config)?))
    }
}

fn cuda(
    gpu: &Arc<Gpu>,
    settings: &Settings,
    model: &Model,
    cache: &CacheConfig,
    channels: &str,
    budget: StepBudget,
) -> Result<Cuda, CudaError> {
    let config = CudaConfig {
        max_rows: budget.n_batch,
        max_outputs: budget.max_outputs,
        kernel_cache: kernel_cache(settings),
        record: true,
    };
    if cache.groups.iter().any(|group| group.stage.is_some()) {
        return Err(CudaError::Unsupported("exact tokens beside encoded pages are not kept on a card".to_owned()));
    }
    if !channels.is_empty() {
        return Err(CudaError::Unsupported("a calibrated table of channels is not applied on a card".to_owned()));
    }
    let codecs: Vec<_> = cache.groups.iter().map(|g| (g.k.clone(), g.v.clone())).collect();
    let mut shown = 0;
    let mut progress = |done: u64, total: u64| {
        let tenths = done * 10 / total.max(1);
        if tenths > shown {
            shown = tenths;
            tracing::info!("{}0 % of the weights are on the card", tenths);
        }
    };
    CudaExecutor::new(gpu, model.graph.clone(), &model.weights, &codecs, config, &mut progress).map(Cuda)
}

/// Where compiled kernels are kept: beside the copies of plugins, or in the user's cache folder.
fn kernel_cache(settings: &Settings) -> Option<PathBuf> {
    let given = settings.plugin_cache.as_ref().map(|folder| folder.join("kernels"));
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let user = || std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
    given.or_else(|| user().map(|folder| folder.join("opencoti/kernels")))
}

/// The CUDA executor as the engine sees it.
struct Cuda(CudaExecutor);

impl StepRunner for Cuda {
    fn run(&mut self, step: &Step) -> Result<StepOutputs<'_>, String> {
        let outputs = self.0.run(step).map_err(|e| e.to_string())?;
        Ok(StepOutputs {
            logits: (0..outputs.rows()).map(|i| outputs.logits(i)).collect(),
            hidden: (0..outputs.rows()).map(|i| outputs.hidden(i)).collect(),
        })
    }

    fn pages_to_host(&mut self, store: &StoreView, pages: &[u32]) -> Result<(), String> {
        // SAFETY: the engine's thread owns the cache, and no step runs meanwhile.
        pages.iter().try_for_each(|&page| unsafe { self.0.page_to_host(store, page) }).map_err(|e| e.to_string())
    }

    fn pages_from_host(&mut self, store: &StoreView, pages: &[u32]) -> Result<(), String> {
        // SAFETY: as above.
        pages.iter().try_for_each(|&page| unsafe { self.0.page_to_card(store, page) }).map_err(|e| e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_card_auto_says_why_in_one_line_and_takes_the_processor() {
        let mut settings = Settings { device: DeviceChoice::Auto, ..Settings::default() };
        let device = Device::find(&settings).unwrap();
        if device.gpu.is_some() {
            return;
        }
        assert!(device.line.starts_with("CPU: ") && !device.line.contains('\n'), "{}", device.line);
        settings.device = DeviceChoice::Cuda;
        let refusal = format!("{:#}", Device::find(&settings).err().expect("refused"));
        assert!(refusal.starts_with("`engine.device` is cuda: "), "{refusal}");
        settings.device = DeviceChoice::Cpu;
        assert_eq!(Device::find(&settings).unwrap().line, "CPU");
    }
}
