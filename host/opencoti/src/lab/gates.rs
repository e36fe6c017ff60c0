//! Gates: what must hold of the results. `kld<=0.01` of every pair, `q4_0.kld<0.5*q8_0.tv` of those named.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use serde_json::{Value, json};

use crate::measure::table::{Table, number};

/// What was found of one pair of codecs, by metric.
pub type Metrics = BTreeMap<&'static str, f64>;

/// A pair of codecs with what was found.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The pair.
    pub label: String,
    /// Whether the others are compared with it.
    pub is_reference: bool,
    /// What was found.
    pub metrics: Metrics,
}

/// A condition.
#[derive(Clone, Debug, PartialEq)]
pub struct Gate {
    text: String,
    left: Term,
    relation: Relation,
    right: Term,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Relation {
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

const RELATIONS: [(&str, Relation); 4] =
    [("<=", Relation::LessOrEqual), (">=", Relation::GreaterOrEqual), ("<", Relation::Less), (">", Relation::Greater)];

impl Relation {
    /// False of what is no number.
    fn holds(self, left: f64, right: f64) -> bool {
        match self {
            Relation::Less => left < right,
            Relation::LessOrEqual => left <= right,
            Relation::Greater => left > right,
            Relation::GreaterOrEqual => left >= right,
        }
    }
}

/// One side of a condition.
#[derive(Clone, Debug, PartialEq)]
enum Term {
    Number(f64),
    /// A metric of the pair named, or of each; times a factor.
    Metric {
        factor: f64,
        label: Option<String>,
        metric: &'static str,
    },
}

impl Term {
    fn parse(text: &str, gate: &str, metrics: &[&'static str], labels: &[&str]) -> Result<Term> {
        if let Ok(value) = text.parse::<f64>() {
            return Ok(Term::Number(value));
        }
        let (factor, name) = match text.split_once('*') {
            Some((factor, name)) => match factor.trim().parse::<f64>() {
                Ok(factor) => (factor, name.trim()),
                Err(_) => bail!("gate `{gate}`: `{factor}` is no number, expected NUMBER*METRIC"),
            },
            None => (1.0, text),
        };
        // Labels may have points of their own.
        let (label, metric) = match name.rsplit_once('.') {
            Some((label, metric)) => (Some(label.to_owned()), metric),
            None => (None, name),
        };
        let Some(&metric) = metrics.iter().find(|m| **m == metric) else {
            bail!("gate `{gate}`: `{metric}` is not measured here, expected one of {}", metrics.join(", "));
        };
        match label.as_deref().filter(|label| !labels.contains(label)) {
            Some(label) => {
                bail!("gate `{gate}`: `{label}` is not measured here, expected one of {}", labels.join(", "))
            }
            None => Ok(Term::Metric { factor, label, metric }),
        }
    }

    /// Whether it is of each pair.
    fn is_open(&self) -> bool {
        matches!(self, Term::Metric { label: None, .. })
    }

    fn value(&self, own: &Finding, all: &[Finding]) -> f64 {
        match self {
            Term::Number(value) => *value,
            Term::Metric { factor, label, metric } => {
                let named = label.as_ref().and_then(|label| all.iter().find(|finding| finding.label == *label));
                named.unwrap_or(own).metrics.get(metric).map_or(f64::NAN, |value| factor * value)
            }
        }
    }
}

impl Gate {
    /// Reads a condition over these metrics and pairs.
    ///
    /// # Errors
    /// The part that is not understood.
    pub fn parse(text: &str, metrics: &[&'static str], labels: &[&str]) -> Result<Gate> {
        let Some((sign, relation)) = RELATIONS.into_iter().find(|(sign, _)| text.contains(sign)) else {
            bail!("gate `{text}` compares nothing, expected METRIC<=NUMBER or PAIR.METRIC<=NUMBER*PAIR.METRIC");
        };
        let (left, right) = text.split_once(sign).unwrap_or((text, ""));
        let term = |side: &str| Term::parse(side.trim(), text, metrics, labels);
        Ok(Gate { text: text.to_owned(), left: term(left)?, relation, right: term(right)? })
    }

    /// Of every pair it speaks of: what it is, both values, whether it holds.
    fn verdicts(&self, findings: &[Finding]) -> Vec<Verdict> {
        let open = self.left.is_open() || self.right.is_open();
        let own = findings.iter().filter(|f| !f.is_reference).take(if open { usize::MAX } else { 1 });
        own.map(|own| {
            let (left, right) = (self.left.value(own, findings), self.right.value(own, findings));
            Verdict {
                gate: self.text.clone(),
                label: if open { own.label.clone() } else { String::new() },
                left,
                right,
                passed: self.relation.holds(left, right),
            }
        })
        .collect()
    }
}

/// What became of a gate.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    gate: String,
    label: String,
    left: f64,
    right: f64,
    passed: bool,
}

impl Verdict {
    /// Whether it holds.
    pub fn passed(&self) -> bool {
        self.passed
    }

    /// As JSON.
    pub fn to_json(&self) -> Value {
        let Verdict { gate, label, left, right, passed } = self;
        json!({"gate": gate, "kv": label, "left": left, "right": right, "passed": passed})
    }
}

/// Reads gates before anything is run.
///
/// # Errors
/// The first that is not understood.
pub fn parse(texts: &[String], metrics: &[&'static str], labels: &[&str]) -> Result<Vec<Gate>> {
    texts.iter().map(|text| Gate::parse(text, metrics, labels)).collect()
}

/// The verdict on every gate.
pub fn judge(gates: &[Gate], findings: &[Finding]) -> Vec<Verdict> {
    gates.iter().flat_map(|gate| gate.verdicts(findings)).collect()
}

/// Verdicts for people.
pub fn table(verdicts: &[Verdict]) -> Table {
    let mut table = Table::new(&["gate", "KV", "left", "right", "verdict"]);
    for v in verdicts {
        let verdict = if v.passed { "passed" } else { "FAILED" };
        table.row(vec![v.gate.clone(), v.label.clone(), number(v.left), number(v.right), verdict.to_owned()]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    const METRICS: [&str; 2] = ["kld", "top1"];

    fn findings() -> Vec<Finding> {
        let finding = |label: &str, is_reference, kld, top1| Finding {
            label: label.to_owned(),
            is_reference,
            metrics: Metrics::from([("kld", kld), ("top1", top1)]),
        };
        vec![
            finding("f16", true, 0.0, 1.0),
            finding("q8_0", false, 0.01, 0.99),
            finding("a+g=1.5", false, f64::NAN, 0.5),
        ]
    }

    fn judged(text: &str) -> Vec<(String, bool)> {
        let gate = Gate::parse(text, &METRICS, &["f16", "q8_0", "a+g=1.5"]).unwrap();
        judge(&[gate], &findings()).into_iter().map(|v| (v.label, v.passed)).collect()
    }

    #[test]
    fn a_gate_without_a_pair_is_of_each_but_the_reference() {
        let each = |a, b| vec![("q8_0".to_owned(), a), ("a+g=1.5".to_owned(), b)];
        assert_eq!(judged("kld<=0.01"), each(true, false));
        assert_eq!(judged("top1 > 0.6"), each(true, false));
        assert_eq!(judged("kld < q8_0.kld"), each(false, false));
        assert_eq!(judged("top1 <= 0.999*q8_0.top1"), each(false, true));
    }

    #[test]
    fn a_gate_of_named_pairs_is_judged_once() {
        assert_eq!(judged("a+g=1.5.top1 < 0.6*q8_0.top1"), [(String::new(), true)]);
        assert_eq!(judged("q8_0.kld >= 0.02"), [(String::new(), false)]);
    }

    #[test]
    fn what_is_no_number_passes_nothing() {
        assert_eq!(judged("a+g=1.5.kld < 1"), [(String::new(), false)]);
        assert_eq!(judged("a+g=1.5.kld >= 1"), [(String::new(), false)]);
    }

    #[test]
    fn what_is_no_gate_is_refused_by_its_part() {
        for (text, part) in [
            ("kld", "compares nothing"),
            ("speed<1", "`speed` is not measured here, expected one of kld, top1"),
            ("q5.kld<1", "`q5` is not measured here, expected one of f16, q8_0"),
            ("x*kld<1", "`x` is no number"),
        ] {
            let error = Gate::parse(text, &METRICS, &["f16", "q8_0"]).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
