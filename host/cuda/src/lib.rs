//! Runs graphs on NVIDIA cards.
//!
//! [`driver`] finds a card and holds its memory; [`compile`] makes kernels for it from the sources under `kernels/` and from the
//! device source of codecs; [`executor`] runs the steps that the cache plans, with the same results as the CPU executor up to the
//! rounding of f16 operands. Without a card, or without the libraries, [`driver::Gpu::open`] says so in one sentence.

pub mod compile;
pub mod driver;
pub mod executor;
pub mod kernels;
mod plan;
mod schedule;
mod stores;
pub mod weights;

use opencoti_compute::plan::PlanError;

/// Why a card can't be used, or a step not be run on it.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// No card, no driver or no compiler.
    #[error("{0}")]
    NoCard(String),
    /// A call of the driver failed.
    #[error("{what} failed: {error}")]
    Driver { what: String, error: String },
    /// Not enough memory on the card.
    #[error("{what} takes {} MiB, but of the card's {} MiB only {} are free", .asked >> 20, .total >> 20, .free >> 20)]
    OutOfMemory { what: String, asked: usize, free: usize, total: usize },
    /// A source that the compiler refuses.
    #[error("the {name} kernels do not compile: {log}")]
    Compiler { name: String, log: String },
    /// Something in the model that these kernels do not have.
    #[error("{0}; run this model with --device cpu")]
    Unsupported(String),
    /// A graph, weights or a step that contradict themselves.
    #[error("{0}")]
    Wrong(String),
    /// The plan contradicts itself.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A mistake of this crate.
    #[error("internal error of the CUDA executor: {0}")]
    Internal(String),
}
