//! Calls whose arguments are JSON: schemas of call objects, and names before JSON.

use serde_json::{Value, json};

use super::{fields, quoted};
use crate::chat::tools::Tool;

/// Where a schema tells the compiler about white space; it is read at the root of a schema only.
const GUIDANCE: &str = "x-guidance";

/// The schema of one call of any of the tools; `key` is the field of the arguments.
pub(super) fn object_schema(tools: &[(usize, &Tool)], key: &str) -> Value {
    let schema = match tools {
        [(_, tool)] => call_schema(tool, key, "#"),
        _ => json!({"anyOf": call_schemas(tools, key, "#/anyOf")}),
    };
    with_guidance(schema, tools)
}

/// The schema of an array of calls.
pub(super) fn array_schema(tools: &[(usize, &Tool)], parallel: bool) -> Value {
    let items = json!({"anyOf": call_schemas(tools, "arguments", "#/items/anyOf")});
    let mut schema = json!({"type": "array", "items": items, "minItems": 1});
    if !parallel {
        schema["maxItems"] = 1.into();
    }
    with_guidance(schema, tools)
}

fn call_schemas(tools: &[(usize, &Tool)], key: &str, root: &str) -> Vec<Value> {
    tools.iter().enumerate().map(|(i, (_, tool))| call_schema(tool, key, &format!("{root}/{i}"))).collect()
}

fn call_schema(tool: &Tool, key: &str, root: &str) -> Value {
    let mut arguments = without_guidance(&tool.parameters);
    rebase_references(&mut arguments, &format!("{root}/properties/{key}"));
    json!({
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": false,
    })
}

/// A schema that says of white space what the tools' schemas say.
fn with_guidance(mut schema: Value, tools: &[(usize, &Tool)]) -> Value {
    if let Some(guidance) = tools.iter().find_map(|(_, tool)| tool.parameters.get(GUIDANCE)) {
        schema[GUIDANCE] = guidance.clone();
    }
    schema
}

fn without_guidance(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Some(object) = schema.as_object_mut() {
        object.shift_remove(GUIDANCE);
    }
    schema
}

/// References inside a schema start at its root; once the schema is part of a larger one, they start at `base`.
pub(super) fn rebase_references(schema: &mut Value, base: &str) {
    match schema {
        Value::Object(object) => {
            for (key, value) in object.iter_mut() {
                match value {
                    Value::String(reference) if key == "$ref" => {
                        if let Some(pointer) = reference.strip_prefix('#') {
                            *reference = format!("{base}{pointer}");
                        }
                    }
                    // Instances, not schemas.
                    _ if matches!(key.as_str(), "const" | "enum" | "default" | "examples") => {}
                    _ => rebase_references(value, base),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| rebase_references(item, base)),
        _ => {}
    }
}

/// A property's schema, with the whole that its references point into.
pub(super) fn property_schema(tool: &Tool, property: &str) -> Value {
    let mut whole = without_guidance(&tool.parameters);
    rebase_references(&mut whole, "#/$defs/parameters");
    let pointer = property.replace('~', "~0").replace('/', "~1");
    let schema = json!({"$ref": format!("#/$defs/parameters/properties/{pointer}"), "$defs": {"parameters": whole}});
    with_guidance(schema, &[(0, tool)])
}

/// Rules `named`: what `lead` makes of a tool's name, and its arguments as an object.
pub(super) fn named_arguments(tools: &[(usize, &Tool)], lead: impl Fn(&str) -> String) -> String {
    let names: Vec<String> = tools.iter().map(|(i, _)| format!("named_{i}")).collect();
    let rules = tools
        .iter()
        .map(|(i, tool)| format!("named_{i}: {} args_{i}\nargs_{i}: %json {}\n", lead(&tool.name), tool.parameters));
    format!("named: {}\n{}", names.join(" | "), rules.collect::<String>())
}

/// Rules `named`: calls in Python's form with JSON for values, which the parser takes for Python's.
pub(super) fn python_calls(tools: &[(usize, &Tool)]) -> String {
    let names: Vec<String> = tools.iter().map(|(i, _)| format!("named_{i}")).collect();
    let mut rules = format!("named: {}\n", names.join(" | "));
    for (i, tool) in tools {
        let properties = properties(tool);
        for (j, (key, _)) in properties.iter().enumerate() {
            let key_text = quoted(&format!("{key}="));
            rules.push_str(&format!(
                "arg_{i}_{j}: {key_text} value_{i}_{j}\nvalue_{i}_{j}: %json {}\n",
                property_schema(tool, key)
            ));
        }
        let required: Vec<bool> = properties.iter().map(|&(_, required)| required).collect();
        let all = fields(&format!("args_{i}"), &required, "\", \"", |j| format!("arg_{i}_{j}"), &mut rules);
        rules.push_str(&format!("named_{i}: {} {all} \")\"\n", quoted(&format!("{}(", tool.name))));
    }
    rules
}

/// The declared properties of a tool's arguments, and whether each is required.
pub(super) fn properties(tool: &Tool) -> Vec<(&str, bool)> {
    let required = |key: &str| {
        let list = tool.parameters.get("required").and_then(Value::as_array);
        list.is_some_and(|list| list.iter().any(|name| name == key))
    };
    let properties = tool.parameters.get("properties").and_then(Value::as_object);
    properties.into_iter().flatten().map(|(key, _)| (key.as_str(), required(key))).collect()
}
