//! What every codec must do, as checks that run against a plugin through the ABI.
//!
//! For authors of codecs, in any language: load the plugin, call [`check`], and assert that the report has no failure.
//!
//! ```ignore
//! let plugin = CodecPlugin::new(Instance::create(my_codecs::root(), "{}", Arc::new(NoSink))?)?;
//! let report = conformance::check(&plugin, &Plan::default());
//! assert!(report.failures().is_empty(), "{report}");
//! ```
//! Each codec is opened for both sides, every head size of the plan and every set of options; a combination that the
//! codec refuses as [`crate::Status::UNSUPPORTED`] is skipped and listed. How *good* a codec is, is for the lab to
//! say; the report only carries the error it measured. [`reference`](mod@reference) is the simplest codec that passes.

mod checks;
mod page;
pub mod reference;

use core::fmt;

use crate::error::{Error, Status};
use crate::host::{Codec, CodecPlugin};
use crate::kv_codec::Side;

/// What to try.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Head sizes.
    pub head_dims: Vec<usize>,
    /// Sets of codec options, JSON objects.
    pub options: Vec<String>,
    /// Largest relative error that is still called a codec: the root of summed squared errors over summed squares of
    /// normally distributed rows. Writing zeros has 1.
    pub max_error: f64,
}

impl Default for Plan {
    fn default() -> Self {
        Plan { head_dims: vec![64, 96, 128, 256, 512], options: vec!["{}".into()], max_error: 0.5 }
    }
}

/// One combination and what came out.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Codec, side, head size and options, for people.
    pub name: String,
    /// What came out.
    pub outcome: Outcome,
}

/// Outcome of a case.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// All checks hold; relative error of a round trip.
    Passed {
        /// See [`Plan::max_error`].
        error: f64,
    },
    /// The codec does not support it, and says why.
    Unsupported(String),
    /// The first check that does not hold.
    Failed(String),
}

/// All cases of a plugin.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The cases in the order they ran.
    pub cases: Vec<Case>,
}

impl Report {
    /// Cases that failed.
    pub fn failures(&self) -> Vec<&Case> {
        self.cases.iter().filter(|c| matches!(c.outcome, Outcome::Failed(_))).collect()
    }

    fn add(&mut self, name: String, outcome: Result<Outcome, String>) {
        self.cases.push(Case { name, outcome: outcome.unwrap_or_else(Outcome::Failed) });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Case { name, outcome } in &self.cases {
            match outcome {
                Outcome::Passed { error } => writeln!(f, "passed       {name}: error {error:.2e}")?,
                Outcome::Unsupported(why) => writeln!(f, "unsupported  {name}: {why}")?,
                Outcome::Failed(what) => writeln!(f, "FAILED       {name}: {what}")?,
            }
        }
        Ok(())
    }
}

/// Runs every check on every codec of a plugin.
pub fn check(plugin: &CodecPlugin, plan: &Plan) -> Report {
    let mut report = Report { cases: Vec::new() };
    let codecs = match plugin.codecs() {
        Ok(codecs) if !codecs.is_empty() => codecs,
        Ok(_) => return failed(report, "the plugin offers no codec"),
        Err(e) => return failed(report, &e.message),
    };
    report.add("a codec of another name".into(), refuses(plugin.open("no such codec", "{}", Side::K, 64)));
    for codec in codecs {
        for side in [Side::K, Side::V] {
            report.add(
                format!("{} {side} with options that are no JSON", codec.name),
                refuses(plugin.open(&codec.name, "{", side, 64)),
            );
            report.add(
                format!("{} {side} of head size 0", codec.name),
                refuses_as_unsupported(plugin.open(&codec.name, "{}", side, 0)),
            );
            check_side(plugin, &codec.name, side, plan, &mut report);
        }
    }
    report
}

fn failed(mut report: Report, what: &str) -> Report {
    report.add("codecs".into(), Err(what.to_owned()));
    report
}

/// All head sizes and options of one codec and side; at least one must be supported.
fn check_side(plugin: &CodecPlugin, codec: &str, side: Side, plan: &Plan, report: &mut Report) {
    let start = report.cases.len();
    for &head_dim in &plan.head_dims {
        for options in &plan.options {
            let outcome = match plugin.open(codec, options, side, head_dim) {
                Ok(opened) => {
                    let again = || plugin.open(codec, options, side, head_dim).map_err(|e| e.message);
                    checks::run(&opened, &again, plan.max_error).map(|error| Outcome::Passed { error })
                }
                Err(e) if e.status == Status::UNSUPPORTED => Ok(Outcome::Unsupported(e.message)),
                Err(e) => Err(format!("`open` failed: {}", e.message)),
            };
            report.add(format!("{codec} {side} of head size {head_dim} with {options}"), outcome);
        }
    }
    if report.cases[start..].iter().all(|c| matches!(c.outcome, Outcome::Unsupported(_))) {
        report.add(format!("{codec} {side}"), Err("none of the head sizes and options is supported".into()));
    }
}

fn refuses(opened: Result<Codec, Error>) -> Result<Outcome, String> {
    match opened {
        Ok(_) => Err("was opened, expected an error".into()),
        Err(e) if e.status == Status::PANIC => Err(e.message),
        Err(e) => Ok(Outcome::Unsupported(e.message)),
    }
}

fn refuses_as_unsupported(opened: Result<Codec, Error>) -> Result<Outcome, String> {
    match opened {
        Err(e) if e.status != Status::UNSUPPORTED => {
            Err(format!("status {}, expected 3 (unsupported): {}", e.status.0, e.message))
        }
        other => refuses(other),
    }
}
