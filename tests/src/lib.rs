//! What the end-to-end tests share.

pub mod model;
pub mod plugins;
pub mod scripted;
pub mod server;
