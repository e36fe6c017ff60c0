//! Calls as tags: strings stand as they are, everything else is JSON.

use serde_json::Value;

use super::json::{properties, property_schema};
use super::{quoted, refuse};
use crate::chat::messages::MessageError;
use crate::chat::output::schema_types::types_of;
use crate::chat::tools::Tool;

/// What ends a value.
const END: &str = "\n</parameter>\n";
/// Keywords of strings that plain text can't be held to.
const TEXT_KEYWORDS: [&str; 4] = ["pattern", "format", "minLength", "maxLength"];

/// Rules `function`: a call of any of the tools, its parameters in the order of their schema.
pub(super) fn rules(tools: &[(usize, &Tool)]) -> Result<String, MessageError> {
    let names: Vec<String> = tools.iter().map(|(i, _)| format!("function_{i}")).collect();
    let mut rules = format!("function: {}\n", names.join(" | "));
    for &(i, tool) in tools {
        let mut parameters = String::new();
        for (j, (key, required)) in properties(tool).into_iter().enumerate() {
            let optional = if required { "" } else { "?" };
            parameters.push_str(&format!(" parameter_{i}_{j}{optional}"));
            rules.push_str(&format!("parameter_{i}_{j}: {} value_{i}_{j}\n", quoted(&format!("<parameter={key}>\n"))));
            rules.push_str(&value(i, j, tool, key)?);
        }
        let open = quoted(&format!("<function={}>\n", tool.name));
        rules.push_str(&format!("function_{i}: {open}{parameters} \"</function>\"\n"));
    }
    Ok(rules)
}

fn value(i: usize, j: usize, tool: &Tool, key: &str) -> Result<String, MessageError> {
    let rule = format!("value_{i}_{j}");
    let end = quoted(END);
    let schema = &tool.parameters["properties"][key];
    if !types_of(schema, &tool.parameters).has_string() {
        return Ok(format!("{rule}: {rule}_json {end}\n{rule}_json: %json {}\n", property_schema(tool, key)));
    }
    let schema = resolve(schema, &tool.parameters);
    let path = format!("properties.{key}");
    if let Some(values) = constants(schema) {
        let literals: Vec<String> = values.iter().map(|value| quoted(&plain(value))).collect();
        return Ok(format!("{rule}: ({}) {end}\n", literals.join(" | ")));
    }
    if let Some(keyword) = TEXT_KEYWORDS.into_iter().find(|keyword| schema.get(keyword).is_some()) {
        let problem = format!("the keyword `{keyword}` can't be enforced in this model's form of calls; leave it out");
        return Err(refuse(i, &format!("{path}.{keyword}"), &problem));
    }
    let alternatives = ["anyOf", "oneOf", "allOf"].into_iter().find(|keyword| schema.get(keyword).is_some());
    if let Some(keyword) = alternatives.filter(|_| !is_any_text(schema, &tool.parameters)) {
        let problem = "alternatives that allow some strings can't be enforced in this model's form of calls";
        return Err(refuse(i, &format!("{path}.{keyword}"), problem));
    }
    // Any text is a string, and the parser makes of it what else the schema allows.
    Ok(format!("{rule}[lazy]: TEXT {end}\n"))
}

/// The schema that a reference points to.
fn resolve<'s>(mut schema: &'s Value, root: &'s Value) -> &'s Value {
    for _ in 0..16 {
        let pointer = schema.get("$ref").and_then(Value::as_str).and_then(|reference| reference.strip_prefix('#'));
        match pointer.and_then(|pointer| root.pointer(pointer)) {
            Some(target) => schema = target,
            None => break,
        }
    }
    schema
}

fn constants(schema: &Value) -> Option<Vec<&Value>> {
    match (schema.get("const"), schema.get("enum").and_then(Value::as_array)) {
        (Some(value), _) => Some(vec![value]),
        (None, Some(values)) => Some(values.iter().collect()),
        (None, None) => None,
    }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Whether every text is a valid string by this schema.
fn is_any_text(schema: &Value, root: &Value) -> bool {
    let schema = resolve(schema, root);
    let says_nothing_of_text =
        constants(schema).is_none() && TEXT_KEYWORDS.iter().all(|keyword| schema.get(keyword).is_none());
    let any_of = ["anyOf", "oneOf"].iter().filter_map(|key| schema.get(key).and_then(Value::as_array));
    let mut any_of = any_of.map(|schemas| schemas.iter().any(|schema| is_any_text(schema, root)));
    let mut all_of = schema.get("allOf").and_then(Value::as_array).into_iter().flatten();
    types_of(schema, root).has_string()
        && says_nothing_of_text
        && any_of.all(|fits| fits)
        && all_of.all(|schema| is_any_text(schema, root))
}
