//! What a model writes: thoughts, content and calls, in every family's form.

use std::sync::Arc;

use opencoti_model::chat::{CallSyntax, OutputEvent, OutputFormat, OutputParser, ThoughtSyntax, Tool};
use serde_json::{Value, json};

use super::Target;

/// The target. The first byte of an input chooses the family, the second the size of the pieces, the rest is the text.
pub const TARGET: Target = Target { name: "output", seeds, run };

const THOUGHTS: [ThoughtSyntax; 3] = [ThoughtSyntax::Tags, ThoughtSyntax::Brackets, ThoughtSyntax::Channel];

fn seeds() -> Vec<Vec<u8>> {
    let texts = [
        "<think>\nhm\n</think>\n\nSo.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"x\\n\"]}}\n</tool_call> end",
        "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=s>\nab\n</parameter>\n</function>\n</tool_call>",
        "<|channel>thought\nhm\n<channel|><|tool_call>call:f{a:1,s:<|\"|>x<|\"|>,o:{k:[true,null]}}<tool_call|>",
        "{\"name\": \"f\", \"parameters\": {\"a\": 1}}; {\"name\": \"f\", \"parameters\": {}}",
        "<|tool_call|>[{\"name\": \"f\", \"arguments\": {}}, {\"arguments\": \"{}\", \"name\": \"f\"}]",
        "<|tool_call_start|>[f(a=1, s='it\\'s', o={\"k\": [True, None]}), f()]<|tool_call_end|>",
        "[THINK]hm[/THINK][TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}]",
    ];
    let kinds = 0..(CallSyntax::ALL.len() * THOUGHTS.len() * 4) as u8;
    kinds.flat_map(|kind| texts.map(|text| [&[kind, 3], text.as_bytes()].concat())).collect()
}

fn format(kind: u8) -> OutputFormat {
    let kind = usize::from(kind);
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}});
    let tool = Tool { name: "f".to_owned(), parameters, definition: Value::Null };
    OutputFormat {
        thoughts: kind & 1 == 0,
        in_thought: kind & 2 != 0,
        call_syntax: CallSyntax::ALL[kind / 4 % CallSyntax::ALL.len()],
        thought_syntax: THOUGHTS[kind / 4 / CallSyntax::ALL.len() % THOUGHTS.len()],
        tools: Arc::new([tool]),
    }
}

/// Thought, content and calls of a text that comes in pieces of `size` characters.
fn read(text: &str, format: OutputFormat, size: usize) -> (String, String, Vec<(String, String)>) {
    let mut parser = OutputParser::new(format, "c");
    let chars: Vec<char> = text.chars().collect();
    let mut events = Vec::new();
    for piece in chars.chunks(size) {
        events.extend(parser.push(&piece.iter().collect::<String>()));
    }
    events.extend(parser.finish());
    let (mut thought, mut content, mut calls) = (String::new(), String::new(), Vec::new());
    for event in events {
        match event {
            OutputEvent::Reasoning(text) => thought += &text,
            OutputEvent::Content(text) => content += &text,
            OutputEvent::ToolCallStart { name, .. } => calls.push((name, String::new())),
            OutputEvent::ToolArguments { delta, .. } => {
                calls.last_mut().expect("arguments come after a start").1 += &delta;
            }
            OutputEvent::ToolCallEnd { .. } => {}
        }
    }
    (thought, content, calls)
}

fn run(input: &[u8]) -> String {
    let [kind, size, text @ ..] = input else { return "too short".to_owned() };
    let text = String::from_utf8_lossy(text);
    let whole = read(&text, format(*kind), usize::MAX);
    let pieces = read(&text, format(*kind), usize::from(*size % 8) + 1);
    assert_eq!(whole, pieces, "the pieces must not matter");
    for (name, arguments) in &whole.2 {
        let value = serde_json::from_str::<Value>(arguments);
        // A number beyond the range of a double is JSON all the same.
        let is_object = value.map_or_else(|e| e.to_string().contains("out of range"), |value| value.is_object());
        assert!(is_object, "{name} got {arguments}");
    }
    let syntax = format(*kind).call_syntax.name().replace('-', "");
    let present = |is_there: bool, word: &'static str| if is_there { word } else { "" };
    let (thought, content) = (present(!whole.0.is_empty(), "thought"), present(!whole.1.is_empty(), "content"));
    format!("{syntax} {thought} {content}{}", " call".repeat(whole.2.len().min(4)))
}
