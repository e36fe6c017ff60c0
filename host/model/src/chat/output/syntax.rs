//! The families' ways of marking thoughts and writing calls: what is a marker, who reads what stands behind it, and how
//! a call is written where a template has no form for it.

use std::sync::Arc;

use serde_json::{Value, json};

use super::gemma4::GemmaCall;
use super::hermes::{Accept, CallArray, CallObject};
use super::lfm2::PythonCalls;
use super::mistral::MistralCall;
use super::qwen_xml::XmlCall;
use super::reader::CallReader;
use crate::chat::messages::ToolCall;
use crate::chat::tools::Tool;

/// How thoughts are marked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThoughtSyntax {
    /// `<think>…</think>` at the beginning of the answer.
    #[default]
    Tags,
    /// `[THINK]…[/THINK]` at the beginning (Mistral).
    Brackets,
    /// `<|channel>thought…<channel|>` anywhere (Gemma 4).
    Channel,
}

impl ThoughtSyntax {
    /// Every syntax, the least likely to be mistaken for another first.
    pub(in crate::chat) const ALL: [Self; 3] = [Self::Channel, Self::Brackets, Self::Tags];

    /// The markers before and after a thought.
    pub fn markers(self) -> (&'static str, &'static str) {
        match self {
            Self::Tags => ("<think>", "</think>"),
            Self::Brackets => ("[THINK]", "[/THINK]"),
            Self::Channel => ("<|channel>thought", "<channel|>"),
        }
    }

    /// Whether the markers are tokens of their own, so that they never are part of a text.
    pub(super) fn comes_anywhere(self) -> bool {
        self == Self::Channel
    }
}

/// How a family writes tool calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CallSyntax {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4). Templates
    /// without calls get this one.
    #[default]
    Hermes,
    /// `<tool_call><function=…><parameter=…>…` (Qwen 3.5, Qwen 3 Coder).
    QwenXml,
    /// `<|tool_call>call:name{key:value}<tool_call|>`.
    Gemma4,
    /// An answer that is the object `{"name": …, "parameters": {…}}`, perhaps behind `<|python_tag|>`.
    Llama3,
    /// `<|tool_call|>[{"name": …, "arguments": {…}}]` (Granite 3, Phi 4).
    Granite,
    /// `<|tool_call_start|>[name(key=value)]<|tool_call_end|>`.
    Lfm2,
    /// `[TOOL_CALLS][{"name": …}]` or `[TOOL_CALLS]name[ARGS]{…}`.
    Mistral,
}

impl CallSyntax {
    /// Every syntax, in the order in which a template is tried.
    pub const ALL: [Self; 7] =
        [Self::Gemma4, Self::QwenXml, Self::Hermes, Self::Lfm2, Self::Granite, Self::Mistral, Self::Llama3];

    /// A short name, to be shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::QwenXml => "qwen-xml",
            Self::Gemma4 => "gemma4",
            Self::Llama3 => "llama3",
            Self::Granite => "granite",
            Self::Lfm2 => "lfm2",
            Self::Mistral => "mistral",
        }
    }

    /// The markers that begin a call.
    pub(in crate::chat) fn openings(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>"],
            // Some models leave the outer tag out.
            Self::QwenXml => &["<tool_call>", "<function="],
            Self::Gemma4 => &["<|tool_call>"],
            Self::Llama3 => &["<|python_tag|>"],
            Self::Granite => &["<|tool_call|>"],
            Self::Lfm2 => &["<|tool_call_start|>"],
            Self::Mistral => &["[TOOL_CALLS]"],
        }
    }

    /// The markers that may follow a call.
    pub(in crate::chat) fn closings(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::QwenXml => &["</tool_call>"],
            Self::Gemma4 => &["<tool_call|>"],
            Self::Granite => &["<|/tool_call|>"],
            Self::Lfm2 => &["<|tool_call_end|>"],
            Self::Llama3 | Self::Mistral => &[],
        }
    }

    /// Every marker: those around calls and those inside.
    pub fn markers(self) -> impl Iterator<Item = &'static str> {
        let inside: &[&str] = match self {
            Self::Gemma4 => &["<|\"|>"],
            Self::Mistral => &["[ARGS]", "[CALL_ID]"],
            _ => &[],
        };
        [self.openings(), self.closings(), inside].into_iter().flatten().copied()
    }

    /// Whether a call may come without a marker, if nothing but a thought came before it.
    pub(super) fn is_bare(self) -> bool {
        self == Self::Llama3
    }

    /// The reader of what stands behind a marker.
    pub(super) fn reader(self, opening: &str, tools: &Arc<[Tool]>) -> Box<dyn CallReader> {
        match self {
            Self::Hermes => Box::new(CallObject::new(Accept::Any)),
            Self::QwenXml => {
                let tag = if opening == "<function=" { opening } else { "" };
                Box::new(XmlCall::new(Arc::clone(tools), tag))
            }
            Self::Gemma4 => Box::new(GemmaCall::new()),
            Self::Llama3 => Box::new(CallObject::new(Accept::Known(Arc::clone(tools)))),
            Self::Granite => Box::new(CallArray::new(Accept::Any)),
            Self::Lfm2 => Box::new(PythonCalls::new()),
            Self::Mistral => Box::new(MistralCall::new()),
        }
    }

    /// Writes calls as the model would, for a template that knows tools but has no form for calls.
    pub(in crate::chat) fn calls_text(self, calls: &[ToolCall]) -> String {
        let object = |call: &ToolCall| json!({"name": call.name, "arguments": call.arguments}).to_string();
        let each = |write: &dyn Fn(&ToolCall) -> String, between: &str| {
            calls.iter().map(write).collect::<Vec<_>>().join(between)
        };
        match self {
            Self::Hermes => each(&|call| format!("<tool_call>\n{}\n</tool_call>", object(call)), "\n"),
            Self::QwenXml => each(&xml_call, "\n"),
            Self::Gemma4 => {
                each(&|call| format!("<|tool_call>call:{}{}<tool_call|>", call.name, gemma(&json!(call.arguments))), "")
            }
            Self::Llama3 => each(&|call| json!({"name": call.name, "parameters": call.arguments}).to_string(), "; "),
            Self::Granite => format!("<|tool_call|>[{}]", each(&object, ", ")),
            Self::Lfm2 => format!("<|tool_call_start|>[{}]<|tool_call_end|>", each(&python_call, ", ")),
            Self::Mistral => format!("[TOOL_CALLS][{}]", each(&object, ", ")),
        }
    }
}

fn xml_call(call: &ToolCall) -> String {
    let parameters = call.arguments.iter().map(|(key, value)| {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        format!("<parameter={key}>\n{value}\n</parameter>\n")
    });
    format!("<tool_call>\n<function={}>\n{}</function>\n</tool_call>", call.name, parameters.collect::<String>())
}

/// A value in Gemma 4's form: bare keys, sorted, and strings between its own marks.
fn gemma(value: &Value) -> String {
    match value {
        Value::String(text) => format!("<|\"|>{text}<|\"|>"),
        Value::Array(items) => format!("[{}]", items.iter().map(gemma).collect::<Vec<_>>().join(",")),
        Value::Object(object) => {
            let mut items: Vec<_> = object.iter().collect();
            items.sort_by_key(|(key, _)| *key);
            let items = items.iter().map(|(key, value)| format!("{key}:{}", gemma(value)));
            format!("{{{}}}", items.collect::<Vec<_>>().join(","))
        }
        scalar => scalar.to_string(),
    }
}

fn python_call(call: &ToolCall) -> String {
    let arguments = call.arguments.iter().map(|(key, value)| format!("{key}={}", python(value)));
    format!("{}({})", call.name, arguments.collect::<Vec<_>>().join(", "))
}

fn python(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Array(items) => format!("[{}]", items.iter().map(python).collect::<Vec<_>>().join(", ")),
        Value::Object(object) => {
            let items = object.iter().map(|(key, value)| format!("{}: {}", json!(key), python(value)));
            format!("{{{}}}", items.collect::<Vec<_>>().join(", "))
        }
        scalar => scalar.to_string(),
    }
}
