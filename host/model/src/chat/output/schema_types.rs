//! Which types of JSON values a schema allows: all that a parser of untyped text has to know of it.

use serde_json::Value;

/// Deepest chain of references and alternatives that is followed.
const MAX_DEPTH: usize = 16;

/// A set of types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::chat) struct Types(u8);

impl Types {
    pub(in crate::chat) const STRING: Self = Self(1);
    const NUMBER: Self = Self(2);
    const BOOLEAN: Self = Self(4);
    const NULL: Self = Self(8);
    const ARRAY: Self = Self(16);
    const OBJECT: Self = Self(32);
    /// Every type: what a schema allows that says nothing.
    pub(in crate::chat) const ALL: Self = Self(63);

    fn named(name: &str) -> Self {
        match name {
            "string" => Self::STRING,
            "number" | "integer" => Self::NUMBER,
            "boolean" => Self::BOOLEAN,
            "null" => Self::NULL,
            "array" => Self::ARRAY,
            "object" => Self::OBJECT,
            _ => Self::ALL,
        }
    }

    fn of(value: &Value) -> Self {
        match value {
            Value::String(_) => Self::STRING,
            Value::Number(_) => Self::NUMBER,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Null => Self::NULL,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    /// Whether a value has one of the types.
    pub(in crate::chat) fn allow(self, value: &Value) -> bool {
        self.0 & Self::of(value).0 != 0
    }

    /// Whether a string is among them.
    pub(in crate::chat) fn has_string(self) -> bool {
        self.0 & Self::STRING.0 != 0
    }

    fn union(types: impl Iterator<Item = Self>) -> Self {
        Self(types.fold(0, |all, types| all | types.0))
    }
}

/// The types that `schema`, a part of `root`, allows.
pub(in crate::chat) fn types_of(schema: &Value, root: &Value) -> Types {
    types_at(schema, root, 0)
}

fn types_at(schema: &Value, root: &Value, depth: usize) -> Types {
    let Value::Object(object) = schema else { return Types::ALL };
    if depth > MAX_DEPTH {
        return Types::ALL;
    }
    let below = |schema: &Value| types_at(schema, root, depth + 1);
    let mut types = match object.get("type") {
        Some(Value::String(name)) => Types::named(name),
        Some(Value::Array(names)) => Types::union(names.iter().filter_map(Value::as_str).map(Types::named)),
        _ => Types::ALL,
    };
    let mut narrow = |other: Types| types = Types(types.0 & other.0);
    if let Some(value) = object.get("const") {
        narrow(Types::of(value));
    }
    if let Some(Value::Array(values)) = object.get("enum") {
        narrow(Types::union(values.iter().map(Types::of)));
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(Value::Array(schemas)) = object.get(key) {
            narrow(Types::union(schemas.iter().map(below)));
        }
    }
    if let Some(Value::Array(schemas)) = object.get("allOf") {
        schemas.iter().for_each(|schema| narrow(below(schema)));
    }
    let pointer = object.get("$ref").and_then(Value::as_str).and_then(|reference| reference.strip_prefix('#'));
    if let Some(target) = pointer.and_then(|pointer| root.pointer(pointer)) {
        narrow(below(target));
    }
    types
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn types_come_from_names_values_alternatives_and_references() {
        let root = json!({"$defs": {"u": {"enum": ["C", "F"]}, "loop": {"$ref": "#/$defs/loop"}}});
        let names = |schema: Value| {
            let types = types_of(&schema, &root);
            [json!(""), json!(1), json!(true), json!(null), json!([]), json!({})].map(|value| types.allow(&value))
        };
        let only_string = [true, false, false, false, false, false];
        assert_eq!(names(json!({"type": "string"})), only_string);
        assert_eq!(names(json!({"$ref": "#/$defs/u"})), only_string);
        assert_eq!(names(json!({"allOf": [{"$ref": "#/$defs/u"}, {}]})), only_string);
        assert_eq!(names(json!({"type": ["string", "null"]})), [true, false, false, true, false, false]);
        assert_eq!(
            names(json!({"anyOf": [{"type": "integer"}, {"const": false}]})),
            [false, true, true, false, false, false]
        );
        assert_eq!(names(json!({})), [true; 6]);
        assert_eq!(names(json!({"$ref": "#/$defs/loop"})), [true; 6]);
        assert_eq!(names(json!(true)), [true; 6]);
    }
}
