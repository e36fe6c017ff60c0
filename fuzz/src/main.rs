//! Fuzzing of everything that reads bytes from outside, for a bounded time and with nothing but Rust.
//!
//!     opencoti-fuzz [TARGET] [--seconds N] [--seed N]
//!
//! Each target takes bytes and answers with the *class* of its outcome: an error's text without its numbers, or what was
//! accepted. An input that reaches a class nobody reached before joins the corpus and is mutated further, which stands in
//! for coverage feedback. A panic, or memory far beyond the input's size, is a finding: the input is kept under
//! `fuzz/artifacts/` and the run fails. Past findings live in `fuzz/regressions/TARGET/` and are replayed first.

mod memory;
mod mutate;
mod targets;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use targets::{TARGETS, Target};

/// Memory a target may take beyond its input: parsing may copy, not invent.
const MEMORY_LIMIT: usize = 64 << 20;
/// Words of an outcome that make its class.
const CLASS_WORDS: usize = 8;
/// Most inputs kept to be mutated further; beyond that a new one replaces an old one.
const MAX_CORPUS: usize = 2000;

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("fuzz: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let (mut only, mut seconds, mut seed) = (None, 10u64, 1u64);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number = || args.next().and_then(|n| n.parse().ok()).with_context(|| format!("{arg} needs a number"));
        match arg.as_str() {
            "--seconds" => seconds = number()?,
            "--seed" => seed = number()?,
            name => only = Some(name.to_owned()),
        }
    }
    let chosen: Vec<&Target> = TARGETS.iter().filter(|t| only.as_deref().is_none_or(|n| n == t.name)).collect();
    if chosen.is_empty() {
        let names: Vec<&str> = TARGETS.iter().map(|t| t.name).collect();
        bail!("`{}` is no target; there are {}", only.unwrap_or_default(), names.join(", "));
    }
    std::panic::set_hook(Box::new(|_| {}));
    for target in chosen {
        fuzz(target, Duration::from_secs(seconds), seed)?;
    }
    Ok(())
}

/// Runs one target for a time.
fn fuzz(target: &Target, time: Duration, seed: u64) -> Result<()> {
    let (start, mut rng) = (Instant::now(), ChaCha8Rng::seed_from_u64(seed));
    let mut corpus: Vec<Vec<u8>> = (target.seeds)();
    corpus.extend(regressions(target.name)?);
    let mut classes = HashSet::new();
    for input in &corpus {
        classes.insert(once(target, input)?);
    }
    let mut runs = corpus.len() as u64;
    while start.elapsed() < time {
        let mut input = corpus[rng.random_range(0..corpus.len())].clone();
        let other = &corpus[rng.random_range(0..corpus.len())];
        mutate::mutate(&mut input, other, &mut rng);
        if classes.insert(once(target, &input)?) {
            match corpus.len() < MAX_CORPUS {
                true => corpus.push(input),
                false => {
                    let place = rng.random_range(0..MAX_CORPUS);
                    corpus[place] = input;
                }
            }
        }
        runs += 1;
    }
    println!("{}: {runs} runs, {} outcomes, {} inputs kept", target.name, classes.len(), corpus.len());
    Ok(())
}

/// Runs one input; a panic or too much memory is an error that names the kept input.
fn once(target: &Target, input: &[u8]) -> Result<String> {
    memory::start();
    let outcome = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    let peak = memory::peak();
    let fault = match &outcome {
        Err(payload) => Some(format!("panicked: {}", text(payload.as_ref()))),
        Ok(_) if peak > MEMORY_LIMIT + 64 * input.len() => Some(format!("took {peak} bytes for {}", input.len())),
        Ok(_) => None,
    };
    if let Some(fault) = fault {
        bail!("target {} {fault}; the input is {}", target.name, keep(target.name, input)?.display());
    }
    Ok(class(&outcome.unwrap_or_default()))
}

/// An outcome without what makes each one different: the first plain words before its first quotation and after its last.
fn class(outcome: &str) -> String {
    let (head, rest) = outcome.split_once(['`', '"']).unwrap_or((outcome, ""));
    let tail = rest.rsplit(['`', '"']).next().unwrap_or("");
    let words = |text: &str| {
        let plain = |word: &&str| word.bytes().all(|b| b.is_ascii_alphabetic());
        text.split_whitespace().filter(plain).take(CLASS_WORDS).collect::<Vec<_>>().join(" ")
    };
    format!("{}|{}", words(head), words(tail))
}

fn text(payload: &(dyn std::any::Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

fn folder(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(kind)
}

fn keep(target: &str, input: &[u8]) -> Result<PathBuf> {
    let hash = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let path = folder("artifacts").join(format!("{target}-{hash:016x}"));
    std::fs::create_dir_all(folder("artifacts"))?;
    std::fs::write(&path, input)?;
    Ok(path)
}

fn regressions(target: &str) -> Result<Vec<Vec<u8>>> {
    let folder = folder("regressions").join(target);
    if !folder.exists() {
        return Ok(Vec::new());
    }
    std::fs::read_dir(folder)?.map(|entry| Ok(std::fs::read(entry?.path())?)).collect()
}

#[cfg(test)]
mod tests {
    use rand::Rng;

    use super::*;

    #[test]
    fn a_class_forgets_numbers_and_quoted_parts() {
        assert_eq!(class("tensor `a.b` at 17 of 20"), class("tensor `c` at 3 of 4"));
        assert_ne!(class("too short"), class("too long"));
    }

    #[test]
    fn a_panic_is_a_finding() {
        let target = Target { name: "test-panic", seeds: Vec::new, run: |_| panic!("found it") };
        let error = once(&target, b"x").unwrap_err().to_string();
        assert!(error.contains("found it") && error.contains("artifacts"), "{error}");
        std::fs::remove_file(error.rsplit(' ').next().unwrap()).unwrap();
    }

    #[test]
    fn mutation_is_reproducible_by_seed() {
        let run = || {
            let (mut rng, mut input) = (ChaCha8Rng::seed_from_u64(9), b"hello world".to_vec());
            for _ in 0..20 {
                mutate::mutate(&mut input, b"other", &mut rng);
            }
            (input, rng.next_u64())
        };
        assert_eq!(run(), run());
    }
}
