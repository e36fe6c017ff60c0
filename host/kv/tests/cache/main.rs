//! The cache through its public face.

mod plans;
mod support;
