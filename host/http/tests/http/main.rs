//! The HTTP surfaces over a real connection, with an engine that follows a script.

mod chat;
mod completions;
mod embeddings;
mod fake;
mod hostile;
mod lifecycle;
mod messages;
mod operations;
mod polykv;
mod rerank;
mod responses;
mod streaming;
mod tools;
