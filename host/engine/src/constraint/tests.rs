//! Constraints over a vocabulary of single bytes and a few longer tokens.

use proptest::prelude::*;

use super::*;

const EOS: u32 = 256;
const ABC: u32 = 257;
const BRACE_QUOTE: u32 = 258;

fn vocab() -> Vocab {
    let mut tokens: Vec<_> = (0..=255u8).map(|b| (vec![b], false)).collect();
    tokens.push((b"<|end|>".to_vec(), true));
    tokens.push((b"abc".to_vec(), false));
    tokens.push((b"{\"".to_vec(), false));
    tokens.push((Vec::new(), false));
    tokens.push((b"abc".to_vec(), false));
    tokens.push((vec![b' '; 1500], false));
    Vocab::new(tokens, &[EOS])
}

fn compile(grammar: Grammar<'_>) -> Result<Matcher, ConstraintError> {
    ConstraintFactory::new(&vocab()).unwrap().compile(grammar)
}

/// Commits the bytes one by one as long as the mask allows; gives what was read, and whether the text may end there.
fn read(matcher: &mut Matcher, text: &str) -> (String, bool) {
    for (i, byte) in text.bytes().enumerate() {
        let mask = matcher.compute_mask().unwrap();
        if !mask.is_allowed(byte.into()) {
            return (text[..i].to_owned(), mask.is_allowed(EOS));
        }
        matcher.commit(byte.into()).unwrap();
    }
    (text.to_owned(), matcher.compute_mask().unwrap().is_allowed(EOS))
}

fn takes(grammar: Grammar<'_>, text: &str) -> bool {
    read(&mut compile(grammar).unwrap(), text) == (text.to_owned(), true)
}

#[test]
fn a_schema_lets_only_valid_objects_through() {
    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    assert!(takes(Grammar::JsonSchema(&schema), r#"{"name": "Ada", "age": 36}"#));
    assert!(takes(Grammar::JsonSchema(&schema), "{\n  \"name\": \"Ada\",\n  \"age\": 36\n}"));
    assert!(!takes(Grammar::JsonSchema(&schema), r#"{"name": "Ada"}"#));
    assert!(!takes(Grammar::JsonSchema(&schema), r#"{"name": "Ada", "age": -1}"#));
    assert!(!takes(Grammar::JsonSchema(&schema), r#"[]"#));
}

#[test]
fn json_object_lets_any_object_through_and_nothing_else() {
    assert!(takes(Grammar::JsonObject, r#"{"a": [1, {"b": null}]}"#));
    assert!(!takes(Grammar::JsonObject, "[1]"));
    assert!(!takes(Grammar::JsonObject, "1"));
}

#[test]
fn references_and_unions_are_enforced() {
    let schema = json!({
        "anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "array", "items": {"$ref": "#"}}],
        "$defs": {"leaf": {"enum": ["x", 3]}},
    });
    assert!(takes(Grammar::JsonSchema(&schema), r#"["x", [3, []]]"#));
    assert!(!takes(Grammar::JsonSchema(&schema), r#"["y"]"#));
}

#[test]
fn whitespace_cannot_go_on_without_end() {
    let schema = json!({"type": "object"});
    let mut matcher = compile(Grammar::JsonSchema(&schema)).unwrap();
    let (read, _) = read(&mut matcher, &format!("{{{}", " ".repeat(200)));
    assert!(read.len() < 60, "{}", read.len());
}

#[test]
fn a_schema_that_cannot_be_enforced_is_refused_with_the_path() {
    let error = compile(Grammar::JsonSchema(&json!({"properties": {"a": {"not": {}}}}))).unwrap_err();
    assert!(matches!(&error, ConstraintError::Schema { path, .. } if path == "properties.a.not"), "{error}");
    for schema in [json!({"enum": []}), json!({"type": "string", "pattern": "("}), json!(false), json!(3)] {
        compile(Grammar::JsonSchema(&schema)).expect_err(&schema.to_string());
    }
}

#[test]
fn every_format_that_is_promised_compiles() {
    for format in ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"] {
        compile(Grammar::JsonSchema(&json!({"type": "string", "format": format}))).expect(format);
    }
}

#[test]
fn lark_grammars_are_enforced_and_broken_ones_refused() {
    let lark = "start: \"call \" NAME\nNAME: /[a-z]+/";
    assert!(takes(Grammar::Lark(lark), "call abc"));
    assert!(!takes(Grammar::Lark(lark), "call 1"));
    assert!(compile(Grammar::Lark("start: undefined_rule")).is_err());
    assert!(compile(Grammar::Lark("")).is_err());
}

#[test]
fn gbnf_uses_long_tokens_and_ends_only_where_it_may() {
    let mut matcher = compile(Grammar::Gbnf("root ::= \"abc\" [x]")).unwrap();
    let mask = matcher.compute_mask().unwrap();
    assert!(mask.is_allowed(ABC) && mask.is_allowed(b'a'.into()));
    assert!(!mask.is_allowed(EOS) && !mask.is_allowed(BRACE_QUOTE) && !mask.is_allowed(b'b'.into()));
    matcher.commit(ABC).unwrap();
    assert!(!matcher.is_finished());
    matcher.commit(b'x'.into()).unwrap();
    assert!(matcher.is_finished());
    let mask = matcher.compute_mask().unwrap();
    assert_eq!(mask.iter().collect::<Vec<_>>(), [EOS]);
    matcher.commit(EOS).unwrap();
}

#[test]
fn both_kinds_stop_when_nothing_can_follow() {
    let schema = json!({"const": true});
    for grammar in [Grammar::JsonSchema(&schema), Grammar::Gbnf("root ::= \"true\""), Grammar::Lark("start: \"true\"")]
    {
        let mut matcher = compile(grammar).unwrap();
        for byte in b"true" {
            assert!(!matcher.is_finished());
            matcher.compute_mask().unwrap();
            matcher.commit((*byte).into()).unwrap();
        }
        assert!(matcher.is_finished(), "{grammar:?}");
        assert!(matcher.compute_mask().unwrap().is_allowed(EOS));
    }
}

#[test]
fn a_token_that_the_mask_ruled_out_is_an_error_and_no_panic() {
    for grammar in [Grammar::Gbnf("root ::= \"a\""), Grammar::Lark("start: \"a\""), Grammar::JsonObject] {
        let mut matcher = compile(grammar).unwrap();
        assert!(matcher.commit(b'!'.into()).is_err(), "{grammar:?}");
        for odd in [259, 260, 9999] {
            let mut matcher = compile(grammar).unwrap();
            let _ = matcher.commit(odd);
        }
    }
}

#[test]
fn a_grammar_that_no_token_can_begin_is_refused() {
    let only_a = Vocab::new(vec![(b"a".to_vec(), false), (b"</s>".to_vec(), true)], &[1]);
    let factory = ConstraintFactory::new(&only_a).unwrap();
    assert!(factory.compile(Grammar::Gbnf("root ::= \"b\"")).is_err());
    assert!(factory.compile(Grammar::Gbnf("root ::= \"a\"")).is_ok());
}

#[test]
fn clones_go_their_own_ways() {
    let mut a = compile(Grammar::Gbnf("root ::= \"a\" | \"b\"")).unwrap();
    let mut b = a.clone();
    a.commit(b'a'.into()).unwrap();
    b.commit(b'b'.into()).unwrap();
    assert!(a.is_finished() && b.is_finished());
}

fn any_schema() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!(true)),
        Just(json!({})),
        Just(json!({"type": "string", "minLength": 1, "maxLength": 3})),
        Just(json!({"type": "integer", "minimum": -3, "maximum": 12})),
        Just(json!({"type": ["null", "boolean"]})),
        Just(json!({"enum": ["x", 1, null]})),
        Just(json!({"type": 7})),
        Just(json!("schema")),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            inner.clone().prop_map(|s| json!({"type": "array", "items": s, "maxItems": 2})),
            proptest::collection::vec(inner.clone(), 0..3).prop_map(|s| json!({"anyOf": s})),
            proptest::collection::vec(inner.clone(), 0..3).prop_map(|s| json!({"oneOf": s})),
            (inner.clone(), inner).prop_map(|(a, b)| json!({
                "type": "object", "properties": {"a": a, "b": b}, "required": ["a"], "additionalProperties": false
            })),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any schema is enforced or refused; an enforced one always lets some token come next, and ends in JSON.
    #[test]
    fn every_schema_is_enforced_or_refused(schema in any_schema(), picks in proptest::collection::vec(any::<u16>(), 40)) {
        let Ok(mut matcher) = compile(Grammar::JsonSchema(&schema)) else { return Ok(()) };
        let vocab = vocab();
        let mut text = Vec::new();
        for pick in picks {
            if matcher.is_finished() {
                break;
            }
            let allowed: Vec<u32> = matcher.compute_mask().unwrap().iter().collect();
            prop_assert!(!allowed.is_empty());
            if allowed.contains(&EOS) {
                serde_json::from_slice::<serde::de::IgnoredAny>(&text).expect("complete JSON where the grammar may end");
            }
            let token = allowed[pick as usize % allowed.len()];
            if token == EOS {
                break;
            }
            matcher.commit(token).unwrap();
            text.extend_from_slice(vocab.token_bytes(token));
        }
    }
}
