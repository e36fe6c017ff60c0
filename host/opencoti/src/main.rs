//! opencoti: an LLM inference server that is a plugin host.

mod config;
mod flags;
mod reference;
mod settings;

fn main() {}
