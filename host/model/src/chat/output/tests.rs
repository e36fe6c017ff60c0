use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::chat::messages::{Message, Role, ToolCall};
use crate::chat::template::{ChatRequest, ChatTemplate, Ending};
use crate::chat::tools::parse_tools;

fn tools() -> Arc<[Tool]> {
    let parameters = json!({"type": "object", "properties": {
        "s": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}, "l": {"type": "array"},
        "o": {"type": "object"}, "m": {"type": ["string", "null"]}, "x": {"type": "number"},
    }});
    parse_tools(&json!([
        {"type": "function", "function": {"name": "f", "parameters": parameters}},
        {"type": "function", "function": {"name": "g-2", "parameters": parameters}},
    ]))
    .unwrap()
    .into()
}

fn format(call_syntax: CallSyntax) -> OutputFormat {
    let thought_syntax = match call_syntax {
        CallSyntax::Gemma4 => ThoughtSyntax::Channel,
        CallSyntax::Mistral => ThoughtSyntax::Brackets,
        _ => ThoughtSyntax::Tags,
    };
    OutputFormat { thoughts: true, in_thought: false, thought_syntax, call_syntax, tools: tools() }
}

fn hermes() -> OutputFormat {
    format(CallSyntax::Hermes)
}

/// The events of a text that comes in pieces of `sizes` characters, joined where they continue each other.
fn events(text: &str, format: &OutputFormat, sizes: &[usize]) -> Vec<OutputEvent> {
    let mut parser = OutputParser::new(format.clone(), "c");
    let mut all = Vec::new();
    let chars: Vec<char> = text.chars().collect();
    let mut rest = chars.as_slice();
    let mut sizes = sizes.iter().cycle();
    while !rest.is_empty() {
        let n = sizes.next().copied().unwrap_or(1).clamp(1, rest.len());
        all.extend(parser.push(&rest[..n].iter().collect::<String>()));
        rest = &rest[n..];
    }
    all.extend(parser.finish());
    join(all)
}

fn join(events: Vec<OutputEvent>) -> Vec<OutputEvent> {
    use OutputEvent::*;
    let mut joined: Vec<OutputEvent> = Vec::new();
    for event in events {
        match (joined.last_mut(), &event) {
            (Some(Content(a)), Content(b)) | (Some(Reasoning(a)), Reasoning(b)) => a.push_str(b),
            (Some(ToolArguments { delta: a, .. }), ToolArguments { delta: b, .. }) => a.push_str(b),
            _ => joined.push(event),
        }
    }
    joined
}

fn call(index: usize, name: &str, arguments: &str) -> Vec<OutputEvent> {
    vec![
        OutputEvent::ToolCallStart { index, id: format!("c{index}"), name: name.into() },
        OutputEvent::ToolArguments { index, delta: arguments.into() },
        OutputEvent::ToolCallEnd { index },
    ]
}

fn content(text: &str) -> Vec<OutputEvent> {
    vec![OutputEvent::Content(text.into())]
}

fn reasoning(text: &str) -> Vec<OutputEvent> {
    vec![OutputEvent::Reasoning(text.into())]
}

#[test]
fn thought_content_and_calls_are_told_apart() {
    let text = "<think>\nneed time\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"get\", \"arguments\": {\"a\": \"}\\\"\"}}\n\
                </tool_call>\n<tool_call>\n{\"arguments\": {\"b\": [1]}, \"name\": \"put\"}\n</tool_call>";
    let expected = [
        reasoning("need time"),
        content("Let me see."),
        call(0, "get", "{\"a\": \"}\\\"\"}"),
        call(1, "put", "{\"b\": [1]}"),
    ];
    assert_eq!(events(text, &hermes(), &[1]), expected.concat());
}

#[test]
fn output_may_begin_inside_a_thought() {
    let format = OutputFormat { in_thought: true, tools: Arc::default(), ..hermes() };
    assert_eq!(events("\nhm </thin </think>\nyes ", &format, &[2]), [reasoning("hm </thin"), content("yes ")].concat());
    assert_eq!(events("never done", &format, &[3]), reasoning("never done"));
}

#[test]
fn without_tools_and_thoughts_text_passes_untouched_and_at_once() {
    let mut parser = OutputParser::new(OutputFormat::default(), "c");
    assert_eq!(parser.push(" a <tool_call> \n"), content(" a <tool_call> \n"));
    assert_eq!(parser.finish(), []);
    let mut parser = OutputParser::new(OutputFormat { thoughts: true, ..OutputFormat::default() }, "c");
    assert_eq!(parser.push(" a\n"), content(" a\n"));
}

#[test]
fn what_is_no_call_stays_content() {
    for text in [
        "a <tool_call>b</tool_call> c",
        "x <tool_call>{\"name\": 3}",
        "<tool_call>{}",
        "a <tool_c",
        "a <tool_call>{\"na",
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": \"no object\"}",
    ] {
        assert_eq!(events(text, &hermes(), &[1]), content(text), "{text}");
    }
    for text in [
        "{\"answer\": 1}",
        "{\"name\": \"unknown\", \"parameters\": {}}",
        "<|python_tag|>print(1)",
        "a {\"name\": \"f\"}",
    ] {
        assert_eq!(events(text, &format(CallSyntax::Llama3), &[1]), content(text), "{text}");
    }
    for text in ["<|tool_call>cal me", "<|tool_call>call:f(", "<|tool_call>call:{}", "<|channel>final\nx"] {
        assert_eq!(events(text, &format(CallSyntax::Gemma4), &[1]), content(text), "{text}");
    }
    for text in ["<tool_call>\n<func", "<tool_call>\n<function=\n>", "<tool_call><parameter=a>", "a <function >"] {
        assert_eq!(events(text, &format(CallSyntax::QwenXml), &[1]), content(text), "{text}");
    }
    for text in ["<|tool_call_start|>hello there", "<|tool_call_start|>[]"] {
        assert_eq!(events(text, &format(CallSyntax::Lfm2), &[1]), content(text), "{text}");
    }
}

#[test]
fn a_call_behind_what_was_none_is_found() {
    let text = r#"<tool_call> <tool_call>{"name": "f"}</tool_call>"#;
    assert_eq!(events(text, &hermes(), &[1]), [content("<tool_call>"), call(0, "f", "{}")].concat());
}

#[test]
fn odd_arguments_become_objects_and_missing_end_tags_are_forgiven() {
    for (body, arguments) in [
        (r#"{"name":"f"}"#, "{}"),
        (r#"{"name":"f","arguments":null}"#, "{}"),
        (r#"{"name":"f","arguments":"{\"a\":1}"}"#, r#"{"a":1}"#),
        (r#"{"id":7,"name":"f","parameters":{"a":{}},"x":[{}]}"#, r#"{"a":{}}"#),
        ("{\"name\":\"f\",\"arguments\":{\"a\":\"1\n2\"}}", r#"{"a":"1\n2"}"#),
    ] {
        assert_eq!(events(&format!("<tool_call>{body}"), &hermes(), &[1]), call(0, "f", arguments));
    }
}

#[test]
fn arguments_are_completed_where_the_model_stopped_but_not_where_it_was_stopped() {
    let text = r#"<tool_call>{"name":"f","arguments":{"a":["x"#;
    assert_eq!(events(text, &hermes(), &[1]), call(0, "f", r#"{"a":["x"]}"#));
    let mut parser = OutputParser::new(hermes(), "c");
    let mut all = parser.push(text);
    all.extend(parser.finish_cut());
    assert_eq!(join(all), call(0, "f", r#"{"a":["x"#));
}

#[test]
fn what_goes_wrong_after_the_announcement_is_completed_and_the_rest_is_content() {
    let text = r#"<tool_call>{"name":"f","arguments":{"a":1,,}}</tool_call>"#;
    assert_eq!(events(text, &hermes(), &[3]), [call(0, "f", r#"{"a":1}"#), content(",}}</tool_call>")].concat());
}

#[test]
fn a_bare_object_is_a_call_if_it_names_a_tool() {
    let format = format(CallSyntax::Llama3);
    let one = r#"{"name": "f", "parameters": {"a":1}}"#;
    assert_eq!(events(one, &format, &[1]), call(0, "f", r#"{"a":1}"#));
    assert_eq!(events(&format!("<|python_tag|>{one}"), &format, &[5]), call(0, "f", r#"{"a":1}"#));
    let two = format!("{one}; {one}");
    assert_eq!(events(&two, &format, &[4]), [call(0, "f", r#"{"a":1}"#), call(1, "f", r#"{"a":1}"#)].concat());
    let typed = r#"{"type": "function", "name": "g-2", "parameters": {}}"#;
    assert_eq!(events(typed, &format, &[1]), call(0, "g-2", "{}"));
    assert_eq!(events("sorry", &format, &[1]), content("sorry"));
}

#[test]
fn values_in_tags_have_the_types_of_the_schema() {
    let format = format(CallSyntax::QwenXml);
    let text = "Look.\n\n<tool_call>\n<function=f>\n<parameter=s>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n\
                <parameter=b>\nTrue\n</parameter>\n<parameter=l>\n[1, {\"a\": 2}]\n</parameter>\n<parameter=m>\nNone\n</parameter>\n\
                <parameter=x>\nabout 3\n</parameter>\n<parameter=other>\n{}\n</parameter>\n</function>\n</tool_call>";
    let arguments = r#"{"s": "12", "n": 12, "b": true, "l": [1, {"a": 2}], "m": null, "x": "about 3", "other": {}}"#;
    assert_eq!(events(text, &format, &[1]), [content("Look."), call(0, "f", arguments)].concat());
    let strings = "<function=f><parameter=s>\n\"a\"\n\n  </b>\n\n</parameter></function>";
    assert_eq!(events(strings, &format, &[2]), call(0, "f", r#"{"s": "\"a\"\n\n  </b>\n"}"#));
    assert_eq!(events("<tool_call><function=f></function>", &format, &[1]), call(0, "f", "{}"));
    let cut = "<tool_call>\n<function=f>\n<parameter=s>\nab\n</par";
    assert_eq!(events(cut, &format, &[1]), call(0, "f", "{\"s\": \"ab\\n</par\"}"));
}

#[test]
fn strings_in_tags_stream_while_they_are_written() {
    let mut parser = OutputParser::new(format(CallSyntax::QwenXml), "c");
    parser.push("<tool_call><function=f><parameter=s>\nab");
    assert_eq!(parser.push("c\n"), [OutputEvent::ToolArguments { index: 0, delta: "c".into() }]);
    assert_eq!(parser.push("d"), [OutputEvent::ToolArguments { index: 0, delta: "\\nd".into() }]);
}

#[test]
fn gemmas_values_become_json() {
    let format = format(CallSyntax::Gemma4);
    let text = "<|channel>thought\nneed tool\n<channel|>So: <|tool_call>call:f{s:<|\"|>a \"b\"\n{},<|\"|>,n:-3,b:true,l:[1,<|\"|>x<|\"|>,[]],\
                o:{k:null,<|\"|>q k<|\"|>:2.5}}<tool_call|><|tool_call>call:g-2{}<tool_call|>";
    let arguments = r#"{"s": "a \"b\"\n{},", "n": -3, "b": true, "l": [1, "x", []], "o": {"k": null, "q k": 2.5}}"#;
    let expected = [reasoning("need tool"), content("So:"), call(0, "f", arguments), call(1, "g-2", "{}")].concat();
    assert_eq!(events(text, &format, &[1]), expected);
    assert_eq!(events(text, &format, &[1000]), expected);
    let loose = "<|tool_call>call:f{ s : celsius , \"n\":\"x\", l:[ ] }<tool_call|> done";
    let expected = [call(0, "f", r#"{"s": "celsius", "n": "x", "l": []}"#), content("done")].concat();
    assert_eq!(events(loose, &format, &[1]), expected);
    assert_eq!(events("<|tool_call>call:f{s:<|\"|>ab<|", &format, &[1]), call(0, "f", r#"{"s": "ab<|"}"#));
}

#[test]
fn a_thought_of_gemma_may_come_again_behind_a_call() {
    let text = "<|tool_call>call:f{}<tool_call|><|channel>thought\nagain<channel|>end";
    let expected = [call(0, "f", "{}"), reasoning("again"), content("end")].concat();
    assert_eq!(events(text, &format(CallSyntax::Gemma4), &[1]), expected);
}

#[test]
fn python_calls_become_json() {
    let format = format(CallSyntax::Lfm2);
    let text = "<|tool_call_start|>[f(s=\"it's \\\"so\\\"\", n=-1, b=False, l=[1, 'a', None], o={'k': {\"j\": true}}), g-2()]<|tool_call_end|>ok";
    let arguments = r#"{"s": "it's \"so\"", "n": -1, "b": false, "l": [1, "a", null], "o": {"k": {"j": true}}}"#;
    assert_eq!(events(text, &format, &[1]), [call(0, "f", arguments), call(1, "g-2", "{}"), content("ok")].concat());
    // Templates write apostrophes as they are.
    let quotes = "<|tool_call_start|>[f(s='it's', m='a\\u00e9\\x41\\q')]<|tool_call_end|>";
    assert_eq!(events(quotes, &format, &[1]), call(0, "f", r#"{"s": "it's", "m": "aéA\\q"}"#));
}

#[test]
fn arrays_of_calls_and_names_before_arguments_are_read() {
    let array = r#"[{"name": "f", "arguments": {"n": 1}}, {"name": "g-2", "arguments": {}}]"#;
    let expected = [call(0, "f", r#"{"n": 1}"#), call(1, "g-2", "{}")].concat();
    assert_eq!(events(&format!("<|tool_call|>{array}"), &format(CallSyntax::Granite), &[1]), expected);
    assert_eq!(events(&format!("<|tool_call|>{array}<|/tool_call|>"), &format(CallSyntax::Granite), &[3]), expected);
    assert_eq!(events(&format!("[TOOL_CALLS]{array}"), &format(CallSyntax::Mistral), &[1]), expected);
    let named = r#"[THINK]hm[/THINK]So[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g-2[CALL_ID]abc[ARGS]{}"#;
    let expected = [reasoning("hm"), content("So"), expected].concat();
    assert_eq!(events(named, &format(CallSyntax::Mistral), &[1]), expected);
}

#[test]
fn arguments_stream_while_they_are_written() {
    let mut parser = OutputParser::new(hermes(), "c");
    let start = parser.push("<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":\"x");
    assert_eq!(start[1], OutputEvent::ToolArguments { index: 0, delta: "{\"a\":\"x".into() });
    assert_eq!(parser.push("y"), [OutputEvent::ToolArguments { index: 0, delta: "y".into() }]);
}

#[test]
fn a_long_answer_in_pieces_of_a_character_takes_linear_time() {
    let long = "a".repeat(1 << 18);
    for (syntax, text) in [
        (CallSyntax::Hermes, format!("<tool_call>{{\"x\":\"{long}")),
        (CallSyntax::Hermes, " ".repeat(1 << 18)),
        (CallSyntax::Hermes, "<tool_call>".repeat(1 << 14)),
        (CallSyntax::Llama3, format!("{{\"name\": \"f\", \"parameters\": {{\"x\":\"{long}")),
        (CallSyntax::QwenXml, format!("<function=f><parameter=n>{long}</parameter></function>")),
        (CallSyntax::QwenXml, format!("<function=f><parameter=s>{}", "\n".repeat(1 << 18))),
        (CallSyntax::Gemma4, format!("<|tool_call>call:f{{n:{long}}}")),
        (CallSyntax::Lfm2, format!("<|tool_call_start|>f(n={long})")),
    ] {
        assert!(!events(&text, &format(syntax), &[1]).is_empty());
    }
}

/// Arguments whose strings hold none of the family's own marks.
fn arguments() -> impl Strategy<Value = serde_json::Map<String, Value>> {
    let text = || "([a-zA-Z .:(){}=\"'\\\\\n\u{e9}漢😀-]){0,12}";
    let scalar = prop_oneof![
        text().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        (-1e6f64..1e6).prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        Just(Value::Null),
    ];
    let value = scalar.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            proptest::collection::btree_map("[a-z]{1,4}", inner, 0..3).prop_map(|map| json!(map)),
        ]
    });
    let array = proptest::collection::vec(value.clone(), 0..3).prop_map(Value::from);
    let object = proptest::collection::btree_map("[a-z]{1,4}", value, 0..3).prop_map(|map| json!(map));
    use proptest::option::of as optional;
    let fields = (
        optional(text()),
        optional(any::<i64>()),
        optional(any::<bool>()),
        optional(array),
        optional(object),
        optional(-1e9f64..1e9),
    );
    fields.prop_map(|(s, n, b, l, o, x)| {
        let all = [("s", s.map(Value::from)), ("n", n.map(Value::from)), ("b", b.map(Value::from)), ("l", l), ("o", o)];
        let all = all.into_iter().chain([("x", x.map(Value::from))]);
        all.filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn calls_written_by_a_family_are_read_back(
        calls in proptest::collection::vec((prop_oneof![Just("f"), Just("g-2")], arguments()), 1..3),
        thought in proptest::option::of("[a-z][a-z \n<]{0,10}[a-z]"),
        words in proptest::option::of("[a-z][a-z \n<\\[]{0,10}[a-z]"),
        sizes in proptest::collection::vec(1usize..9, 1..6),
        which in 0..CallSyntax::ALL.len(),
    ) {
        let syntax = CallSyntax::ALL[which];
        let format = format(syntax);
        // Where calls have no marker nothing may come before.
        let words = words.filter(|_| !syntax.is_bare());
        let calls: Vec<ToolCall> = calls
            .into_iter()
            .map(|(name, arguments)| ToolCall { id: String::new(), name: name.to_owned(), arguments })
            .collect();
        let (open, close) = format.thought_syntax.markers();
        let thought_text = thought.as_ref().map_or_else(String::new, |thought| format!("{open}\n{thought}\n{close}\n\n"));
        let text = thought_text + &words.clone().unwrap_or_default() + &syntax.calls_text(&calls);
        let found = events(&text, &format, &sizes);
        prop_assert_eq!(&found, &events(&text, &format, &[text.len()]));
        let mut expected = [thought.map(OutputEvent::Reasoning), words.map(OutputEvent::Content)].into_iter().flatten().collect::<Vec<_>>();
        for (index, call) in calls.iter().enumerate() {
            expected.push(OutputEvent::ToolCallStart { index, id: format!("c{index}"), name: call.name.clone() });
            expected.push(OutputEvent::ToolArguments { index, delta: json!(call.arguments).to_string() });
            expected.push(OutputEvent::ToolCallEnd { index });
        }
        prop_assert_eq!(canonical(found), canonical(expected), "{}", text);
    }

    #[test]
    fn the_events_do_not_depend_on_the_pieces_and_arguments_are_valid(
        parts in proptest::collection::vec(prop_oneof![
            Just("<think>".to_owned()), Just("</think>".to_owned()), Just("<tool_call>".to_owned()),
            Just("</tool_call>".to_owned()), Just("{\"name\": \"f\", \"arguments\": {\"k\": \"é".to_owned()),
            Just("\"}}".to_owned()), Just("{\"arguments\": \"{}\", \"name\": \"f\"}".to_owned()), Just(" \n".to_owned()),
            Just("<function=f>".to_owned()), Just("<parameter=n>\n".to_owned()), Just("\n</parameter>".to_owned()),
            Just("</function>".to_owned()), Just("<|channel>thought".to_owned()), Just("<channel|>".to_owned()),
            Just("<|tool_call>call:f{a:".to_owned()), Just("<|\"|>".to_owned()), Just("}<tool_call|>".to_owned()),
            Just("<|tool_call_start|>[f(a=".to_owned()), Just(")]<|tool_call_end|>".to_owned()), Just("[TOOL_CALLS]".to_owned()),
            Just("f[ARGS]{".to_owned()), Just("<|python_tag|>".to_owned()), Just("<|tool_call|>[".to_owned()),
            "[a-z<>{}/_:,\"'\\[\\]()=| \n\\\\0-9]{0,6}",
        ], 0..12),
        sizes in proptest::collection::vec(1usize..9, 1..6),
        in_thought: bool, thoughts: bool, which in 0..CallSyntax::ALL.len(),
    ) {
        let format = OutputFormat { thoughts, in_thought, ..format(CallSyntax::ALL[which]) };
        let text = parts.concat();
        let found = events(&text, &format, &sizes);
        prop_assert_eq!(&found, &events(&text, &format, &[text.len().max(1)]));
        let mut open = None;
        for event in &found {
            match event {
                OutputEvent::ToolCallStart { index, .. } => {
                    prop_assert_eq!(open, None);
                    open = Some(*index);
                }
                OutputEvent::ToolArguments { index, delta } => {
                    prop_assert_eq!(open, Some(*index));
                    let value = serde_json::from_str::<Value>(delta);
                    prop_assert!(value.as_ref().is_ok_and(Value::is_object), "{} in {}", delta, text);
                }
                OutputEvent::ToolCallEnd { index } => {
                    prop_assert_eq!(open, Some(*index));
                    open = None;
                }
                OutputEvent::Content(_) | OutputEvent::Reasoning(_) => prop_assert_eq!(open, None),
            }
        }
        prop_assert_eq!(open, None);
    }
}

/// Arguments compared as values, not as texts.
fn canonical(events: Vec<OutputEvent>) -> Vec<(OutputEvent, Value)> {
    let of = |event: OutputEvent| match event {
        OutputEvent::ToolArguments { index, delta } => {
            let value = serde_json::from_str(&delta).unwrap_or(Value::from("invalid"));
            (OutputEvent::ToolArguments { index, delta: String::new() }, value)
        }
        other => (other, Value::Null),
    };
    events.into_iter().map(of).collect()
}

/// What stands behind a message of the assistant.
const ENDS: [&str; 5] = ["<|im_end|>", "<|end_of_text|>", "<turn|>", "<|tool_response>", "</s>"];

fn published(name: &str) -> ChatTemplate {
    let path = format!("{}/tests/fixtures/templates/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
    ChatTemplate::new(&std::fs::read_to_string(path).unwrap(), "<s>", "</s>").unwrap()
}

/// What a model would have written for `answer`, and how its output is read.
fn written(template: &ChatTemplate, answer: &Message) -> (String, OutputFormat) {
    let kwargs = [("enable_thinking".to_owned(), Value::from(true))].into_iter().collect();
    let render = |messages: &[Message], ending| {
        let now = time::OffsetDateTime::UNIX_EPOCH;
        template.render(ChatRequest { messages, tools: &tools(), ending, kwargs: &kwargs, now }).unwrap()
    };
    let user = Message::text(Role::User, "Question?");
    let asked = render(std::slice::from_ref(&user), Ending::Generate);
    let closed = render(&[user, answer.clone()], Ending::Closed).prompt;
    let answer = closed.strip_prefix(&asked.prompt).unwrap_or_else(|| panic!("{closed}\n--- after\n{}", asked.prompt));
    let end = ENDS.iter().filter_map(|end| answer.rfind(end)).min().unwrap_or(answer.len());
    (answer[..end].to_owned(), asked.output)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn what_templates_write_is_read_back(
        calls in proptest::collection::vec((prop_oneof![Just("f"), Just("g-2")], arguments()), 0..3),
        thought in "[a-z\u{e9}漢][a-z \n]{0,10}[a-z.]",
        words in proptest::option::of("[a-z\u{e9}漢][a-z \n<\\[]{0,10}[a-z.]"),
        sizes in proptest::collection::vec(1usize..9, 1..6),
        which in 0usize..7,
    ) {
        let name = [
            "google-gemma-4-31B-it", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3.5-4B", "Qwen3-Coder",
            "ibm-granite-granite-4.0", "mistralai-Mistral-Nemo-Instruct-2407",
        ][which];
        let template = published(name);
        // Gemma writes thoughts only before calls, Mistral either calls or text.
        let thinks = template.capabilities().thought_syntax.is_some() && (which != 0 || !calls.is_empty());
        let words = words.filter(|_| which != 6 || calls.is_empty());
        let calls: Vec<ToolCall> = calls
            .into_iter()
            .enumerate()
            .map(|(i, (name, arguments))| ToolCall { id: format!("call0000{i}"), name: name.to_owned(), arguments })
            .collect();
        let answer = Message {
            reasoning: thinks.then_some(thought),
            tool_calls: calls,
            ..Message::text(Role::Assistant, words.unwrap_or_default())
        };
        let (text, format) = written(&template, &answer);
        let found = read(events(&text, &format, &sizes));
        prop_assert_eq!(found.0, answer.reasoning.unwrap_or_default(), "{}", text);
        prop_assert_eq!(found.1, answer.content, "{}", text);
        let expected: Vec<(String, Value)> = answer.tool_calls.into_iter().map(|call| (call.name, json!(call.arguments))).collect();
        prop_assert_eq!(found.2, expected, "{}", text);
    }
}

/// The thought, the content and the calls of events.
fn read(events: Vec<OutputEvent>) -> (String, String, Vec<(String, Value)>) {
    let (mut thought, mut content, mut calls) = (String::new(), String::new(), Vec::new());
    for event in events {
        match event {
            OutputEvent::Reasoning(text) => thought += &text,
            OutputEvent::Content(text) => content += &text,
            OutputEvent::ToolCallStart { name, .. } => calls.push((name, Value::Null)),
            OutputEvent::ToolArguments { delta, .. } => {
                if let Some(last) = calls.last_mut() {
                    last.1 = serde_json::from_str(&delta).unwrap_or_default();
                }
            }
            OutputEvent::ToolCallEnd { .. } => {}
        }
    }
    (thought, content, calls)
}
