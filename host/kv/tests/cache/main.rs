//! The cache through its public face.

mod admission;
mod codecs;
mod fold;
mod plans;
mod properties;
mod sharing;
mod sizes;
mod stage;
mod state;
mod states;
mod support;
