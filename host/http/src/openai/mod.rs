//! OpenAI's routes.

pub(crate) mod chat;
mod chat_answer;
mod chat_constraint;
pub(crate) mod completions;
pub(crate) mod embeddings;
pub(crate) mod models;
