//! What is fuzzed.

mod bodies;
mod gguf;
mod output;
mod safetensors;
mod state;

/// A reader of bytes from outside.
pub struct Target {
    /// Name on the command line.
    pub name: &'static str,
    /// Valid inputs to start from.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Reads one input and says what came of it.
    pub run: fn(&[u8]) -> String,
}

/// Every target.
pub const TARGETS: [Target; 8] = [
    gguf::TARGET,
    safetensors::TARGET,
    state::TARGET,
    bodies::CHAT,
    bodies::COMPLETION,
    bodies::MESSAGES,
    bodies::RESPONSES,
    output::TARGET,
];
