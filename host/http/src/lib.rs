//! The HTTP surfaces: OpenAI's and llama.cpp's shapes, plugins, metrics.
//!
//! Nothing outside this crate knows JSON shapes, and nothing in it knows how tokens are made: a handler reads a body
//! into typed fields ([`body`], [`fields`], [`sampling`], [`generation`]), makes engine requests of them, and turns the
//! engine's events into an answer or a stream ([`run`], [`sse`]). [`routes`] is the table of everything that is served.
//!
//! ```text
//! let server = Server::bind(config).await?;      // listens; everything answers 503
//! let control = server.control();                // goes to whoever loads the model
//! control.set_ready(engine, plugins);            // requests are served
//! server.serve(stop).await?;                     // until told to stop
//! ```

mod answers;
mod anthropic;
mod auth;
mod body;
mod chat;
mod config;
mod cors;
mod error;
mod fields;
mod generation;
mod health;
pub mod metrics;
mod native;
mod openai;
mod openapi;
mod plugins;
mod polykv;
mod prefixes;
mod requests;
mod routes;
mod run;
mod sampling;
mod server;
mod shutdown;
mod sse;
mod state;
mod text;
mod trace;
mod wrap;

pub use config::{Cors, CorsOrigins, Listen, ServerConfig};
pub use error::{ApiError, ErrorBody, ErrorObject};
pub use server::{BindError, Server, ServerControl};
pub use state::DescribePlugins;

/// Reads the body of a chat request, as far as that needs no model. For fuzzing.
///
/// # Errors
/// The error that the client would get.
pub fn parse_chat(body: &[u8]) -> Result<(), ApiError> {
    openai::chat::ChatRequest::parse(body).map(drop)
}

/// Reads the body of an Anthropic messages request, as far as that needs no model. For fuzzing.
///
/// # Errors
/// The error that the client would get.
pub fn parse_messages(body: &[u8]) -> Result<(), ApiError> {
    anthropic::messages::MessagesRequest::parse(body).map(drop)
}

/// Reads the body of an OpenAI responses request, as far as that needs no model. For fuzzing.
///
/// # Errors
/// The error that the client would get.
pub fn parse_responses(body: &[u8]) -> Result<(), ApiError> {
    openai::responses::ResponsesRequest::parse(body).map(drop)
}

/// Reads the body of a native and of an OpenAI completion, as far as that needs no model. For fuzzing.
///
/// # Errors
/// The error that the client would get.
pub fn parse_completion(body: &[u8]) -> Result<(), ApiError> {
    native::completion::CompletionRequest::parse(body)?;
    openai::completions::CompletionsRequest::parse(body).map(drop)
}

/// The OpenAPI document of a server whose routes begin with `prefix`.
pub fn openapi_document(prefix: &str) -> utoipa::openapi::OpenApi {
    openapi::build(prefix)
}
