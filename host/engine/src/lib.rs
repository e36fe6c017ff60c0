//! The engine: continuous batching over one model, sampling and constrained decoding.
//!
//! [`api`] is all that the surfaces need: requests, events, [`api::EngineHandle`]. [`engine::spawn`] starts the thread
//! behind it from a cache, a [`runner::StepRunner`] and a [`vocab::Vocab`]. A token's way: [`engine`] composes a step
//! by the policy in `scheduler`, the runner computes logits, [`constraint`] masks them, [`sampling`] draws,
//! [`text`] turns the tokens into what the client may see.

pub mod admission;
pub mod api;
mod compiler;
pub mod constraint;
pub mod engine;
mod metrics;
pub mod pools;
pub mod runner;
pub mod sampling;
mod scheduler;
pub mod text;
pub mod trace;
pub mod vocab;

pub use scheduler::StepBudget;
