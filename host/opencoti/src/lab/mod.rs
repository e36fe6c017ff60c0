//! `opencoti lab`: how faithful codecs are, on any model and text.
//!
//! What is measured runs beside a reference (f16 unless told otherwise) on the same tokens, through one executor, step by
//! step: logits are compared where they are, and speeds are those of neighbours in time.

pub mod args;
mod attention;
mod calibrate;
mod capture;
mod codecs;
mod compare;
mod exact;
mod gates;
mod kld;
mod lockstep;
mod logits;
mod needles;
mod niah;
mod report;
mod sweep;
mod table;
mod text;
mod tiles;

pub use calibrate::digest;
pub use table::{KvTable, LayerTable};

use std::path::PathBuf;

use anyhow::Result;

use crate::plugins;
use crate::settings::Settings;

/// What is asked of the lab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Experiment {
    /// Divergence from the reference on a text.
    Kld(kld::Options),
    /// Every codec on a text.
    Sweep(sweep::Options),
    /// Facts found again in a text.
    Niah(niah::Options),
    /// Error of what is stored, without the model's answer to it.
    Codecs(codecs::Options),
    /// Means and factors of keys and values, written to a file.
    Calibrate(calibrate::Options),
    /// Logits, written to a file.
    Logits(logits::Options),
}

/// What all experiments are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Pairs of codecs; those of the settings when there are none.
    pub kv: Vec<String>,
    /// Tokens to run.
    pub text: text::Source,
    /// What must hold; the experiment's own gates when there are none.
    pub gates: Vec<String>,
    /// JSON in place of the table.
    pub as_json: bool,
    /// File for the JSON.
    pub json: Option<PathBuf>,
    /// File for the plot.
    pub svg: Option<PathBuf>,
}

/// Runs an experiment; whether every gate was passed.
///
/// # Errors
/// What kept it from being run.
pub fn run(settings: &Settings, options: &Options, experiment: &Experiment) -> Result<bool> {
    let registry = plugins::load(settings)?;
    match experiment {
        Experiment::Kld(own) => kld::run(settings, &registry, options, own),
        Experiment::Sweep(own) => sweep::run(settings, &registry, options, own),
        Experiment::Niah(own) => niah::run(settings, &registry, options, own),
        Experiment::Codecs(own) => codecs::run(settings, &registry, options, own),
        Experiment::Calibrate(own) => calibrate::run(settings, &registry, options, own),
        Experiment::Logits(own) => logits::run(settings, &registry, options, own),
    }
}
