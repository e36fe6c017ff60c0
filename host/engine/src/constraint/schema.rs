//! Which JSON schemas can be enforced.
//!
//! llguidance ignores keywords that no draft knows, and names no place when it refuses one. A schema whose keyword is
//! ignored would be a promise broken silently, so everything that a schema says is looked at here first: a keyword is
//! enforced, or a mere annotation, or refused by its path.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::ConstraintError;

/// Keywords that the compiler enforces.
const ENFORCED: [&str; 27] = [
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    "const",
    "enum",
    "type",
    "items",
    "additionalItems",
    "prefixItems",
    "minItems",
    "maxItems",
    "properties",
    "additionalProperties",
    "patternProperties",
    "required",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];

/// Keywords that only describe; they never make an instance invalid.
const ANNOTATIONS: [&str; 20] = [
    "$anchor",
    "$defs",
    "definitions",
    "$schema",
    "$comment",
    "title",
    "description",
    "default",
    "deprecated",
    "readOnly",
    "writeOnly",
    "example",
    "examples",
    "contentMediaType",
    "contentEncoding",
    "contentSchema",
    "discriminator",
    "externalDocs",
    "xml",
    "$vocabulary",
];

/// Annotations that the compiler refuses or that mean nothing to it; they are taken out.
const REMOVED: [&str; 6] = ["deprecated", "contentSchema", "$vocabulary", "discriminator", "externalDocs", "xml"];

/// Text formats that the compiler enforces.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

const TYPES: [&str; 7] = ["null", "boolean", "number", "integer", "string", "array", "object"];

/// Deepest nesting of a schema.
const MAX_DEPTH: usize = 100;

/// Checks that all of `schema` can be enforced; gives it without the annotations that the compiler trips over.
///
/// Errors name the keyword by its path from the field, as in `properties.a.not`.
pub(super) fn enforceable(schema: &Value) -> Result<Value, ConstraintError> {
    let mut check = Check { root: schema, seen: HashSet::new(), old_draft: is_old_draft(schema) };
    check.schema(schema, "", "", 0)?;
    let mut cleaned = schema.clone();
    for pointer in &check.seen {
        if let Some(Value::Object(object)) = cleaned.pointer_mut(pointer) {
            object.retain(|key, value| !is_removed(key, value));
        }
    }
    Ok(cleaned)
}

fn is_removed(key: &str, value: &Value) -> bool {
    REMOVED.contains(&key) || key.starts_with("x-") || (key == "uniqueItems" && *value == Value::Bool(false))
}

/// Drafts before 2020-12 write tuples as `items` arrays and do not know `prefixItems`.
fn is_old_draft(schema: &Value) -> bool {
    let draft = schema.get("$schema").and_then(Value::as_str).unwrap_or_default();
    ["draft-03", "draft-04", "draft-06", "draft-07", "2019-09"].iter().any(|old| draft.contains(old))
}

struct Check<'a> {
    root: &'a Value,
    /// JSON pointers of the schemas seen.
    seen: HashSet<String>,
    old_draft: bool,
}

fn at(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

fn pointer_to(pointer: &str, key: &str) -> String {
    format!("{pointer}/{}", key.replace('~', "~0").replace('/', "~1"))
}

impl<'a> Check<'a> {
    fn schema(&mut self, schema: &'a Value, path: &str, pointer: &str, depth: usize) -> Result<(), ConstraintError> {
        if depth > MAX_DEPTH {
            return Err(refuse(path, format!("the schema is nested deeper than {MAX_DEPTH} levels")));
        }
        let object = match schema {
            Value::Bool(_) => return Ok(()),
            Value::Object(object) => object,
            _ => {
                return Err(refuse(path, "a schema must be an object, true or false".to_owned()));
            }
        };
        if !self.seen.insert(pointer.to_owned()) {
            return Ok(());
        }
        for (key, value) in object {
            self.keyword(object, key, value, path, pointer, depth)?;
        }
        Ok(())
    }

    fn keyword(
        &mut self,
        object: &'a Map<String, Value>,
        key: &str,
        value: &'a Value,
        path: &str,
        pointer: &str,
        depth: usize,
    ) -> Result<(), ConstraintError> {
        let here = at(path, key);
        let below = pointer_to(pointer, key);
        match key {
            "properties" | "patternProperties" => self.schemas_by_name(value, &here, &below, depth),
            "anyOf" | "oneOf" | "allOf" | "prefixItems" => {
                if key == "prefixItems" && (self.old_draft || uses_old_tuples(object)) {
                    return Err(refuse(
                        &here,
                        "prefixItems cannot be combined with the tuples of an older draft".to_owned(),
                    ));
                }
                self.schemas_in_list(value, &here, &below, depth)
            }
            "items" if value.is_array() => self.schemas_in_list(value, &here, &below, depth),
            "items" | "additionalItems" | "additionalProperties" => self.schema(value, &here, &below, depth + 1),
            "$ref" => self.reference(value, &here, depth),
            "type" => check_type(value, &here),
            "format" => check_format(object, value, &here),
            "$id" | "id" if pointer.is_empty() => Ok(()),
            "$id" | "id" => {
                Err(refuse(&here, "a schema with an identifier of its own inside another is not supported".to_owned()))
            }
            "uniqueItems" if *value == Value::Bool(false) => Ok(()),
            "x-guidance" => Err(unsupported(&here, key)),
            _ if ENFORCED.contains(&key) || ANNOTATIONS.contains(&key) || key.starts_with("x-") => Ok(()),
            _ => Err(unsupported(&here, key)),
        }
    }

    fn schemas_by_name(
        &mut self,
        value: &'a Value,
        path: &str,
        pointer: &str,
        depth: usize,
    ) -> Result<(), ConstraintError> {
        let Value::Object(schemas) = value else {
            return Err(refuse(path, "expected an object of schemas".to_owned()));
        };
        for (name, schema) in schemas {
            self.schema(schema, &at(path, name), &pointer_to(pointer, name), depth + 1)?;
        }
        Ok(())
    }

    fn schemas_in_list(
        &mut self,
        value: &'a Value,
        path: &str,
        pointer: &str,
        depth: usize,
    ) -> Result<(), ConstraintError> {
        let Value::Array(schemas) = value else {
            return Err(refuse(path, "expected an array of schemas".to_owned()));
        };
        for (i, schema) in schemas.iter().enumerate() {
            self.schema(schema, &format!("{path}[{i}]"), &format!("{pointer}/{i}"), depth + 1)?;
        }
        Ok(())
    }

    /// Only references within the schema are followed, so that a request cannot make the server fetch anything.
    fn reference(&mut self, value: &'a Value, path: &str, depth: usize) -> Result<(), ConstraintError> {
        let Some(reference) = value.as_str() else {
            return Err(refuse(path, "expected a text".to_owned()));
        };
        let pointer = match reference.strip_prefix('#') {
            Some(pointer) if pointer.is_empty() || pointer.starts_with('/') => pointer,
            _ => {
                return Err(refuse(
                    path,
                    format!("{reference:?} does not point into the schema itself, as in \"#/$defs/name\""),
                ));
            }
        };
        let Some(target) = self.root.pointer(pointer) else {
            return Err(refuse(path, format!("{reference:?} points to nothing")));
        };
        let target_path = pointer.trim_start_matches('/').replace('/', ".");
        self.schema(target, &target_path, pointer, depth + 1)
    }
}

fn uses_old_tuples(object: &Map<String, Value>) -> bool {
    object.contains_key("additionalItems") || object.get("items").is_some_and(Value::is_array)
}

fn check_type(value: &Value, path: &str) -> Result<(), ConstraintError> {
    let names: Vec<&Value> = match value {
        Value::Array(names) => names.iter().collect(),
        name => vec![name],
    };
    let unknown = names.iter().find(|name| !name.as_str().is_some_and(|name| TYPES.contains(&name)));
    match unknown {
        Some(name) => Err(refuse(path, format!("{name} is no type; there are {}", TYPES.join(", ")))),
        None if names.is_empty() => Err(refuse(path, "the list of types is empty".to_owned())),
        None => Ok(()),
    }
}

/// A format says something about strings only; of other types it is an annotation (`int64`, `double`).
fn check_format(object: &Map<String, Value>, value: &Value, path: &str) -> Result<(), ConstraintError> {
    let may_be_string = match object.get("type") {
        Some(Value::String(name)) => name == "string",
        Some(Value::Array(names)) => names.iter().any(|name| name == "string"),
        _ => true,
    };
    match value.as_str() {
        Some(format) if !may_be_string || FORMATS.contains(&format) => Ok(()),
        _ => Err(refuse(path, format!("the format {value} cannot be enforced; there are {}", FORMATS.join(", ")))),
    }
}

fn unsupported(path: &str, key: &str) -> ConstraintError {
    refuse(path, format!("the keyword `{key}` cannot be enforced; leave it out or express it otherwise"))
}

fn refuse(path: &str, message: String) -> ConstraintError {
    ConstraintError::Schema { path: path.to_owned(), message }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused_at(schema: &Value) -> String {
        match enforceable(schema) {
            Err(ConstraintError::Schema { path, .. }) => path,
            other => panic!("expected a refusal of {schema}, found {other:?}"),
        }
    }

    #[test]
    fn a_keyword_that_cannot_be_enforced_is_named_by_its_path() {
        for (schema, path) in [
            (json!({"properties": {"a": {"$dynamicRef": "#x"}}}), "properties.a.$dynamicRef"),
            (json!({"items": {"not": {}}}), "items.not"),
            (json!({"anyOf": [{}, {"if": {}}]}), "anyOf[1].if"),
            (json!({"uniqueItems": true}), "uniqueItems"),
            (json!({"nullable": true}), "nullable"),
            (json!({"x-guidance": {"lenient": true}}), "x-guidance"),
            (json!({"additionalProperties": {"contains": {}}}), "additionalProperties.contains"),
            (json!({"$ref": "#/$defs/a", "$defs": {"a": {"minContains": 1}}}), "$defs.a.minContains"),
            (json!({"$ref": "https://example.com/s"}), "$ref"),
            (json!({"$ref": "#/$defs/none"}), "$ref"),
            (json!({"type": "strin"}), "type"),
            (json!({"type": "string", "format": "binary"}), "format"),
            (json!({"properties": {"a": 1}}), "properties.a"),
            (json!({"properties": {"a": {"$id": "x"}}}), "properties.a.$id"),
            (json!({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": []}), "prefixItems"),
        ] {
            assert_eq!(refused_at(&schema), path, "{schema}");
        }
    }

    #[test]
    fn annotations_pass_and_those_in_the_way_are_taken_out() {
        let schema = json!({
            "title": "t", "x-order": 1, "type": "object",
            "properties": {"deprecated": {"type": "integer", "format": "int64", "deprecated": true}},
        });
        let cleaned = json!({
            "title": "t", "type": "object",
            "properties": {"deprecated": {"type": "integer", "format": "int64"}},
        });
        assert_eq!(enforceable(&schema).unwrap(), cleaned);
    }

    #[test]
    fn recursive_schemas_are_walked_once() {
        let schema = json!({"type": "object", "properties": {"next": {"$ref": "#"}}});
        assert_eq!(enforceable(&schema).unwrap(), schema);
    }

    #[test]
    fn a_definition_that_is_not_used_may_say_anything() {
        assert!(enforceable(&json!({"$defs": {"a": {"not": {}}}, "type": "null"})).is_ok());
    }
}
