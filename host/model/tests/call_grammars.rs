//! The grammars of tool calls in every family's form, held against the engine that runs them and the parser that reads
//! what they let through.

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use opencoti_model::chat::{
    CallSyntax, ConstraintOptions, MessageError, OutputEvent, OutputFormat, OutputParser, ThoughtSyntax, Tool,
    ToolChoice, ToolConstraint, parse_tools, tool_constraint,
};
use serde_json::{Value, json};
use toktrie::ApproximateTokEnv;

fn tools_with(parameters: Value) -> Vec<Tool> {
    parse_tools(&json!([
        {"type": "function", "function": {"name": "draw", "parameters": parameters}},
        {"type": "function", "function": {"name": "stop"}},
    ]))
    .unwrap()
}

fn tools() -> Vec<Tool> {
    tools_with(json!({
        "type": "object",
        "properties": {
            "what": {"type": "string"},
            "size": {"type": "integer", "minimum": 1},
            "unit": {"$ref": "#/$defs/unit"},
            "at": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
            "style": {"type": "object", "properties": {"bold": {"type": "boolean"}}, "required": ["bold"],
                      "additionalProperties": false},
        },
        "required": ["what", "size"],
        "additionalProperties": false,
        "$defs": {"unit": {"enum": ["mm", "in"]}},
    }))
}

fn format(call_syntax: CallSyntax, tools: &[Tool]) -> OutputFormat {
    let thought_syntax = if call_syntax == CallSyntax::Gemma4 { ThoughtSyntax::Channel } else { ThoughtSyntax::Tags };
    OutputFormat { thoughts: true, in_thought: false, thought_syntax, call_syntax, tools: tools.into() }
}

fn constraint(
    syntax: CallSyntax,
    tools: &[Tool],
    choice: ToolChoice,
    parallel: bool,
) -> Result<ToolConstraint, MessageError> {
    let output = &format(syntax, tools);
    tool_constraint(tools, &choice, ConstraintOptions { parallel, answer: None, output, special: &|_| None })
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

/// The calls that the parser reads in a text.
fn calls(syntax: CallSyntax, text: &str) -> Vec<(String, Value)> {
    let mut parser = OutputParser::new(format(syntax, &tools()), "c");
    let (mut names, mut arguments) = (Vec::new(), Vec::<String>::new());
    for event in parser.push(text).into_iter().chain(parser.finish()) {
        match event {
            OutputEvent::ToolCallStart { name, .. } => {
                names.push(name);
                arguments.push(String::new());
            }
            OutputEvent::ToolArguments { index, delta } => arguments[index].push_str(&delta),
            _ => {}
        }
    }
    names.into_iter().zip(arguments.iter().map(|text| serde_json::from_str(text).unwrap())).collect()
}

/// One call of `draw` in a family's form. `what` and `size` are given as the form writes them; `more` follows.
fn drawn(syntax: CallSyntax, size: &str, more: [&str; 2]) -> String {
    let [as_json, as_its_own] = more;
    match syntax {
        CallSyntax::Hermes => {
            format!(
                "<tool_call>\n{{\"name\": \"draw\", \"arguments\": {{\"what\": \"a <b>\", \"size\": {size}{as_json}}}}}\n</tool_call>"
            )
        }
        CallSyntax::Llama3 => {
            format!("{{\"name\": \"draw\", \"parameters\": {{\"what\": \"a <b>\", \"size\": {size}{as_json}}}}}")
        }
        CallSyntax::Granite => {
            format!(
                "<|tool_call|>[{{\"name\": \"draw\", \"arguments\": {{\"what\": \"a <b>\", \"size\": {size}{as_json}}}}}]"
            )
        }
        CallSyntax::Mistral => format!("[TOOL_CALLS]draw[ARGS]{{\"what\": \"a <b>\", \"size\": {size}{as_json}}}"),
        CallSyntax::QwenXml => format!(
            "<tool_call>\n<function=draw>\n<parameter=what>\na <b>\n</parameter>\n<parameter=size>\n{size}\n</parameter>\n{as_its_own}\
             </function>\n</tool_call>"
        ),
        CallSyntax::Gemma4 => {
            format!("<|tool_call>call:draw{{{as_its_own}what:<|\"|>a <b><|\"|>}}<tool_call|>").replace("SIZE", size)
        }
        CallSyntax::Lfm2 => {
            format!("<|tool_call_start|>[draw(what=\"a <b>\", size={size}{as_its_own})]<|tool_call_end|>")
        }
    }
}

/// What follows `size` for a unit, a place and a style, as JSON and in the family's own form.
fn everything(syntax: CallSyntax, unit: &str, place: &str) -> [String; 2] {
    let json = format!(", \"unit\": \"{unit}\", \"at\": {place}, \"style\": {{\"bold\": true}}");
    let own = match syntax {
        CallSyntax::QwenXml => format!(
            "<parameter=unit>\n{unit}\n</parameter>\n<parameter=at>\n{place}\n</parameter>\n<parameter=style>\n{{\"bold\": true}}\n</parameter>\n"
        ),
        // Keys are sorted.
        CallSyntax::Gemma4 => format!("at:{place},size:SIZE,style:{{bold:true}},unit:<|\"|>{unit}<|\"|>,"),
        CallSyntax::Lfm2 => format!(", unit=\"{unit}\", at={place}, style={{\"bold\": true}}"),
        _ => String::new(),
    };
    [json, own]
}

fn nothing(syntax: CallSyntax) -> [&'static str; 2] {
    ["", if syntax == CallSyntax::Gemma4 { "size:SIZE," } else { "" }]
}

fn stopped(syntax: CallSyntax) -> &'static str {
    match syntax {
        CallSyntax::Hermes => "<tool_call>{\"name\": \"stop\", \"arguments\": {}}</tool_call>",
        CallSyntax::Llama3 => "{\"name\": \"stop\", \"parameters\": {}}",
        CallSyntax::Granite => "<|tool_call|>[{\"name\": \"stop\", \"arguments\": {}}]",
        CallSyntax::Mistral => "[TOOL_CALLS][{\"name\": \"stop\", \"arguments\": {}}]",
        CallSyntax::QwenXml => "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        CallSyntax::Gemma4 => "<|tool_call>call:stop{}<tool_call|>",
        CallSyntax::Lfm2 => "<|tool_call_start|>[stop()]<|tool_call_end|>",
    }
}

#[test]
fn a_required_call_has_the_form_of_its_family_and_valid_arguments() {
    for syntax in CallSyntax::ALL {
        let grammar = constraint(syntax, &tools(), ToolChoice::Required, false).unwrap();
        let least = drawn(syntax, "3", nothing(syntax));
        let all = everything(syntax, "mm", "[1, -2.5]".replace(' ', "").as_str());
        let all = drawn(syntax, "3", [&all[0], &all[1]]);
        for text in [least.as_str(), &all, stopped(syntax)] {
            assert!(accepts(&grammar, text), "{syntax:?} refuses {text}");
            assert_eq!(calls(syntax, text).len(), 1, "{text}");
        }
        assert_eq!(calls(syntax, &least), [("draw".to_owned(), json!({"what": "a <b>", "size": 3}))]);
        let arguments = json!({"what": "a <b>", "size": 3, "unit": "mm", "at": [1, -2.5], "style": {"bold": true}});
        assert_eq!(calls(syntax, &all), [("draw".to_owned(), arguments)], "{all}");
    }
}

#[test]
fn arguments_that_break_the_schema_and_other_names_are_not_let_through() {
    for syntax in CallSyntax::ALL {
        let grammar = constraint(syntax, &tools(), ToolChoice::Required, false).unwrap();
        let with = |unit: &str, place: &str| {
            let more = everything(syntax, unit, place);
            drawn(syntax, "3", [&more[0], &more[1]])
        };
        for wrong in [
            drawn(syntax, "0", nothing(syntax)),
            drawn(syntax, "true", nothing(syntax)),
            with("cm", "[1]"),
            with("mm", "[]"),
            with("mm", "[1,2,3]"),
            drawn(syntax, "3", nothing(syntax)).replace("draw", "paint"),
            "Well, ".to_owned() + stopped(syntax),
            String::new(),
        ] {
            assert!(!accepts(&grammar, &wrong), "{syntax:?} takes {wrong}");
        }
    }
}

#[test]
fn several_calls_are_let_through_only_if_allowed() {
    for syntax in CallSyntax::ALL {
        let two = match syntax {
            // One call an answer is all that this family does.
            CallSyntax::Llama3 => continue,
            CallSyntax::Granite => stopped(syntax).replace(']', ", {\"name\": \"stop\", \"arguments\": {}}]"),
            CallSyntax::Mistral => stopped(syntax).replace("}]", "}, {\"name\": \"stop\", \"arguments\": {}}]"),
            CallSyntax::Lfm2 => stopped(syntax).replace("stop()", "stop(), stop()"),
            _ => format!("{0}\n{0}", stopped(syntax)),
        };
        let grammar = |parallel| constraint(syntax, &tools(), ToolChoice::Required, parallel).unwrap();
        assert!(accepts(&grammar(true), &two) && !accepts(&grammar(false), &two), "{syntax:?}: {two}");
        assert_eq!(calls(syntax, &two).len(), 2);
    }
}

#[test]
fn with_auto_text_is_free_before_a_call_of_any_family() {
    for syntax in CallSyntax::ALL {
        let auto = constraint(syntax, &tools(), ToolChoice::Auto, true).unwrap();
        if syntax == CallSyntax::Llama3 {
            assert_eq!(auto, ToolConstraint::None);
            continue;
        }
        let call = drawn(syntax, "3", nothing(syntax));
        for text in ["Hello <b> [x]", "", &call, &format!("Let me see.\n\n{call}")] {
            assert!(accepts(&auto, text), "{syntax:?} refuses {text}");
        }
        assert!(!accepts(&auto, &drawn(syntax, "0", nothing(syntax))), "{syntax:?}");
    }
}

#[test]
fn a_thought_may_come_before_a_call_of_gemma() {
    let grammar = constraint(CallSyntax::Gemma4, &tools(), ToolChoice::Required, true).unwrap();
    let text = format!("<|channel>thought\nhm, <b>\n<channel|>{}", stopped(CallSyntax::Gemma4));
    assert!(accepts(&grammar, &text));
}

#[test]
fn what_a_form_cannot_hold_is_refused_by_its_path_if_it_must_hold() {
    let parameters = json!({"type": "object", "properties": {
        "a": {"type": "object", "properties": {"b": {"type": "string", "pattern": "^x"}}},
        "c": {"type": "string", "pattern": "^x"},
    }});
    for (syntax, path) in [
        (CallSyntax::Gemma4, "tools[0].function.parameters.properties.a.properties.b.pattern"),
        (CallSyntax::QwenXml, "tools[0].function.parameters.properties.c.pattern"),
    ] {
        let mut tools = tools_with(parameters.clone());
        let error = constraint(syntax, &tools, ToolChoice::Required, true).unwrap_err();
        assert_eq!(error.path, path);
        assert!(error.problem.contains("`pattern`"), "{}", error.problem);
        // A model that need not call is left alone, unless the tool is strict.
        assert_eq!(constraint(syntax, &tools, ToolChoice::Auto, true), Ok(ToolConstraint::None));
        assert!(constraint(syntax, &tools, ToolChoice::Named("stop".into()), true).is_ok());
        tools[0].definition["function"]["strict"] = true.into();
        assert!(constraint(syntax, &tools, ToolChoice::Auto, true).is_err());
    }
    let tools = tools_with(parameters);
    for syntax in [CallSyntax::Hermes, CallSyntax::Lfm2] {
        assert!(constraint(syntax, &tools, ToolChoice::Required, true).is_ok(), "{syntax:?}");
    }
}

#[test]
fn recursive_schemas_and_any_values_are_written_out_for_gemma() {
    let tools = tools_with(json!({"type": "object", "properties": {
        "tree": {"$ref": "#/$defs/tree"}, "any": {}, "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    }, "$defs": {"tree": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}}}}));
    let grammar = constraint(CallSyntax::Gemma4, &tools, ToolChoice::Required, true).unwrap();
    for (text, fits) in [
        ("<|tool_call>call:draw{tree:{next:{next:null}}}<tool_call|>", true),
        ("<|tool_call>call:draw{any:[1,{k:<|\"|>x<|\"|>}],map:{a:1,b-2:2}}<tool_call|>", true),
        ("<|tool_call>call:draw{map:{a:<|\"|>x<|\"|>}}<tool_call|>", false),
        ("<|tool_call>call:draw{tree:{next:1}}<tool_call|>", false),
    ] {
        assert_eq!(accepts(&grammar, text), fits, "{text}");
    }
}

#[test]
fn marks_of_strings_may_be_special_tokens() {
    let tools = tools();
    let output = &format(CallSyntax::Gemma4, &tools);
    let special = &|marker: &str| (marker == "<|\"|>").then_some(52);
    let options = ConstraintOptions { parallel: true, answer: None, output, special };
    let Ok(ToolConstraint::Lark(lark)) = tool_constraint(&tools, &ToolChoice::Required, options) else {
        panic!("no grammar")
    };
    assert!(lark.contains("text: TEXT? <[52]>") && lark.contains("<[52]> \"mm\" <[52]>"), "{lark}");
}
