//! The real program end to end: a server with real plugins on a free port, a made-up model, and clients that behave and
//! that do not.

mod bad_input;
mod bad_plugins;
mod cli;
mod codecs;
mod crowd;
mod departures;
mod encoders;
mod generation;
mod measure;
mod pools;
mod qwen;
mod sharing;
mod slots;
