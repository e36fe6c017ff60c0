//! The CPU executor.

pub mod attention;
pub mod executor;
pub mod matmul;
mod memory;
pub mod pool;
pub mod recurrent;
pub mod rope;
pub mod simd;
pub mod vecmath;
