//! `opencoti bench`: how fast a model runs here, and how near that is to what the memory allows.
//!
//! Tests run over one executor and a cache for each pair of codecs. Every repetition runs all pairs in turn, in changing
//! order, each after a reading of the memory's bandwidth, so that what else the machine does meets all alike.

pub mod args;
mod driver;
mod report;
mod test;
mod work;

use std::path::PathBuf;

use anyhow::Result;
use opencoti_compute::cpu::attention::Attention;

use crate::measure::codecs::{self, Pair};
use crate::measure::floor::Floor;
use crate::measure::machine;
use crate::measure::rig::{Rig, Size};
use crate::plugins;
use crate::settings::Settings;
use report::{Facts, Row};
use test::{Test, needs};
use work::{Bed, Sample};

pub use test::Kind;

/// What is measured, and where results go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Kinds of tests.
    pub kinds: Vec<Kind>,
    /// Pairs of codecs; those of the settings when there are none.
    pub kv: Vec<String>,
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Tokens that a sequence decodes in one measurement.
    pub generate: usize,
    /// Tokens before those that are measured, in tests of one sequence.
    pub depths: Vec<usize>,
    /// Numbers of sequences.
    pub batches: Vec<usize>,
    /// Tokens that each sequence of a batch has of its own.
    pub batch_depth: usize,
    /// Tokens of a shared prefix.
    pub prefix: usize,
    /// Measurements of each test.
    pub repeat: usize,
    /// Whether the bandwidth is measured.
    pub floor: bool,
    /// JSON in place of the table.
    pub as_json: bool,
    /// File for the JSON.
    pub json: Option<PathBuf>,
    /// File for the plot.
    pub svg: Option<PathBuf>,
    /// Tests come from standard input.
    pub interactive: bool,
}

/// Runs the tests, or those that standard input asks for.
pub fn run(settings: &Settings, options: &Options) -> Result<()> {
    let registry = plugins::load(settings)?;
    if options.interactive {
        let most = options.batches.iter().max().copied().unwrap_or(1);
        return driver::run(settings, &registry, most, options.floor);
    }
    let pairs = codecs::pairs(settings, &options.kv)?;
    let stages = test::stages(options);
    let context = stages.iter().flatten().map(Test::context).max().unwrap_or(1);
    let mut rig = load(settings, context, stages.iter().flatten().map(|t| t.sequences).max().unwrap_or(1))?;
    let floor = options.floor.then(|| Floor::new(crate::boot::threads(settings)));

    let mut rows = Vec::new();
    for tests in stages.iter().filter(|tests| !tests.is_empty()) {
        let (tokens, sequences) = needs(tests);
        let bed = |pair: &Pair| Ok(Bed::new(&rig, rig.cache(pair, &registry, tokens, sequences)?));
        let mut beds: Vec<Bed> = pairs.iter().map(bed).collect::<Result<_>>()?;
        for &test in tests {
            let samples = measure(&mut rig, &mut beds, test, options.repeat, floor.as_ref())?;
            for ((pair, bed), samples) in pairs.iter().zip(&beds).zip(samples) {
                let row = Row { test, kv: pair.label.clone(), token_bytes: bed.cost.token_bytes(), samples };
                eprintln!("{:<32} {:<12} {:9.1} tokens/s", test.to_string(), row.kv, row.speed().median);
                rows.push(row);
            }
        }
    }
    let facts = Facts {
        file: settings.model.clone().unwrap_or_default(),
        machine: machine::to_json(crate::boot::threads(settings)),
        load_seconds: rig.load_seconds,
        peak_bytes: machine::peak_memory(),
        weight_bytes: rig.weight_bytes(),
    };
    report::show(&facts, &rows, options)
}

/// A rig whose steps are as large as the settings say, and have room for one row of each sequence and a prompt.
fn load(settings: &Settings, context: usize, sequences: usize) -> Result<Rig> {
    let rows = (settings.batch_size as usize).max(sequences + 1);
    let size = Size { rows, outputs: sequences + 1, context };
    Rig::load(settings, size, |model| Box::new(Attention::new(&model.graph)))
}

/// Samples of a test for each bed; one more of each is run first and not counted.
fn measure(
    rig: &mut Rig,
    beds: &mut [Bed],
    test: Test,
    repeat: usize,
    floor: Option<&Floor>,
) -> Result<Vec<Vec<Sample>>> {
    let mut samples = vec![Vec::with_capacity(repeat); beds.len()];
    for bed in beds.iter_mut() {
        bed.prepare(rig, test)?;
        bed.sample(rig, test, None)?;
    }
    for round in 0..repeat {
        for place in 0..beds.len() {
            let i = if round % 2 == 0 { place } else { beds.len() - 1 - place };
            samples[i].push(beds[i].sample(rig, test, floor)?);
        }
    }
    Ok(samples)
}
