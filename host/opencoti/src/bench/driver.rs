//! Tests by request, for programs that alternate this bench with another: one JSON object a line in, one out.

use std::io::{BufRead, Write};

use anyhow::{Context, Result, bail};
use opencoti_registry::Registry;
use serde_json::{Value, json};

use super::test::{Kind, Test, needs};
use super::work::{Bed, Sample};
use crate::measure::codecs::Pair;
use crate::measure::floor::Floor;
use crate::measure::machine;
use crate::measure::rig::Rig;
use crate::settings::Settings;

/// Longest sequence of a request.
const MAX_CONTEXT: usize = 1 << 20;

/// A test that is asked for.
#[derive(Debug, PartialEq)]
struct Request {
    kv: String,
    test: Test,
}

impl Request {
    fn parse(line: &str, most_sequences: usize) -> Result<Request> {
        let value: Value = serde_json::from_str(line).context("the request is no JSON")?;
        let number = |key: &str, default: u64, most: usize| match value.get(key).map_or(Some(default), Value::as_u64) {
            Some(n) if n <= most as u64 => Ok(n as usize),
            _ => bail!("`{key}` is {}, expected a whole number up to {most}", value[key]),
        };
        let text = |key: &str, default: &str| match value.get(key) {
            None => Ok(default.to_owned()),
            Some(Value::String(text)) => Ok(text.clone()),
            Some(other) => bail!("`{key}` is {other}, expected a string"),
        };
        let name = text("test", "decode")?;
        let kind = Kind::of(&name).with_context(|| {
            let names: Vec<&str> = Kind::ALL.iter().map(|kind| kind.name()).collect();
            format!("`test` is `{name}`, expected one of {}", names.join(", "))
        })?;
        let many = matches!(kind, Kind::Batch | Kind::Shared);
        let test = Test {
            kind,
            tokens: number("tokens", 64, MAX_CONTEXT)?.max(1),
            depth: number("depth", 0, MAX_CONTEXT)?,
            sequences: number("sequences", 1, if many { most_sequences } else { 1 })?.max(1),
        };
        Ok(Request { kv: text("kv", "")?, test })
    }
}

/// Answers requests until the input ends; those of many sequences have at most so many.
pub fn run(settings: &Settings, registry: &Registry, most_sequences: usize, with_floor: bool) -> Result<()> {
    let mut rig = super::load(settings, MAX_CONTEXT, most_sequences)?;
    let threads = crate::boot::threads(settings);
    let floor = with_floor.then(|| Floor::new(threads));
    say(&json!({"ready": true, "load_seconds": rig.load_seconds, "machine": machine::to_json(threads)}))?;
    let mut bed: Option<(String, Bed)> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line.context("standard input can't be read")?;
        let answer = Request::parse(&line, most_sequences).and_then(|request| {
            let bed = bed_for(settings, registry, &rig, &mut bed, &request)?;
            bed.prepare(&mut rig, request.test)?;
            bed.sample(&mut rig, request.test, floor.as_ref())
        });
        say(&match answer {
            Ok(sample) => to_json(&sample),
            Err(e) => {
                // Its sequences may be half done.
                bed = None;
                json!({"error": format!("{e:#}")})
            }
        })?;
    }
    Ok(())
}

/// The bed of the request before, if it suits, else a new one.
fn bed_for<'a>(
    settings: &Settings,
    registry: &Registry,
    rig: &Rig,
    bed: &'a mut Option<(String, Bed)>,
    request: &Request,
) -> Result<&'a mut Bed> {
    let (tokens, sequences) = needs(&[request.test]);
    if !bed.as_ref().is_some_and(|(kv, bed)| *kv == request.kv && bed.has_room(tokens, sequences)) {
        // The old one's memory first.
        *bed = None;
        let pair = match request.kv.as_str() {
            "" => Pair::configured(settings),
            text => Pair::parse(settings, text)?,
        };
        let cache = rig.cache(&pair, registry, tokens, sequences)?;
        *bed = Some((request.kv.clone(), Bed::new(rig, cache)));
    }
    bed.as_mut().map(|(_, bed)| bed).context("no cache was made")
}

fn to_json(sample: &Sample) -> Value {
    json!({
        "tokens": sample.tokens,
        "seconds": sample.seconds,
        "longest_step": sample.longest,
        "bytes": sample.bytes,
        "bandwidth": sample.bandwidth,
        "peak_bytes": machine::peak_memory(),
    })
}

fn say(value: &Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{value}").and_then(|()| out.flush()).context("standard output is closed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_a_test_and_has_defaults() {
        let request = Request::parse(r#"{"test": "shared", "kv": "q8_0", "depth": 2048, "sequences": 4}"#, 4).unwrap();
        let test = Test { kind: Kind::Shared, tokens: 64, depth: 2048, sequences: 4 };
        assert_eq!(request, Request { kv: "q8_0".to_owned(), test });
    }

    #[test]
    fn a_wrong_request_is_refused_by_its_field() {
        for (line, part) in [
            ("nonsense", "no JSON"),
            (r#"{"test": "speed"}"#, "`test` is `speed`, expected one of prefill, decode"),
            (r#"{"depth": -1}"#, "`depth` is -1, expected a whole number up to 1048576"),
            (r#"{"test": "decode", "sequences": 2}"#, "`sequences` is 2, expected a whole number up to 1"),
            (r#"{"test": "batch", "sequences": 5}"#, "`sequences` is 5, expected a whole number up to 4"),
            (r#"{"kv": 4}"#, "`kv` is 4, expected a string"),
        ] {
            let error = format!("{:#}", Request::parse(line, 4).unwrap_err());
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
