//! What an experiment found: table, JSON, plot and verdicts.

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::Options;
use super::gates::{self, Finding, Gate};
use crate::measure;
use crate::measure::codecs::Pair;
use crate::measure::plot::{self, Axis, Chart, Scale, Series, Style};
use crate::measure::table::{Table, number};

/// A metric in a table.
#[derive(Clone, Copy)]
pub struct Column {
    /// Its name in gates and JSON.
    pub metric: &'static str,
    /// Its heading.
    pub title: &'static str,
    /// Factor for people: 100 for shares in percent.
    pub factor: f64,
}

/// A metric shown as it is.
pub const fn plain(metric: &'static str, title: &'static str) -> Column {
    Column { metric, title, factor: 1.0 }
}

/// A share shown in percent.
pub const fn percent(metric: &'static str, title: &'static str) -> Column {
    Column { metric, title, factor: 100.0 }
}

/// How an experiment is shown.
pub struct Shape {
    /// Its name.
    pub name: &'static str,
    /// What is shown of each pair.
    pub columns: &'static [Column],
    /// The metric that the plot shows over the bits of a value.
    pub plotted: Column,
    /// Gates when none are given.
    pub gates: &'static [&'static str],
}

impl Shape {
    /// Names of what is measured.
    fn metrics(&self) -> Vec<&'static str> {
        self.columns.iter().map(|column| column.metric).collect()
    }

    /// The gates that hold for an experiment on these pairs.
    ///
    /// # Errors
    /// One that is not understood.
    pub fn gates(&self, options: &Options, pairs: &[Pair]) -> Result<Vec<Gate>> {
        let labels: Vec<&str> = pairs.iter().map(|pair| pair.label.as_str()).collect();
        let texts = match options.gates.is_empty() {
            true => self.gates.iter().map(|&gate| gate.to_owned()).collect(),
            false => options.gates.clone(),
        };
        gates::parse(&texts, &self.metrics(), &labels)
    }
}

/// Shows what was found; `facts` are what else JSON tells. Whether every gate was passed.
///
/// # Errors
/// A file that can't be written.
pub fn show(shape: &Shape, options: &Options, facts: Value, findings: &[Finding], gates: &[Gate]) -> Result<bool> {
    let verdicts = gates::judge(gates, findings);
    let passed = verdicts.iter().all(gates::Verdict::passed);
    let mut json = json!({
        "experiment": shape.name,
        "text": options.text.path().display().to_string(),
        "findings": findings.iter().map(finding).collect::<Vec<_>>(),
        "gates": verdicts.iter().map(gates::Verdict::to_json).collect::<Vec<_>>(),
        "passed": passed,
    });
    if let (Some(json), Value::Object(facts)) = (json.as_object_mut(), facts) {
        json.extend(facts);
    }
    match options.as_json {
        true => println!("{json:#}"),
        false => {
            println!("{}", table(shape, findings));
            println!("{}", gates::table(&verdicts));
            println!("{}", if passed { "Every gate was passed." } else { "A gate was failed." });
        }
    }
    if let Some(path) = &options.json {
        measure::write(path, &format!("{json:#}\n"))?;
    }
    if let Some(path) = &options.svg {
        measure::write(path, &plot::page(&[chart(shape, findings)]))?;
    }
    Ok(passed)
}

fn finding(finding: &Finding) -> Value {
    let mut fields = Map::from_iter([
        ("kv".to_owned(), json!(finding.label)),
        ("reference".to_owned(), json!(finding.is_reference)),
    ]);
    fields.extend(finding.metrics.iter().map(|(&name, &value)| (name.to_owned(), json!(value))));
    Value::Object(fields)
}

fn table(shape: &Shape, findings: &[Finding]) -> Table {
    let titles: Vec<&str> = std::iter::once("KV").chain(shape.columns.iter().map(|c| c.title)).collect();
    let mut table = Table::new(&titles);
    for finding in findings {
        let value = |c: &Column| number(c.factor * finding.metrics.get(c.metric).copied().unwrap_or(f64::NAN));
        table.row(std::iter::once(finding.label.clone()).chain(shape.columns.iter().map(value)).collect());
    }
    table
}

/// Fidelity over size: each pair a point, the lower and the further left the better.
fn chart(shape: &Shape, findings: &[Finding]) -> Chart {
    let value = |finding: &Finding, metric| finding.metrics.get(metric).copied().unwrap_or(f64::NAN);
    let series = findings.iter().filter(|f| !f.is_reference).map(|finding| Series {
        name: finding.label.clone(),
        style: Style::Points,
        points: vec![(value(finding, "bits"), value(finding, shape.plotted.metric))],
    });
    Chart {
        title: format!("{} by size", shape.plotted.title),
        x: Axis { title: "bits a value", scale: Scale::Linear },
        y: Axis { title: shape.plotted.title, scale: Scale::Log },
        series: series.collect(),
    }
}
