//! Chat: messages to prompt by the model's template, and the model's output back to messages.
//!
//! [`parse_messages`], [`parse_tools`] and [`parse_tool_choice`] check what a client sent; [`ChatTemplate`] renders it;
//! [`tool_constraint`] gives the grammar to decode with; [`OutputParser`] takes the generated text apart.

mod constraint;
mod defaults;
mod jinja;
mod messages;
mod output;
mod template;
mod tools;

pub use constraint::{ConstraintOptions, ToolConstraint, tool_constraint};
pub use defaults::default_template;
pub use messages::{Message, MessageError, Role, ToolCall, parse_messages};
pub use output::{CallSyntax, OutputEvent, OutputFormat, OutputParser, ThoughtSyntax};
pub use template::{Capabilities, ChatError, ChatRequest, ChatTemplate, Ending, Rendered};
pub use tools::{Tool, ToolChoice, parse_tool_choice, parse_tools};
