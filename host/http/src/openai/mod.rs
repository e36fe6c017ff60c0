//! OpenAI's routes.

pub(crate) mod chat;
mod chat_answer;
pub(crate) mod completions;
pub(crate) mod embeddings;
pub(crate) mod models;
pub(crate) mod rerank;
pub(crate) mod responses;
