//! The graph of a model, the plan of a step, and the executors that run one over the other.
//!
//! An architecture is a [`graph::Graph`]: a list of operations over activations. A step is a [`plan::Step`]: which
//! tokens, where their keys and values go, and which segments each query reads. Executors know operations, segments
//! and merges; they know nothing of the feature a segment came from.

pub mod channels;
pub mod cpu;
pub mod graph;
pub mod plan;
pub mod weights;

pub use opencoti_weights::quant;
