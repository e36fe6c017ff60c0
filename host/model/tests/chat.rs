//! Templates rendered whole, and the grammars of tool calls held against the engine that runs them.

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use opencoti_model::chat::{
    CallSyntax, ChatError, ChatRequest, ChatTemplate, ConstraintOptions, Ending, OutputEvent, OutputFormat,
    OutputParser, Rendered, Tool, ToolChoice, ToolConstraint, default_template, parse_messages, parse_tool_choice,
    parse_tools, tool_constraint,
};
use opencoti_model::tokenizer::{Tokenizer, TokenizerSpec};
use serde_json::{Map, Value, json};
use time::macros::datetime;
use toktrie::ApproximateTokEnv;

/// ChatML with the tool syntax of Hermes, written for these tests.
const TOOL_TEMPLATE: &str = r#"
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + message.content }}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if think %}{{- '<think>\n' }}{%- endif %}{%- endif %}"#;

const NO_SYSTEM: &str = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system please') }}{% endif %}\
                         [{{ m.role }}]{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, "<s>", "</s>").unwrap()
}

fn rendered(
    template: &ChatTemplate,
    messages: Value,
    tools: &[Tool],
    ending: Ending,
    kwargs: Value,
) -> Result<Rendered, ChatError> {
    let messages = parse_messages(&messages).unwrap();
    let Value::Object(kwargs) = kwargs else { panic!("kwargs") };
    let now = datetime!(2025-01-02 03:04:05 UTC);
    template.render(ChatRequest { messages: &messages, tools, ending, kwargs: &kwargs, now })
}

fn prompt(template: &ChatTemplate, messages: Value, tools: &[Tool], ending: Ending) -> String {
    rendered(template, messages, tools, ending, json!({})).unwrap().prompt
}

fn weather() -> Vec<Tool> {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": false});
    let unit = json!({"type": "object", "properties": {"unit": {"$ref": "#/$defs/u"}}, "required": ["unit"],
                      "additionalProperties": false, "$defs": {"u": {"enum": ["C", "F"]}}});
    parse_tools(&json!([
        {"type": "function", "function": {"name": "weather", "description": "<now>", "parameters": city}},
        {"type": "function", "function": {"name": "unit", "parameters": unit}},
    ]))
    .unwrap()
}

fn history() -> Value {
    json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}},
            {"id": "b", "type": "function", "function": {"name": "unit", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "12"},
        {"role": "tool", "tool_call_id": "b", "content": "C"},
    ])
}

#[test]
fn a_template_with_tools_renders_them_itself() {
    let template = template(TOOL_TEMPLATE);
    let found = template.capabilities();
    assert!(found.native_tools() && found.system && found.object_arguments && !found.typed_content, "{found:?}");
    let text = prompt(&template, history(), &weather()[..1], Ending::Generate);
    expect_test::expect![[r#"
        <|im_start|>system
        Be brief.

        <tools>
        {"type": "function", "function": {"name": "weather", "description": "<now>", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": false}}}
        </tools><|im_end|>
        <|im_start|>user
        Rome?<|im_end|>
        <|im_start|>assistant

        <tool_call>
        {"name": "weather", "arguments": {"city": "Rome"}}
        </tool_call>
        <tool_call>
        {"name": "unit", "arguments": {}}
        </tool_call><|im_end|>
        <|im_start|>user
        <tool_response>
        12
        </tool_response><|im_end|>
        <|im_start|>user
        <tool_response>
        C
        </tool_response><|im_end|>
        <|im_start|>assistant
    "#]].assert_eq(&text);
}

#[test]
fn a_template_without_tools_and_system_gets_them_as_text() {
    let template = template(NO_SYSTEM);
    let found = template.capabilities();
    assert!(!found.system && !found.tools && !found.native_tools(), "{found:?}");
    let text = prompt(&template, history(), &weather()[..1], Ending::Generate);
    expect_test::expect![[r#"
        [user]Be brief.

        You can call functions. These are their signatures, one JSON object per line:
        <tools>
        {"type":"function","function":{"name":"weather","description":"<now>","parameters":{"type":"object","properties":{"city":{"type":"string"}},"required":["city"],"additionalProperties":false}}}
        </tools>
        To call a function, answer with its name and arguments as JSON between tags, one pair of tags per call:
        <tool_call>
        {"name": <function name>, "arguments": <arguments object>}
        </tool_call>

        Rome?[assistant]<tool_call>
        {"name":"weather","arguments":{"city":"Rome"}}
        </tool_call>
        <tool_call>
        {"name":"unit","arguments":{}}
        </tool_call>[user]<tool_response>
        12
        </tool_response>
        <tool_response>
        C
        </tool_response>[assistant]"#]]
    .assert_eq(&text);
}

#[test]
fn tools_that_the_templates_own_syntax_chokes_on_are_written_as_text() {
    let source =
        TOOL_TEMPLATE.replace("{{- tool | tojson }}", "{{- tool | tojson }}{{ 'of ' + tool.function.description }}");
    let template = template(&source);
    assert!(template.capabilities().native_tools());
    let user = json!([{"role": "user", "content": "x"}]);
    assert!(prompt(&template, user.clone(), &weather()[..1], Ending::Generate).contains("of <now>"));
    assert!(prompt(&template, user, &weather()[1..], Ending::Generate).contains("You can call functions."));
}

#[test]
fn the_last_message_can_be_continued_closed_or_answered() {
    let template = template(TOOL_TEMPLATE);
    let messages = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "The sky is "}]);
    let continued = prompt(&template, messages.clone(), &[], Ending::Continue);
    assert!(continued.ends_with("<|im_start|>assistant\nThe sky is "), "{continued}");
    let closed = prompt(&template, messages.clone(), &[], Ending::Closed);
    assert!(closed.ends_with("The sky is <|im_end|>\n"), "{closed}");
    let parsed = parse_messages(&messages).unwrap();
    assert_eq!(Ending::choose(&parsed, None, None).unwrap(), Ending::Continue);
    assert_eq!(Ending::choose(&parsed, Some(true), None).unwrap(), Ending::Generate);
    assert_eq!(Ending::choose(&parsed, Some(false), Some(false)).unwrap(), Ending::Closed);
    assert_eq!(Ending::choose(&parsed[..1], None, None).unwrap(), Ending::Generate);
    assert!(Ending::choose(&parsed, Some(true), Some(true)).is_err());
    assert!(Ending::choose(&parsed[..1], None, Some(true)).is_err());
}

#[test]
fn an_open_thought_in_the_prompt_is_noticed() {
    let template = template(TOOL_TEMPLATE);
    let user = json!([{"role": "user", "content": "<think> x"}]);
    let with = rendered(&template, user.clone(), &[], Ending::Generate, json!({"think": true})).unwrap();
    assert!(with.prompt.ends_with("<think>\n") && with.output.in_thought && with.output.thoughts);
    let without = rendered(&template, user, &weather(), Ending::Generate, json!({})).unwrap();
    assert!(!without.output.in_thought);
    assert_eq!((without.output.call_syntax, without.output.tools.len()), (CallSyntax::Hermes, 2));
}

#[test]
fn a_template_that_wants_parts_gets_parts() {
    let source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}|{% endfor %}";
    let template = template(source);
    assert!(template.capabilities().typed_content);
    assert_eq!(prompt(&template, json!([{"role": "user", "content": "a"}]), &[], Ending::Generate), "a|");
}

#[test]
fn template_errors_carry_the_templates_words() {
    let broken = ChatTemplate::new("{% for %}", "", "").err().map(|e| e.to_string()).unwrap();
    assert!(broken.starts_with("the chat template is not valid Jinja: "), "{broken}");
    let source =
        "{{ messages[0].content }}{% if messages | length > 1 %}{{ raise_exception('only one message') }}{% endif %}";
    let two = json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]);
    let refused = rendered(&template(source), two, &[], Ending::Generate, json!({})).unwrap_err().to_string();
    assert!(refused.starts_with("the chat template refuses this conversation: only one message"), "{refused}");
    let useless = ChatTemplate::new("{{ raise_exception('never') }}", "", "").err().map(|e| e.to_string()).unwrap();
    assert!(useless.contains("not even one user message: never"), "{useless}");
}

fn tokenizer_with(tokens: &[&str]) -> Tokenizer {
    let tokens: Vec<String> = tokens.iter().map(|&t| t.to_owned()).collect();
    let scores = Some(vec![0.0; tokens.len()]);
    Tokenizer::new(TokenizerSpec { model: "llama".into(), tokens, scores, ..TokenizerSpec::default() }).unwrap()
}

#[test]
fn files_without_a_template_get_their_familys() {
    let messages = || {
        json!([
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "12"}, {"role": "user", "content": "Sure? "}])
    };
    let gemma = "<s><start_of_turn>user\nBe brief.\n\nTime?<end_of_turn>\n<start_of_turn>model\n12<end_of_turn>\n\
                 <start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n";
    let chatml = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTime?<|im_end|>\n<|im_start|>assistant\n12<|im_end|>\n\
                  <|im_start|>user\nSure? <|im_end|>\n<|im_start|>assistant\n";
    let llama3 = "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n\
                  Time?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n12<|eot_id|>\
                  <|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n";
    let gemma4 = "<s><|turn>system\nBe brief.<turn|>\n<|turn>user\nTime?<turn|>\n<|turn>model\n12<turn|>\n<|turn>user\nSure?<turn|>\n<|turn>model\n";
    let plain = "<s>System: Be brief.\n\nUser: Time?\n\nAssistant: 12\n\nUser: Sure?\n\nAssistant:";
    for (arch, token, name, expected) in [
        ("gemma3", "<start_of_turn>", "gemma", gemma),
        ("llama", "<|im_start|>", "chatml", chatml),
        ("llama", "<|start_header_id|>", "llama3", llama3),
        ("gemma4", "<|turn>", "gemma4", gemma4),
        ("llama", "x", "plain", plain),
    ] {
        let (found, source) = default_template(arch, &tokenizer_with(&[token])).unwrap();
        assert_eq!(found, name);
        assert_eq!(prompt(&template(source), messages(), &[], Ending::Generate), expected);
    }
    assert!(default_template("bert", &tokenizer_with(&["x"])).is_none());
}

#[test]
fn tool_choices_are_read_in_all_their_forms() {
    let tools = weather();
    let choice = |value: Value| parse_tool_choice(&value, &tools).map_err(|e| e.to_string());
    assert_eq!(choice(Value::Null), Ok(ToolChoice::Auto));
    assert_eq!(choice(json!("required")), Ok(ToolChoice::Required));
    assert_eq!(choice(json!({"type": "function", "function": {"name": "unit"}})), Ok(ToolChoice::Named("unit".into())));
    let allowed = json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "unit"}}]}});
    assert_eq!(choice(allowed), Ok(ToolChoice::Allowed { names: vec!["unit".into()], required: true }));
    let unknown = json!({"type": "function", "function": {"name": "x"}});
    assert_eq!(choice(unknown).unwrap_err(), "tool_choice.function.name: is 'x', which is not among the tools");
    assert!(choice(json!("sometimes")).unwrap_err().contains("expected none, auto, required"));
    assert!(parse_tool_choice(&json!("required"), &[]).is_err());
    let custom = parse_tools(&json!([{"type": "custom"}])).unwrap_err().to_string();
    assert_eq!(custom, "tools[0].type: is \"custom\", but only \"function\" tools are supported");
}

/// Whether a grammar takes the whole text, and could stop there.
fn accepts(constraint: &ToolConstraint, text: &str) -> bool {
    let ToolConstraint::Lark(lark) = constraint else { panic!("no grammar") };
    let factory = ParserFactory::new_simple(&ApproximateTokEnv::single_byte_env()).unwrap();
    let mut matcher = Matcher::new(factory.create_parser(TopLevelGrammar::from_lark(lark.clone())));
    assert!(!matcher.is_error(), "{:?}\n{lark}", matcher.get_error());
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    let taken = matcher.try_consume_tokens(&tokens).unwrap();
    taken == tokens.len() && matcher.is_accepting().unwrap()
}

const ROME: &str = r#"<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>"#;
const CELSIUS: &str = r#"<tool_call>{"name": "unit", "arguments": {"unit": "C"}}</tool_call>"#;

fn constraint(choice: ToolChoice, parallel: bool, thoughts: bool, in_thought: bool) -> ToolConstraint {
    let output = &OutputFormat { thoughts, in_thought, ..OutputFormat::default() };
    let options = ConstraintOptions { parallel, answer: None, output, special: &|_| None };
    tool_constraint(&weather(), &choice, options).unwrap()
}

#[test]
fn a_required_call_is_forced_and_its_arguments_are_valid() {
    let one = constraint(ToolChoice::Required, false, false, false);
    assert!(accepts(&one, ROME) && accepts(&one, CELSIUS));
    assert!(!accepts(&one, &format!("{ROME}\n{CELSIUS}")));
    assert!(!accepts(&one, "hello") && !accepts(&one, ""));
    for wrong in [r#""name": "other""#, r#""name": "unit""#] {
        assert!(!accepts(&one, &ROME.replace(r#""name": "weather""#, wrong)), "{wrong}");
    }
    assert!(!accepts(&one, &CELSIUS.replace("\"C\"", "\"K\"")));
    let many = constraint(ToolChoice::Required, true, false, false);
    assert!(accepts(&many, &format!("{ROME}\n{CELSIUS}")));
}

#[test]
fn a_choice_that_names_a_function_is_one_call_of_it() {
    for parallel in [false, true] {
        let named = constraint(ToolChoice::Named("unit".into()), parallel, false, false);
        assert!(accepts(&named, CELSIUS) && !accepts(&named, ROME));
        assert!(!accepts(&named, &format!("{CELSIUS}\n{CELSIUS}")));
    }
}

#[test]
fn an_answer_is_calls_or_json_of_its_schema() {
    let schema = json!({"$ref": "#/$defs/answer", "$defs": {"answer": {
        "type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"],
        "additionalProperties": false}}});
    let with_answer = |choice, parallel, thoughts| {
        let output = &OutputFormat { thoughts, ..OutputFormat::default() };
        let options = ConstraintOptions { parallel, answer: Some(&schema), output, special: &|_| None };
        tool_constraint(&weather(), &choice, options).unwrap()
    };
    let auto = with_answer(ToolChoice::Auto, true, true);
    for text in [r#"{"warm": true}"#, "\n{\"warm\":false}", ROME, &format!("{ROME}\n{CELSIUS}")] {
        assert!(accepts(&auto, text), "{text}");
    }
    assert!(accepts(&auto, r#"<think>hm</think>{"warm": true}"#));
    for text in ["", "It is warm.", r#"{"warm": 1}"#, &format!(r#"{{"warm": true}}{ROME}"#)] {
        assert!(!accepts(&auto, text), "{text}");
    }
    let single = with_answer(ToolChoice::Auto, false, false);
    assert!(accepts(&single, ROME) && !accepts(&single, &format!("{ROME}{CELSIUS}")));
    let required = with_answer(ToolChoice::Required, true, false);
    assert!(accepts(&required, ROME) && !accepts(&required, r#"{"warm": true}"#));
}

#[test]
fn with_auto_text_is_free_and_calls_are_valid() {
    let auto = constraint(ToolChoice::Auto, true, false, false);
    for text in ["", "Hello <b>", ROME, &format!("I'll look.\n{ROME}\n{CELSIUS}\n"), "a <tool_cal"] {
        assert!(accepts(&auto, text), "{text}");
    }
    assert!(!accepts(&auto, "x <tool_call>y"));
    assert!(!accepts(&auto, &format!("{CELSIUS} and {}", ROME.replace("Rome\"", "Rome\", \"x\": 1"))));
    let single = constraint(ToolChoice::Auto, false, false, false);
    assert!(accepts(&single, "no call") && accepts(&single, &format!("one {ROME}")));
    assert!(!accepts(&single, &format!("{ROME}{CELSIUS}")));
}

#[test]
fn a_thought_may_come_before_the_call() {
    let thinking = constraint(ToolChoice::Required, false, true, false);
    assert!(accepts(&thinking, ROME) && accepts(&thinking, &format!("<think>\nhm <x>\n</think>\n\n{ROME}")));
    let inside = constraint(ToolChoice::Required, false, true, true);
    assert!(accepts(&inside, &format!("hm\n</think>\n\n{ROME}")) && !accepts(&inside, ROME));
    let auto = constraint(ToolChoice::Auto, true, true, false);
    assert!(accepts(&auto, &format!("<think>a</think>Let me see. {ROME}")) && accepts(&auto, "plain"));
}

#[test]
fn no_choice_means_no_grammar() {
    assert_eq!(constraint(ToolChoice::None, true, false, false), ToolConstraint::None);
}

#[test]
fn markers_that_are_special_tokens_are_matched_as_tokens() {
    let special =
        &|marker: &str| ["<tool_call>", "</tool_call>", "</think>"].iter().position(|m| *m == marker).map(|i| i as u32);
    let output = &OutputFormat { thoughts: true, ..OutputFormat::default() };
    let options = ConstraintOptions { parallel: true, answer: None, output, special };
    for choice in [ToolChoice::Required, ToolChoice::Auto] {
        let Ok(ToolConstraint::Lark(lark)) = tool_constraint(&weather(), &choice, options) else {
            panic!("no grammar")
        };
        assert!(lark.contains("<[0]>") && lark.contains("SPACE <[1]>") && lark.contains("TEXT? <[2]>"), "{lark}");
        assert!(!lark.contains("tool_call>\""), "{lark}");
    }
}

#[test]
fn what_the_grammar_forces_the_parser_reads() {
    let format = rendered(&template(TOOL_TEMPLATE), history(), &weather(), Ending::Generate, json!({})).unwrap().output;
    let mut parser = OutputParser::new(format, "call_x");
    let mut events = parser.push(&format!("{ROME}\n{CELSIUS}"));
    events.extend(parser.finish());
    let names: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            OutputEvent::ToolCallStart { id, name, .. } => Some((id.as_str(), name.as_str())),
            _ => None,
        })
        .collect();
    assert_eq!(names, [("call_x0", "weather"), ("call_x1", "unit")]);
    assert!(!events.iter().any(|event| matches!(event, OutputEvent::Content(_))));
}

/// The chat templates of published models, from a folder of .jinja files.
#[test]
fn published_templates_compile_and_render() {
    let Some(folder) = std::env::var_os("OPENCOTI_TEMPLATE_DIR") else { return };
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "jinja") {
            continue;
        }
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        match ChatTemplate::new(&std::fs::read_to_string(&path).unwrap(), "<s>", "</s>") {
            Ok(template) => {
                let kwargs = Map::new();
                let messages = parse_messages(&history()).unwrap();
                let now = datetime!(2025-01-02 03:04:05 UTC);
                let request = ChatRequest {
                    messages: &messages,
                    tools: &weather(),
                    ending: Ending::Generate,
                    kwargs: &kwargs,
                    now,
                };
                let found = template.capabilities();
                println!(
                    "{name}: native {} {found:?}: {}",
                    found.native_tools(),
                    template.render(request).map_or_else(|e| e.to_string(), |_| "ok".into())
                );
            }
            Err(error) => println!("{name}: FAILED {error}"),
        }
    }
}
