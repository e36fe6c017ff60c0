//! What a bench found: table, JSON and plot.

use std::path::PathBuf;

use anyhow::Result;
use serde_json::{Value, json};

use super::Options;
use super::test::{Kind, Test};
use super::work::Sample;
use crate::measure;
use crate::measure::plot::{self, Axis, Chart, Scale, Series, Style};
use crate::measure::stats::{self, Spread};
use crate::measure::table::{Table, number};
use crate::memory::show as show_bytes;

/// What holds for all tests.
pub struct Facts {
    /// The model.
    pub file: PathBuf,
    /// Where it ran.
    pub machine: Value,
    /// Seconds until the first step could run.
    pub load_seconds: f64,
    /// Most memory held at once.
    pub peak_bytes: Option<u64>,
    /// Bytes of weights that a token reads.
    pub weight_bytes: f64,
}

/// The samples of one test in one pair of codecs.
pub struct Row {
    /// The test.
    pub test: Test,
    /// The pair.
    pub kv: String,
    /// Bytes of a token's keys and values.
    pub token_bytes: f64,
    /// Its samples.
    pub samples: Vec<Sample>,
}

impl Row {
    /// Tokens a second.
    pub fn speed(&self) -> Spread {
        Spread::of(&self.each(Sample::speed))
    }

    fn each(&self, value: impl Fn(&Sample) -> f64) -> Vec<f64> {
        self.samples.iter().map(value).collect()
    }

    /// Median of a value that only samples with a floor have.
    fn median_of(&self, value: impl Fn(&Sample) -> Option<f64>) -> Option<f64> {
        let values: Vec<f64> = self.samples.iter().filter_map(value).collect();
        (!values.is_empty()).then(|| stats::median(&values))
    }

    fn to_json(&self) -> Value {
        let Test { kind, tokens, depth, sequences } = self.test;
        let sample = |s: &Sample| {
            json!({
                "tokens": s.tokens,
                "steps": s.steps,
                "seconds": s.seconds,
                "longest_step": s.longest,
                "bandwidth": s.bandwidth,
            })
        };
        json!({
            "test": kind.name(),
            "name": self.test.to_string(),
            "tokens": tokens,
            "depth": depth,
            "sequences": sequences,
            "kv": self.kv,
            "kv_bytes_per_token": self.token_bytes,
            "tokens_per_second": self.speed().to_json(),
            "longest_step_seconds": Spread::of(&self.each(|s| s.longest)).to_json(),
            "bytes_per_step": stats::median(&self.each(|s| s.bytes / s.steps as f64)),
            "bytes_per_second": stats::median(&self.each(|s| s.bytes / s.seconds)),
            "floor_tokens_per_second": self.median_of(Sample::floor),
            "share_of_floor": self.median_of(Sample::share),
            "samples": self.samples.iter().map(sample).collect::<Vec<_>>(),
        })
    }
}

/// Prints the results and writes the files that are asked for.
///
/// # Errors
/// A file that can't be written.
pub fn show(facts: &Facts, rows: &[Row], options: &Options) -> Result<()> {
    let json = to_json(facts, rows);
    match options.as_json {
        true => println!("{json:#}"),
        false => print!("{}", in_words(facts, rows)),
    }
    if let Some(path) = &options.json {
        measure::write(path, &format!("{json:#}\n"))?;
    }
    if let Some(path) = &options.svg {
        measure::write(path, &plot::page(&charts(rows)))?;
    }
    Ok(())
}

fn to_json(facts: &Facts, rows: &[Row]) -> Value {
    json!({
        "model": facts.file.display().to_string(),
        "machine": facts.machine,
        "load_seconds": facts.load_seconds,
        "peak_bytes": facts.peak_bytes,
        "weight_bytes_per_token": facts.weight_bytes,
        "tests": rows.iter().map(Row::to_json).collect::<Vec<_>>(),
    })
}

fn in_words(facts: &Facts, rows: &[Row]) -> String {
    let columns = ["test", "KV", "tokens/s", "min", "max", "longest ms", "MB/step", "GB/s", "floor tokens/s", "share"];
    let mut table = Table::new(&columns);
    for row in rows {
        table.row(vec![
            row.test.to_string(),
            row.kv.clone(),
            number(row.speed().median),
            number(row.speed().min),
            number(row.speed().max),
            number(1e3 * stats::median(&row.each(|s| s.longest))),
            number(1e-6 * stats::median(&row.each(|s| s.bytes / s.steps as f64))),
            number(1e-9 * stats::median(&row.each(|s| s.bytes / s.seconds))),
            row.median_of(Sample::floor).map_or("-".to_owned(), number),
            row.median_of(Sample::share).map_or("-".to_owned(), |share| format!("{:.0} %", 100.0 * share)),
        ]);
    }
    let all: Vec<f64> = rows.iter().flat_map(|row| &row.samples).filter_map(|s| s.bandwidth).collect();
    let mut out = format!("{table}\n");
    let mut line = |what: &str, text: String| out.push_str(&format!("{what:<12} {text}\n"));
    line("model", facts.file.display().to_string());
    let of = |key: &str| facts.machine[key].to_string().replace('"', "");
    line("machine", format!("{}, {}, {} threads", of("processor"), of("instructions"), of("threads")));
    line("loading", format!("{:.2} s", facts.load_seconds));
    if let Some(bytes) = facts.peak_bytes {
        line("memory", format!("{} at most", show_bytes(bytes as f64)));
    }
    if !all.is_empty() {
        let Spread { median, min, max } = Spread::of(&all);
        line("bandwidth", format!("{:.1} GB/s ({:.1} to {:.1})", 1e-9 * median, 1e-9 * min, 1e-9 * max));
    }
    out
}

/// Speed over depth, and over the number of sequences.
fn charts(rows: &[Row]) -> Vec<Chart> {
    let mut kinds: Vec<&str> = rows.iter().map(|row| row.kv.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let of_kind = |kind: Kind, kv: &str, x: fn(&Test) -> usize, y: &dyn Fn(&Row) -> f64| -> Vec<(f64, f64)> {
        let rows = rows.iter().filter(|row| row.test.kind == kind && row.kv == kv);
        rows.map(|row| (x(&row.test) as f64, y(row))).collect()
    };
    let speed = |row: &Row| row.speed().median;
    let floor = |row: &Row| row.median_of(Sample::floor).unwrap_or(f64::NAN);
    let line = |name: String, style, points| Series { name, style, points };
    let axis = |title| Axis { title, scale: Scale::Linear };
    let mut charts = Vec::new();
    for (kind, title, floors) in [
        (Kind::Prefill, "Prompts", false),
        (Kind::Decode, "Decoding, one sequence", true),
        (Kind::Mixed, "Both", false),
    ] {
        let mut series = Vec::new();
        for kv in &kinds {
            series.push(line((*kv).to_owned(), Style::Line, of_kind(kind, kv, |t| t.depth, &speed)));
            if floors {
                series.push(line(format!("{kv}, floor"), Style::Dashed, of_kind(kind, kv, |t| t.depth, &floor)));
            }
        }
        charts.push(Chart { title: title.to_owned(), x: axis("tokens before"), y: axis("tokens/s"), series });
    }
    let mut series = Vec::new();
    for kv in &kinds {
        for (kind, what) in [(Kind::Batch, "own"), (Kind::Shared, "shared prefix")] {
            series.push(line(format!("{kv}, {what}"), Style::Line, of_kind(kind, kv, |t| t.sequences, &speed)));
        }
    }
    charts.push(Chart {
        title: "Decoding, many sequences".to_owned(),
        x: axis("sequences"),
        y: axis("tokens/s"),
        series,
    });
    charts.iter_mut().for_each(|chart| chart.series.retain(|s| s.points.iter().any(|p| p.1.is_finite())));
    charts.retain(|chart| !chart.series.is_empty());
    charts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(kind: Kind, depth: usize, seconds: &[f64], bandwidth: Option<f64>) -> Row {
        let test = Test { kind, tokens: 10, depth, sequences: 1 };
        let sample = |&seconds: &f64| Sample { tokens: 10, steps: 10, seconds, longest: 0.5, bytes: 5e9, bandwidth };
        Row { test, kv: "f16".to_owned(), token_bytes: 8.0, samples: seconds.iter().map(sample).collect() }
    }

    fn facts() -> Facts {
        let machine = json!({"processor": "p", "instructions": "avx2", "threads": 2});
        Facts { file: "m.gguf".into(), machine, load_seconds: 0.5, peak_bytes: Some(1 << 20), weight_bytes: 5e8 }
    }

    #[test]
    fn a_share_is_the_floors_time_over_the_time_taken() {
        let row = row(Kind::Decode, 0, &[1.0, 2.0, 4.0], Some(1e10));
        assert_eq!(row.speed(), Spread { median: 5.0, min: 2.5, max: 10.0 });
        let json = row.to_json();
        assert_eq!(json["share_of_floor"], 0.25);
        assert_eq!(json["floor_tokens_per_second"], 20.0);
        assert_eq!(json["bytes_per_step"], 5e8);
        assert_eq!(json["samples"].as_array().unwrap().len(), 3);
    }

    #[test]
    fn without_a_bandwidth_there_is_no_share() {
        let rows = [row(Kind::Decode, 0, &[1.0], None)];
        assert_eq!(to_json(&facts(), &rows)["tests"][0]["share_of_floor"], Value::Null);
        assert!(!in_words(&facts(), &rows).contains("bandwidth"));
    }

    #[test]
    fn charts_show_only_kinds_that_were_run() {
        let rows = [row(Kind::Decode, 0, &[1.0], Some(1e10)), row(Kind::Decode, 100, &[2.0], Some(1e10))];
        let charts = charts(&rows);
        assert_eq!(charts.len(), 1);
        assert_eq!(charts[0].series[0].points, [(0.0, 10.0), (100.0, 5.0)]);
        assert_eq!(charts[0].series[1].name, "f16, floor");
    }
}
