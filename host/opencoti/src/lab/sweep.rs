//! `lab sweep`: every codec that is loaded, and which of them none surpasses.

use anyhow::{Result, bail};
use opencoti_registry::Registry;
use serde_json::json;

use super::gates::Finding;
use super::report::{self, Column, Shape, percent, plain};
use super::{Options as Common, exact, kld, text};
use crate::boot;
use crate::measure::codecs::Pair;
use crate::measure::machine;
use crate::measure::rig::Rig;
use crate::settings::Settings;

/// What is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How each pair is measured.
    pub kld: kld::Options,
    /// Whether each codec is also tried for keys alone and for values alone, with the reference on the other side.
    pub sides: bool,
}

const COLUMNS: [Column; 10] = [
    plain("bits", "bits/value"),
    plain("bytes", "bytes/token"),
    plain("kld", "KLD mean"),
    plain("kld_p99", "99 %"),
    plain("tv", "TV"),
    percent("top1", "same top %"),
    plain("ppl_ratio", "PPL ratio"),
    plain("speed", "tokens/s"),
    plain("speed_ratio", "speed ratio"),
    plain("front", "on front"),
];

const SHAPE: Shape = Shape { name: "sweep", columns: &COLUMNS, plotted: plain("kld", "mean KLD, nats"), gates: &[] };

/// Runs it; whether every gate was passed.
///
/// # Errors
/// What kept it from being run.
pub fn run(settings: &Settings, registry: &Registry, common: &Common, own: &Options) -> Result<bool> {
    kld::check(&own.kld)?;
    let mut rig = kld::load(settings, &own.kld)?;
    let mut pairs = usable(&rig, registry, pairs(settings, registry, common, own)?)?;
    let gates = SHAPE.gates(common, &pairs)?;
    let exact = exact::equalise(&mut pairs, registry, &rig.model.graph)?;
    let tokens = common.text.tokens(&rig.model.tokenizer)?;
    let passages = text::passages(&tokens, own.kld.tokens, own.kld.passages, text::begin(&rig.model.tokenizer))?;
    let mut findings = kld::measure(&mut rig, registry, &pairs, &passages, &own.kld)?;
    mark_front(&mut findings);
    // The largest first: the ladder as one reads it.
    findings.sort_by(|a, b| f64::total_cmp(&b.metrics["bits"], &a.metrics["bits"]));
    let facts = json!({
        "model": settings.model.as_ref().map(|path| path.display().to_string()),
        "machine": machine::to_json(boot::threads(settings)),
        "passages": passages.len(),
        "tokens": own.kld.tokens,
        "scored": own.kld.scored,
        "rows": own.kld.rows,
        "exact_tokens": exact,
    });
    report::show(&SHAPE, common, facts, &findings, &gates)
}

/// The pairs that are named, or all that the loaded codecs make.
fn pairs(settings: &Settings, registry: &Registry, common: &Common, own: &Options) -> Result<Vec<Pair>> {
    let reference = &own.kld.reference;
    let mut names = common.kv.clone();
    if names.is_empty() {
        names = registry.describe().iter().flat_map(|p| &p.codecs).map(|codec| codec.name.clone()).collect();
    }
    if own.sides {
        let one_sided = |name: &String| [format!("{name}:{reference}"), format!("{reference}:{name}")];
        names = names.iter().flat_map(|name| std::iter::once(name.clone()).chain(one_sided(name))).collect();
    }
    let own_side = format!("{reference}:{reference}");
    names.retain(|name| name != reference && *name != own_side);
    let pairs: Vec<Pair> = names.iter().map(|name| Pair::parse(settings, name)).collect::<Result<_>>()?;
    kld::with_reference(settings, reference, pairs)
}

/// Those that can store this model; the others are named.
fn usable(rig: &Rig, registry: &Registry, pairs: Vec<Pair>) -> Result<Vec<Pair>> {
    let (reference, others) = pairs.split_first().map_or((None, &[][..]), |(first, rest)| (Some(first), rest));
    let Some(reference) = reference else { bail!("no codec is loaded") };
    let mut usable = vec![reference.clone()];
    for pair in others {
        match rig.cache(pair, registry, 1, 1) {
            Ok(_) => usable.push(pair.clone()),
            Err(e) => eprintln!("{} is left out: {e:#}", pair.label),
        }
    }
    Ok(usable)
}

/// Marks the pairs of which no other is both as small and as near the reference, and better in one of the two.
fn mark_front(findings: &mut [Finding]) {
    let places: Vec<(f64, f64)> = findings.iter().map(|f| (f.metrics["bits"], f.metrics["kld"])).collect();
    for (finding, own) in findings.iter_mut().zip(&places) {
        let better = |other: &(f64, f64)| other.0 <= own.0 && other.1 <= own.1 && (other.0 < own.0 || other.1 < own.1);
        let on_front = own.1.is_finite() && !places.iter().any(better);
        finding.metrics.insert("front", f64::from(u8::from(on_front)));
    }
}

#[cfg(test)]
mod tests {
    use super::super::gates::Metrics;
    use super::*;

    #[test]
    fn the_front_is_what_none_surpasses() {
        let finding = |bits, kld| Finding {
            label: String::new(),
            is_reference: false,
            metrics: Metrics::from([("bits", bits), ("kld", kld)]),
        };
        let mut findings = [
            finding(16.0, 0.0),
            finding(8.5, 0.1),
            finding(8.0, 0.1),
            finding(4.0, 0.5),
            finding(5.0, 0.6),
            finding(2.0, f64::NAN),
        ];
        mark_front(&mut findings);
        let front: Vec<f64> = findings.iter().map(|f| f.metrics["front"]).collect();
        assert_eq!(front, [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]);
    }
}
