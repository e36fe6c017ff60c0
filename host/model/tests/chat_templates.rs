//! Published chat templates, held against the texts that the Python package transformers renders by them.

use std::path::{Path, PathBuf};

use opencoti_model::chat::{
    CallSyntax, ChatError, ChatRequest, ChatTemplate, Ending, Rendered, parse_messages, parse_tools,
};
use serde_json::{Map, Value, json};
use time::macros::datetime;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The source of a template: from the fixtures, or from the folder that OPENCOTI_TEMPLATE_DIR names.
fn source(name: &str) -> Option<String> {
    let file = format!("{name}.jinja");
    let elsewhere = std::env::var_os("OPENCOTI_TEMPLATE_DIR").map(|folder| Path::new(&folder).join(&file));
    [Some(fixtures().join("templates").join(&file)), elsewhere]
        .into_iter()
        .flatten()
        .find_map(|path| std::fs::read_to_string(path).ok())
}

fn template(name: &str) -> ChatTemplate {
    ChatTemplate::new(&source(name).unwrap(), "<bos>", "<eos>").unwrap()
}

fn render(template: &ChatTemplate, case: &Value) -> Result<Rendered, ChatError> {
    let messages = parse_messages(&case["messages"]).unwrap();
    let tools = parse_tools(&case["tools"]).unwrap();
    let generate = case["add_generation_prompt"].as_bool().unwrap_or(true);
    let ending = if generate { Ending::Generate } else { Ending::Closed };
    let kwargs: Map<String, Value> = case["kwargs"].as_object().cloned().unwrap_or_default();
    let now = datetime!(2025-01-02 03:04:05 UTC);
    template.render(ChatRequest { messages: &messages, tools: &tools, ending, kwargs: &kwargs, now })
}

/// Compares every text of a file; returns how many were compared.
fn compare(renderings: &Value, differences: &mut Vec<String>) -> usize {
    let case_named =
        |name: &Value| renderings["cases"].as_array().unwrap().iter().find(|case| case["name"] == *name).unwrap();
    let mut n = 0;
    for entry in renderings["templates"].as_array().unwrap() {
        let name = entry["template"].as_str().unwrap();
        let Some(source) = source(name) else { continue };
        let template = match ChatTemplate::new(&source, "<s>", "</s>") {
            Ok(template) => template,
            Err(error) => {
                differences.push(format!("{name}: {error}"));
                continue;
            }
        };
        for text in entry["texts"].as_array().unwrap() {
            let what = format!("{name}, {}", text["case"].as_str().unwrap());
            n += 1;
            match (render(&template, case_named(&text["case"])), text["text"].as_str()) {
                (Ok(ours), Some(theirs)) if ours.prompt == theirs => {}
                (Ok(ours), Some(theirs)) => {
                    differences.push(format!("{what}:\n{}\n--- expected\n{theirs}", ours.prompt))
                }
                (Err(error), Some(_)) => differences.push(format!("{what}: {error}")),
                // What they refuse is brought into another form, or refused in one sentence.
                (Err(error), None) => assert!(!error.to_string().contains('\n'), "{what}: {error}"),
                (Ok(_), None) => {}
            }
        }
    }
    n
}

#[test]
fn conversations_are_rendered_as_transformers_renders_them() {
    let mut differences = Vec::new();
    let renderings = serde_json::from_str(include_str!("fixtures/renderings.json")).unwrap();
    let n = compare(&renderings, &mut differences);
    assert!(differences.is_empty(), "{} of {n} differ\n{}", differences.len(), differences.join("\n=====\n"));
    assert!(n >= 120, "only {n} texts were compared");
}

/// The same over a file that make_renderings.py made of more templates; differences are shown, not failed.
#[test]
fn more_templates_may_be_compared() {
    let Some(file) = std::env::var_os("OPENCOTI_RENDERINGS") else { return };
    let mut differences = Vec::new();
    let renderings = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let n = compare(&renderings, &mut differences);
    println!("{} of {n} differ\n{}", differences.len(), differences.join("\n=====\n"));
}

#[test]
fn the_syntax_of_calls_and_thoughts_is_found_in_the_template() {
    for (name, syntax, thinks) in [
        ("google-gemma-4-31B-it", Some(CallSyntax::Gemma4), true),
        ("Qwen-Qwen2.5-7B-Instruct", Some(CallSyntax::Hermes), false),
        ("Qwen-Qwen3-0.6B", Some(CallSyntax::Hermes), true),
        ("Qwen3.5-4B", Some(CallSyntax::QwenXml), true),
        ("Qwen3-Coder", Some(CallSyntax::QwenXml), false),
        ("HuggingFaceTB-SmolLM3-3B", None, true),
        ("ibm-granite-granite-3.3-2B-Instruct", Some(CallSyntax::Granite), true),
        ("ibm-granite-granite-4.0", Some(CallSyntax::Hermes), false),
        ("microsoft-Phi-3.5-mini-instruct", None, false),
        ("mistralai-Mistral-Nemo-Instruct-2407", Some(CallSyntax::Mistral), false),
        ("meta-llama-Llama-3.1-8B-Instruct", Some(CallSyntax::Llama3), false),
        ("meta-llama-Llama-3.2-3B-Instruct", Some(CallSyntax::Llama3), false),
        ("LFM2-8B-A1B", Some(CallSyntax::Lfm2), false),
        ("LFM2.5-8B-A1B", Some(CallSyntax::Lfm2), true),
        ("LFM2.5-Instruct", Some(CallSyntax::Lfm2), true),
    ] {
        let Some(source) = source(name) else { continue };
        let found = ChatTemplate::new(&source, "<s>", "</s>").unwrap().capabilities();
        assert_eq!((found.call_syntax, found.thought_syntax.is_some()), (syntax, thinks), "{name}: {found:?}");
    }
}

fn weather_call() -> Value {
    json!([
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Time in Rome?"},
        {"role": "assistant", "content": null, "reasoning_content": "need tool", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "get_time", "arguments": "{\"city\": \"Rome\"}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "12:00"},
    ])
}

fn get_time() -> Value {
    json!([{"type": "function", "function": {"name": "get_time", "description": "Tells time", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "City"}}, "required": ["city"]}}}])
}

#[test]
fn gemma_4_answers_a_tool_in_the_open_turn() {
    let template = template("google-gemma-4-31B-it");
    let question = &weather_call().as_array().unwrap()[..2].to_vec();
    let asked = |kwargs: Value| render(&template, &json!({"messages": question, "kwargs": kwargs})).unwrap().prompt;
    assert_eq!(
        asked(json!({"enable_thinking": true})),
        "<bos><|turn>system\n<|think|>\nBe brief.<turn|>\n<|turn>user\nTime in Rome?<turn|>\n<|turn>model\n"
    );
    assert_eq!(
        asked(json!({})),
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nTime in Rome?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    );
    let called = render(&template, &json!({"messages": weather_call(), "tools": get_time()})).unwrap();
    assert!(!called.output.in_thought && called.output.thoughts);
    let declared = "<|tool>declaration:get_time{description:<|\"|>Tells time<|\"|>,parameters:{properties:{city:{description:<|\"|>City<|\"|>,\
                    type:<|\"|>STRING<|\"|>}},required:[<|\"|>city<|\"|>],type:<|\"|>OBJECT<|\"|>}}<tool|>";
    let turn = "<|turn>model\n<|channel>thought\nneed tool\n<channel|><|tool_call>call:get_time{city:<|\"|>Rome<|\"|>}<tool_call|>\
                <|tool_response>response:get_time{value:<|\"|>12:00<|\"|>}<tool_response|>";
    assert!(called.prompt.contains(declared), "{}", called.prompt);
    assert!(called.prompt.ends_with(turn), "{}", called.prompt);
}

#[test]
fn qwen_writes_tools_before_or_behind_the_system_text() {
    let called = json!({"messages": weather_call(), "tools": get_time()});
    let newer = render(&template("Qwen3.5-4B"), &called).unwrap();
    let turn = "<think>\nneed tool\n</think>\n\n<tool_call>\n<function=get_time>\n<parameter=city>\nRome\n</parameter>\n</function>\n\
                </tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n";
    assert!(newer.prompt.ends_with(turn) && newer.output.in_thought, "{}", newer.prompt);
    assert!(newer.prompt.find("<tools>") < newer.prompt.find("Be brief."));
    let off = json!({"messages": [{"role": "user", "content": "x"}], "kwargs": {"enable_thinking": false}});
    let off = render(&template("Qwen3.5-4B"), &off).unwrap();
    assert!(off.prompt.ends_with("<|im_start|>assistant\n<think>\n\n</think>\n\n") && !off.output.in_thought);
    let older = render(&template("Qwen-Qwen3-0.6B"), &called).unwrap();
    assert!(older.prompt.ends_with("<|im_start|>assistant\n") && !older.output.in_thought);
    assert!(
        older
            .prompt
            .contains("<tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>")
    );
    assert!(older.prompt.find("Be brief.") < older.prompt.find("<tools>"));
}

#[test]
fn a_template_that_lists_tools_but_writes_no_calls_gets_them_in_its_models_form() {
    let called = render(
        &template("ibm-granite-granite-3.3-2B-Instruct"),
        &json!({"messages": weather_call(), "tools": get_time()}),
    )
    .unwrap();
    assert_eq!(called.output.call_syntax, CallSyntax::Granite);
    let call = "<|start_of_role|>assistant<|end_of_role|><|tool_call|>[{\"name\":\"get_time\",\"arguments\":{\"city\":\"Rome\"}}]<|end_of_text|>";
    assert!(called.prompt.contains(call), "{}", called.prompt);
}
