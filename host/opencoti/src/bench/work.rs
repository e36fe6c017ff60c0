//! Running a test: sequences that are filled once, and forks of them that are measured and dropped again.

use std::time::Instant;

use anyhow::Result;
use opencoti_kv::{BatchItem, Cache, Outputs, SeqId};

use super::test::{Kind, Test};
use crate::measure::cost::{Cost, Run};
use crate::measure::floor::Floor;
use crate::measure::rig::Rig;

/// Of a step, the part that prompts get while somebody decodes: the scheduler's rule.
const PROMPT_SHARE: usize = 8;

/// One measurement.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Tokens computed, of all sequences.
    pub tokens: usize,
    /// Steps.
    pub steps: usize,
    /// Seconds for all.
    pub seconds: f64,
    /// Seconds of the longest step.
    pub longest: f64,
    /// Bytes of weights, cache and state that these steps move at least.
    pub bytes: f64,
    /// Bytes a second at which memory was read just before.
    pub bandwidth: Option<f64>,
}

impl Sample {
    /// Tokens a second.
    pub fn speed(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }

    /// Of the time it took, the part that reading its bytes takes at the bandwidth.
    pub fn share(&self) -> Option<f64> {
        self.bandwidth.map(|bandwidth| self.bytes / bandwidth / self.seconds)
    }

    /// Tokens a second at the bandwidth.
    pub fn floor(&self) -> Option<f64> {
        self.bandwidth.map(|bandwidth| self.tokens as f64 * bandwidth / self.bytes)
    }
}

/// A cache with the sequences that tests fork from.
pub struct Bed {
    /// What steps over the cache move.
    pub cost: Cost,
    cache: Cache,
    donors: Vec<SeqId>,
    /// Tokens of each donor.
    depth: usize,
}

impl Bed {
    /// A bed over a cache that has room for the tests.
    pub fn new(rig: &Rig, cache: Cache) -> Bed {
        Bed { cost: Cost::new(&rig.model, &cache.config().groups), cache, donors: Vec::new(), depth: 0 }
    }

    /// Whether the cache has room for a test of which [`super::test::needs`] says this.
    pub fn has_room(&self, tokens: usize, sequences: usize) -> bool {
        let config = self.cache.config();
        config.capacity_tokens >= tokens && config.slots >= sequences
    }

    /// Fills the sequences that the test forks from; those of a test at a lesser depth grow.
    ///
    /// # Errors
    /// No room, or a codec that failed.
    pub fn prepare(&mut self, rig: &mut Rig, test: Test) -> Result<()> {
        if test.depth < self.depth {
            self.donors.drain(..).try_for_each(|donor| self.cache.release(donor))?;
            self.depth = 0;
        }
        while self.donors.len() < test.donors() {
            let donor = self.cache.create();
            rig.fill(&mut self.cache, donor, &tokens(self.depth))?;
            self.donors.push(donor);
        }
        if test.depth > self.depth {
            let grown = tokens(test.depth - self.depth);
            for &donor in &self.donors {
                rig.fill(&mut self.cache, donor, &grown)?;
            }
            self.depth = test.depth;
        }
        Ok(())
    }

    /// Runs a prepared test once; the bandwidth is measured before, if there is a buffer for it.
    ///
    /// # Errors
    /// No room, or a codec that failed.
    pub fn sample(&mut self, rig: &mut Rig, test: Test, floor: Option<&Floor>) -> Result<Sample> {
        let bandwidth = floor.map(Floor::bandwidth);
        let mut sequences = Vec::with_capacity(test.sequences + 1);
        for i in 0..test.sequences {
            let donor = self.donors.get(if test.kind == Kind::Batch { i } else { 0 });
            sequences.push(match donor.filter(|_| test.depth > 0) {
                Some(&donor) => self.cache.fork(donor, test.depth)?,
                None => self.cache.create(),
            });
        }
        let mut clock = Clock::new(&self.cost, bandwidth);
        match test.kind {
            Kind::Prefill => prefill(rig, &mut self.cache, &mut clock, test, sequences[0])?,
            Kind::Decode | Kind::Batch | Kind::Shared => decode(rig, &mut self.cache, &mut clock, test, &sequences)?,
            Kind::Mixed => {
                let prompt = self.cache.create();
                sequences.push(prompt);
                mixed(rig, &mut self.cache, &mut clock, test, &sequences)?;
            }
        }
        sequences.into_iter().try_for_each(|seq| self.cache.release(seq))?;
        Ok(clock.sample)
    }
}

/// Adds up steps.
struct Clock<'a> {
    cost: &'a Cost,
    sample: Sample,
}

impl<'a> Clock<'a> {
    fn new(cost: &'a Cost, bandwidth: Option<f64>) -> Self {
        let sample = Sample { tokens: 0, steps: 0, seconds: 0.0, longest: 0.0, bytes: 0.0, bandwidth };
        Clock { cost, sample }
    }

    fn step(&mut self, rig: &mut Rig, cache: &mut Cache, batch: &[BatchItem<'_>], runs: &[Run]) -> Result<()> {
        let start = Instant::now();
        rig.step(cache, batch)?;
        let seconds = start.elapsed().as_secs_f64();
        let sample = &mut self.sample;
        sample.tokens += runs.iter().map(|run| run.rows).sum::<usize>();
        sample.steps += 1;
        sample.seconds += seconds;
        sample.longest = sample.longest.max(seconds);
        sample.bytes += self.cost.step_bytes(runs);
        Ok(())
    }
}

fn prefill(rig: &mut Rig, cache: &mut Cache, clock: &mut Clock<'_>, test: Test, seq: SeqId) -> Result<()> {
    let prompt = tokens(test.tokens);
    let mut done = 0;
    for part in prompt.chunks(rig.step_tokens()) {
        let last = done + part.len() == prompt.len();
        let outputs = if last { Outputs::Last } else { Outputs::None };
        let run = Run { depth: test.depth + done, shared: 0, rows: part.len() };
        clock.step(rig, cache, &[BatchItem { seq, tokens: part, outputs }], &[run])?;
        done += part.len();
    }
    Ok(())
}

fn decode(rig: &mut Rig, cache: &mut Cache, clock: &mut Clock<'_>, test: Test, sequences: &[SeqId]) -> Result<()> {
    let shared = |i: usize| if test.kind == Kind::Shared && i > 0 { test.depth } else { 0 };
    for (t, token) in tokens(test.tokens).iter().enumerate() {
        let item = |&seq: &SeqId| BatchItem { seq, tokens: std::slice::from_ref(token), outputs: Outputs::Last };
        let batch: Vec<BatchItem> = sequences.iter().map(item).collect();
        let run = |i: usize| Run { depth: test.depth + t, shared: shared(i), rows: 1 };
        let runs: Vec<Run> = (0..sequences.len()).map(run).collect();
        clock.step(rig, cache, &batch, &runs)?;
    }
    Ok(())
}

/// The last sequence is a prompt, which gets what the scheduler gives it; the others decode until it is in.
fn mixed(rig: &mut Rig, cache: &mut Cache, clock: &mut Clock<'_>, test: Test, sequences: &[SeqId]) -> Result<()> {
    let prompt = tokens(test.tokens);
    let Some((&incoming, running)) = sequences.split_last() else { return Ok(()) };
    let chunk = (rig.step_tokens() / PROMPT_SHARE).clamp(1, rig.step_tokens() - running.len());
    for (t, part) in prompt.chunks(chunk).enumerate() {
        let item = |&seq: &SeqId| BatchItem { seq, tokens: &prompt[..1], outputs: Outputs::Last };
        let mut batch: Vec<BatchItem> = running.iter().map(item).collect();
        let last = t * chunk + part.len() == prompt.len();
        let outputs = if last { Outputs::Last } else { Outputs::None };
        batch.push(BatchItem { seq: incoming, tokens: part, outputs });
        let shared = |i: usize| if i > 0 { test.depth } else { 0 };
        let decoding = |i: usize| Run { depth: test.depth + t, shared: shared(i), rows: 1 };
        let mut runs: Vec<Run> = (0..running.len()).map(decoding).collect();
        runs.push(Run { depth: t * chunk, shared: 0, rows: part.len() });
        clock.step(rig, cache, &batch, &runs)?;
    }
    Ok(())
}

/// Some tokens; which ones makes no difference to the work.
fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| TOKENS_FROM + i * 37 % TOKENS).collect()
}

/// First token used: behind the special ones that most vocabularies begin with.
const TOKENS_FROM: u32 = 4;
/// Tokens used; every vocabulary has as many.
const TOKENS: u32 = 199;
