//! The cache through its public face.

mod admission;
mod codecs;
mod plans;
mod properties;
mod sharing;
mod sizes;
mod state;
mod support;
