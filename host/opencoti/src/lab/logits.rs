//! `lab logits`: the logits of every token, written as they are, for comparisons with other engines.

use std::io::{BufWriter, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use opencoti_compute::cpu::attention::Attention;
use opencoti_kv::{BatchItem, Outputs};
use opencoti_registry::Registry;

use super::{Options as Common, text};
use crate::measure::codecs;
use crate::measure::rig::{Rig, Size};
use crate::settings::Settings;

/// What is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The file: f32, little-endian, a row for each token.
    pub out: PathBuf,
    /// Leading tokens that are run; 0 for all.
    pub tokens: usize,
    /// Rows of a step.
    pub rows: usize,
}

/// Writes the logits; there are no gates.
///
/// # Errors
/// What kept it from being run.
pub fn run(settings: &Settings, registry: &Registry, common: &Common, own: &Options) -> Result<bool> {
    let pairs = codecs::pairs(settings, &common.kv)?;
    let [pair] = pairs.as_slice() else { bail!("`--kv` names {} pairs of codecs, expected one", pairs.len()) };
    let size = Size { rows: own.rows, outputs: own.rows, context: usize::MAX };
    let mut rig = Rig::load(settings, size, |model| Box::new(Attention::new(&model.graph)))?;
    let tokens = tokens(&rig, common, own)?;
    let mut cache = rig.cache(pair, registry, tokens.len(), 1)?;
    let failed = || format!("{} could not be written", own.out.display());
    let mut file = BufWriter::new(std::fs::File::create(&own.out).with_context(failed)?);
    let seq = cache.create();
    let mut width = 0;
    for part in tokens.chunks(own.rows) {
        let results = rig.step(&mut cache, &[BatchItem { seq, tokens: part, outputs: Outputs::All }])?;
        for row in 0..results.rows() {
            let logits = results.logits(row);
            width = logits.len();
            logits.iter().try_for_each(|value| file.write_all(&value.to_le_bytes())).with_context(failed)?;
        }
    }
    file.flush().with_context(failed)?;
    println!("wrote {} rows of {width} logits (f32, little-endian) to {}", tokens.len(), own.out.display());
    Ok(true)
}

/// Of a text, with the token that begins it; ids are run as they are.
fn tokens(rig: &Rig, common: &Common, own: &Options) -> Result<Vec<u32>> {
    let mut tokens = common.text.tokens(&rig.model.tokenizer)?;
    if let (text::Source::Text(_), Some(begin)) = (&common.text, text::begin(&rig.model.tokenizer)) {
        tokens.insert(0, begin);
    }
    if tokens.is_empty() || tokens.len() < own.tokens {
        bail!("{} has {} tokens, expected at least {}", common.text.path().display(), tokens.len(), own.tokens.max(1));
    }
    if own.tokens > 0 {
        tokens.truncate(own.tokens);
    }
    Ok(tokens)
}
