//! Calls of Gemma 4, `call:NAME{key:value}`: a schema written out as rules of the family's own values.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{fields, quoted, refuse};
use crate::chat::messages::MessageError;
use crate::chat::tools::Tool;

/// Keywords that these rules can't hold a value to.
const REFUSED: [&str; 15] = [
    "pattern",
    "format",
    "minLength",
    "maxLength",
    "prefixItems",
    "additionalItems",
    "contains",
    "uniqueItems",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "not",
    "if",
    "dependentRequired",
];
/// Keywords that JSON's own grammar enforces on numbers.
const NUMERIC: [&str; 5] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
/// Deepest nesting of a schema without references.
const MAX_DEPTH: usize = 64;
/// Most items that bounds of an array may name.
const MAX_ITEMS: u64 = 1000;

/// Rules `function`: a call of any of the tools. Expects a rule `text`: a string behind its opening mark `quote`.
pub(super) fn rules(tools: &[(usize, &Tool)], quote: &str) -> Result<String, MessageError> {
    let names: Vec<String> = tools.iter().map(|(i, _)| format!("function_{i}")).collect();
    let mut rules = format!("function: {}\n", names.join(" | "));
    for &(i, tool) in tools {
        let mut writer =
            Writer { tool: i, root: &tool.parameters, quote, n: 0, rules: &mut rules, referred: BTreeMap::new() };
        let object = writer.object(&tool.parameters, "", 0)?;
        rules.push_str(&format!("function_{i}: {} {object}\n", quoted(&format!("call:{}", tool.name))));
    }
    rules.push_str(&format!(
        "any: any_text | any_scalar | any_array | any_object\nany_text: {quote} text\n\
         any_scalar: %json {{\"type\": [\"number\", \"boolean\", \"null\"]}}\n\
         any_array: \"[\" (any (\",\" any)*)? \"]\"\n\
         any_object: \"{{\" (any_field (\",\" any_field)*)? \"}}\"\nany_field: KEY \":\" any\nKEY: /[A-Za-z0-9_.-]+/\n"
    ));
    Ok(rules)
}

struct Writer<'a> {
    /// Place of the tool in the request.
    tool: usize,
    root: &'a Value,
    quote: &'a str,
    n: usize,
    rules: &'a mut String,
    /// Rules of schemas that are referred to, by pointer.
    referred: BTreeMap<String, String>,
}

impl<'a> Writer<'a> {
    fn rule(&mut self, body: &str) -> String {
        let name = self.name();
        self.define(&name, body);
        name
    }

    fn name(&mut self) -> String {
        self.n += 1;
        format!("v_{}_{}", self.tool, self.n)
    }

    fn define(&mut self, name: &str, body: &str) {
        self.rules.push_str(&format!("{name}: {body}\n"));
    }

    fn refuse<T>(&self, path: &str, problem: &str) -> Result<T, MessageError> {
        Err(refuse(self.tool, path, problem))
    }

    /// The rule of a schema's values.
    fn value(&mut self, schema: &'a Value, path: &str, depth: usize) -> Result<String, MessageError> {
        let object = match schema {
            Value::Bool(true) => return Ok("any".to_owned()),
            Value::Object(object) if depth <= MAX_DEPTH => object,
            _ => return self.refuse(path, "is a schema that no call of this model can be held to"),
        };
        if let Some(keyword) = REFUSED.into_iter().find(|keyword| object.contains_key(*keyword)) {
            let problem =
                format!("the keyword `{keyword}` can't be enforced in this model's form of calls; leave it out");
            return self.refuse(&at(path, keyword), &problem);
        }
        if let Some(reference) = object.get("$ref") {
            return self.reference(reference, path, depth);
        }
        if let Some(values) = object.get("const").map(|value| vec![value]).or_else(|| list(object, "enum")) {
            let values: Vec<String> = values.into_iter().map(|value| self.literal(value)).collect();
            return Ok(self.rule(&values.join(" | ")));
        }
        for keyword in ["anyOf", "oneOf", "allOf"] {
            if let Some(schemas) = list(object, keyword) {
                return self.alternatives(&schemas, keyword, path, depth);
            }
        }
        let types: Vec<&str> = match object.get("type") {
            Some(Value::String(name)) => vec![name],
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            _ if object.contains_key("properties") => vec!["object"],
            _ if object.contains_key("items") => vec!["array"],
            _ => return Ok("any".to_owned()),
        };
        let rules = types
            .into_iter()
            .map(|name| self.typed(name, schema, object, path, depth))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(match rules.as_slice() {
            [rule] => rule.clone(),
            rules => self.rule(&rules.join(" | ")),
        })
    }

    fn typed(
        &mut self,
        name: &str,
        schema: &'a Value,
        object: &'a Map<String, Value>,
        path: &str,
        depth: usize,
    ) -> Result<String, MessageError> {
        match name {
            "string" => Ok("any_text".to_owned()),
            "object" => self.object(schema, path, depth),
            "array" => self.array(object, path, depth),
            _ => {
                let mut scalar = json!({"type": name});
                for key in NUMERIC {
                    if let Some(bound) = object.get(key) {
                        scalar[key] = bound.clone();
                    }
                }
                Ok(self.rule(&format!("%json {scalar}")))
            }
        }
    }

    fn alternatives(
        &mut self,
        schemas: &[&'a Value],
        keyword: &str,
        path: &str,
        depth: usize,
    ) -> Result<String, MessageError> {
        if keyword == "allOf" && schemas.len() != 1 {
            return self
                .refuse(&at(path, keyword), "several schemas at once can't be enforced in this model's form of calls");
        }
        let mut rules = Vec::with_capacity(schemas.len());
        for (i, schema) in schemas.iter().enumerate() {
            rules.push(self.value(schema, &format!("{}[{i}]", at(path, keyword)), depth + 1)?);
        }
        Ok(self.rule(&rules.join(" | ")))
    }

    fn reference(&mut self, reference: &'a Value, path: &str, depth: usize) -> Result<String, MessageError> {
        let pointer = reference.as_str().and_then(|reference| reference.strip_prefix('#'));
        let target = pointer.and_then(|pointer| Some((pointer, self.root.pointer(pointer)?)));
        let Some((pointer, schema)) = target else {
            return self.refuse(&at(path, "$ref"), "points to nothing in the schema");
        };
        if let Some(rule) = self.referred.get(pointer) {
            return Ok(rule.clone());
        }
        let name = self.name();
        self.referred.insert(pointer.to_owned(), name.clone());
        let body = self.value(schema, path, depth + 1)?;
        self.define(&name, &body);
        Ok(name)
    }

    /// The rule of an object: its declared properties, sorted as templates sort them; or any keys, if none is declared.
    fn object(&mut self, schema: &'a Value, path: &str, depth: usize) -> Result<String, MessageError> {
        let declared = schema.get("properties").and_then(Value::as_object);
        let Some(declared) = declared.filter(|declared| !declared.is_empty()) else {
            return match schema.get("additionalProperties") {
                Some(Value::Bool(false)) => Ok(self.rule("\"{}\"")),
                Some(values @ Value::Object(_)) => {
                    let value = self.value(values, &at(path, "additionalProperties"), depth + 1)?;
                    Ok(self.rule(&format!("\"{{\" (KEY \":\" {value} (\",\" KEY \":\" {value})*)? \"}}\"")))
                }
                _ if depth == 0 && declared.is_some() => Ok(self.rule("\"{}\"")),
                _ => Ok("any_object".to_owned()),
            };
        };
        let mut keys: Vec<&String> = declared.keys().collect();
        keys.sort();
        let required = list(schema.as_object().unwrap_or(declared), "required").unwrap_or_default();
        let mut items = Vec::with_capacity(keys.len());
        let mut is_required = Vec::with_capacity(keys.len());
        for key in keys {
            let value = self.value(&declared[key], &at(path, &format!("properties.{key}")), depth + 1)?;
            items.push(self.rule(&format!("{} {value}", quoted(&format!("{key}:")))));
            is_required.push(required.iter().any(|name| *name == key));
        }
        let name = self.name();
        let all = fields(&name, &is_required, "\",\"", |i| items[i].clone(), self.rules);
        self.define(&name, &format!("\"{{\" {all} \"}}\""));
        Ok(name)
    }

    fn array(&mut self, object: &'a Map<String, Value>, path: &str, depth: usize) -> Result<String, MessageError> {
        let bound = |key: &str| object.get(key).and_then(Value::as_u64);
        let (least, most) = (bound("minItems").unwrap_or(0), bound("maxItems"));
        for (key, bound) in [("minItems", Some(least)), ("maxItems", most)] {
            if bound.is_some_and(|bound| bound > MAX_ITEMS) {
                return self.refuse(&at(path, key), &format!("is more than {MAX_ITEMS}, which can't be enforced"));
            }
        }
        let item = match object.get("items") {
            Some(items) => self.value(items, &at(path, "items"), depth + 1)?,
            None => "any".to_owned(),
        };
        let more = match most {
            Some(0) => return Ok(self.rule("\"[]\"")),
            Some(most) => format!("(\",\" {item}){{{},{}}}", least.saturating_sub(1), most - 1),
            None if least > 1 => format!("(\",\" {item}){{{},}}", least - 1),
            None => format!("(\",\" {item})*"),
        };
        let items = format!("{item} {more}");
        Ok(self.rule(&if least == 0 { format!("\"[\" ({items})? \"]\"") } else { format!("\"[\" {items} \"]\"") }))
    }

    /// A value that is given: text between marks, everything else as JSON.
    fn literal(&self, value: &Value) -> String {
        match value {
            // The mark is a token of its own or spelled out; the rule `text` ends with one, so here it is repeated.
            Value::String(text) if text.is_empty() => format!("{0} {0}", self.quote),
            Value::String(text) => format!("{0} {1} {0}", self.quote, quoted(text)),
            other => quoted(&other.to_string()),
        }
    }
}

fn at(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

fn list<'v>(object: &'v Map<String, Value>, key: &str) -> Option<Vec<&'v Value>> {
    object.get(key).and_then(Value::as_array).map(|items| items.iter().collect())
}
