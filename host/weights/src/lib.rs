//! Weights as files have them, and their products with activations.
//!
//! A crate of its own because its kernels, one for each weight type, instruction set and number of rows, take longer to
//! compile than everything else that uses them.

pub mod matmul;
pub mod memory;
pub mod quant;
#[cfg(any(test, feature = "samples"))]
pub mod samples;
pub mod simd;
