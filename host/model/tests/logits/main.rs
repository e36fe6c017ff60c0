//! Tiny random models against the logits that Hugging Face transformers computes for them (see
//! `fixtures/make_tiny_models.py`).

mod cached;
mod encoder;
mod experts;
mod fixture;
mod gemma4;
mod graphs;
mod hybrid;
mod mistakes;
mod parity;
mod real;
mod reference;
mod refusals;
mod repeated;
mod rewrite;

use fixture::{Fixture, NAMES, fixture, max_diff};

/// Largest difference from the reference that is no mistake: it computes in f32.
const TOLERANCE: f32 = 2e-4;
