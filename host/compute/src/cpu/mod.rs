//! The CPU executor.

pub mod attention;
pub mod executor;
pub mod pool;
pub mod recurrent;
pub mod rope;
pub mod vecmath;

pub use opencoti_weights::{matmul, simd};
