//! Scheduler, slots, sampling and constrained decoding.

pub mod constraint;
pub mod sampling;
pub mod text;
pub mod vocab;
