//! Anthropic's routes: `POST /v1/messages` and `/v1/messages/count_tokens`.

mod answer;
mod blocks;
pub(crate) mod error;
pub(crate) mod messages;
mod request;
