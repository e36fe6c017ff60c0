//! `lab kld` and `lab ppl`: divergence from the reference, teacher-forced, and perplexity.

use anyhow::{Result, bail};
use opencoti_compute::cpu::attention::Attention;
use opencoti_plugin_api::PAGE_TOKENS;
use opencoti_registry::Registry;
use serde_json::json;

use super::gates::{Finding, Metrics};
use super::lockstep::{self, Pace, Track};
use super::report::{self, Column, Shape, percent, plain};
use super::{Options as Common, exact, text};
use crate::boot;
use crate::measure::codecs::{self, Pair};
use crate::measure::machine;
use crate::measure::rig::{Rig, Size};
use crate::settings::Settings;

/// What is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Its name.
    pub name: Name,
    /// The pair that others are compared with.
    pub reference: String,
    /// Tokens of a passage.
    pub tokens: usize,
    /// Of these, the last ones that are scored; those before are context.
    pub scored: usize,
    /// Passages; 0 for as many as the text has.
    pub passages: usize,
    /// Passages that run at the same time.
    pub together: usize,
    /// Rows of each in a scored step.
    pub rows: usize,
}

/// Under which name it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// `lab kld`.
    Kld,
    /// `lab ppl`.
    Ppl,
}

const COLUMNS: [Column; 13] = [
    plain("bits", "bits/value"),
    plain("bytes", "bytes/token"),
    plain("kld", "KLD mean"),
    plain("kld_median", "median"),
    plain("kld_p99", "99 %"),
    plain("kld_max", "max"),
    plain("tv", "TV"),
    percent("top1", "same top %"),
    plain("ppl", "PPL"),
    plain("ppl_error", "±"),
    plain("ppl_ratio", "PPL ratio"),
    plain("speed", "tokens/s"),
    plain("speed_ratio", "speed ratio"),
];

/// How results are shown.
pub const fn shape(name: Name) -> Shape {
    Shape {
        name: match name {
            Name::Kld => "kld",
            Name::Ppl => "ppl",
        },
        columns: &COLUMNS,
        plotted: plain("kld", "mean KLD, nats"),
        gates: &["ppl_ratio<=1.05"],
    }
}

/// Runs it; whether every gate was passed.
///
/// # Errors
/// What kept it from being run.
pub fn run(settings: &Settings, registry: &Registry, common: &Common, own: &Options) -> Result<bool> {
    check(own)?;
    let mut pairs = with_reference(settings, &own.reference, codecs::pairs(settings, &common.kv)?)?;
    let shape = shape(own.name);
    let gates = shape.gates(common, &pairs)?;
    let mut rig = load(settings, own)?;
    let exact = exact::equalise(&mut pairs, registry, &rig.model.graph)?;
    let tokens = common.text.tokens(&rig.model.tokenizer)?;
    let passages = text::passages(&tokens, own.tokens, own.passages, text::begin(&rig.model.tokenizer))?;
    let findings = measure(&mut rig, registry, &pairs, &passages, own)?;
    let facts = json!({
        "model": settings.model.as_ref().map(|path| path.display().to_string()),
        "machine": machine::to_json(boot::threads(settings)),
        "passages": passages.len(),
        "tokens": own.tokens,
        "scored": own.scored,
        "rows": own.rows,
        "exact_tokens": exact,
        "positions": passages.len() * own.scored,
    });
    report::show(&shape, common, facts, &findings, &gates)
}

/// What was found of every pair; the first is the reference.
///
/// # Errors
/// A codec that can't store this model, or fails; too little memory.
pub fn measure(
    rig: &mut Rig,
    registry: &Registry,
    pairs: &[Pair],
    passages: &[Vec<u32>],
    own: &Options,
) -> Result<Vec<Finding>> {
    let pace = Pace { first: own.tokens - 1 - own.scored, rows: own.rows };
    let room = own.together * own.tokens.next_multiple_of(PAGE_TOKENS);
    let mut tracks = Vec::new();
    for pair in pairs {
        tracks.push(Track::new(rig, rig.cache(pair, registry, room, own.together)?));
    }
    for (done, together) in passages.chunks(own.together).enumerate() {
        lockstep::run(rig, &mut tracks, together, pace)?;
        let end = (done * own.together + together.len()).min(passages.len());
        eprintln!("{end} of {} passages", passages.len());
    }
    let finding = |(pair, track): (&Pair, &Track)| finding(&pair.label, track, &tracks[0]);
    let mut findings: Vec<Finding> = pairs.iter().zip(&tracks).map(finding).collect();
    findings[0].is_reference = true;
    Ok(findings)
}

fn finding(label: &str, track: &Track, reference: &Track) -> Finding {
    let tally = &track.tally;
    let metrics = Metrics::from([
        ("bits", track.bits),
        ("bytes", track.bytes),
        ("kld", tally.kld()),
        ("kld_median", tally.kld_quantile(0.5)),
        ("kld_p99", tally.kld_quantile(0.99)),
        ("kld_max", tally.kld_quantile(1.0)),
        ("tv", tally.tv()),
        ("top1", tally.top1()),
        ("ppl", tally.perplexity()),
        ("ppl_error", tally.perplexity_error()),
        ("ppl_ratio", tally.perplexity() / reference.tally.perplexity()),
        ("speed", track.speed()),
        ("speed_ratio", track.speed() / reference.speed()),
    ]);
    Finding { label: label.to_owned(), is_reference: false, metrics }
}

/// Refuses sizes that don't suit each other.
///
/// # Errors
/// The size, and what was expected.
pub fn check(own: &Options) -> Result<()> {
    let Options { tokens, scored, .. } = *own;
    if scored == 0 || scored >= tokens {
        bail!("`--scored` is {scored}, expected 1 to {} for passages of {tokens} tokens", tokens.saturating_sub(1));
    }
    Ok(())
}

/// The reference first, then the others.
///
/// # Errors
/// A reference that is no pair of codecs.
pub fn with_reference(settings: &Settings, reference: &str, pairs: Vec<Pair>) -> Result<Vec<Pair>> {
    let reference = Pair::parse(settings, reference)?;
    let others: Vec<Pair> = pairs.into_iter().filter(|pair| pair.label != reference.label).collect();
    if others.is_empty() {
        bail!("there is nothing to compare `{}` with; name other codecs with `--kv`", reference.label);
    }
    Ok(std::iter::once(reference).chain(others).collect())
}

/// A rig whose steps have room for every scored row.
pub fn load(settings: &Settings, own: &Options) -> Result<Rig> {
    let outputs = own.rows * own.together;
    let size = Size { rows: (settings.batch_size as usize).max(outputs), outputs, context: own.tokens };
    Rig::load(settings, size, |model| Box::new(Attention::new(&model.graph)))
}
