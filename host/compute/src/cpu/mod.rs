//! The CPU executor.

pub mod pool;
