//! WordPiece against the crate `tokenizers`: over a small vocabulary always, over that of all-MiniLM-L6-v2 where the folder
//! `$OPENCOTI_TEST_MODELS` has it.

use std::path::PathBuf;

use opencoti_model::tokenizer::{EncodeOptions, Tokenizer, TokenizerSpec};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};

const TEXT: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };
const PROMPT: EncodeOptions = EncodeOptions { add_special: true, parse_special: true };

const MARKERS: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
const WORDS: &str = "the they them hello world un ing able a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9 \
                     ##s ##ing ##able ##ed ##a ##b ##c ##d ##e ##f ##g ##h ##i ##j ##k ##l ##m ##n ##o ##p ##q ##r ##t ##u ##v ##w \
                     ##x ##y ##z ##0 ##1 ! \" # $ % & ' ( ) * + , - . / : ; < = > ? @ [ \\ ] ^ _ ` { | } ~ ß ##ß α ##β 漢 字 か ##な я \
                     ##я ﬁ # ## ¿ “ ” … €";

/// The vocabulary as `vocab.txt` lists it.
fn vocabulary(cased: bool) -> Vec<String> {
    let mut tokens: Vec<String> = MARKERS.into_iter().chain(WORDS.split_whitespace()).map(str::to_owned).collect();
    if cased {
        tokens.extend(["The", "É", "##É", "A", "##B"].map(str::to_owned));
    }
    let mut seen = std::collections::HashSet::new();
    tokens.retain(|token| seen.insert(token.clone()));
    tokens
}

/// As a model file lists it.
fn spec(tokens: &[String]) -> TokenizerSpec {
    let marker = |text: &str| MARKERS.contains(&text);
    let spelled = |text: &String| match text.strip_prefix("##") {
        _ if marker(text) => text.clone(),
        Some(rest) if !rest.is_empty() => rest.to_owned(),
        _ => format!("▁{text}"),
    };
    TokenizerSpec {
        model: "bert".to_owned(),
        token_types: Some(tokens.iter().map(|t| if marker(t) { 3 } else { 1 }).collect()),
        tokens: tokens.iter().map(spelled).collect(),
        ..TokenizerSpec::default()
    }
}

/// The same in the form of `tokenizer.json`.
fn oracle(tokens: &[String], lowercase: bool) -> tokenizers::Tokenizer {
    let vocab: serde_json::Map<String, Value> = tokens.iter().zip(0..).map(|(t, id)| (t.clone(), json!(id))).collect();
    let added = MARKERS.iter().enumerate().map(|(id, content)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
               "special": true})
    });
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
                       "lowercase": lowercase},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocab},
    });
    json.to_string().parse().expect("a tokenizer")
}

fn expected(oracle: &tokenizers::Tokenizer, text: &str, special: bool) -> Vec<u32> {
    oracle.encode(text, special).expect("encodes").get_ids().to_vec()
}

fn texts() -> impl Strategy<Value = String> {
    prop_oneof![
        "([a-zA-Z0-9 ,.!'\"#-]|the|hello|able|\\[SEP\\]|\\[MASK\\]){0,40}",
        "([ÀÉÎÕÜßñçøåİıǅ\u{301}\u{308}\u{93f}かなガ漢字αβΣςяЯё€“”…¿‐–\u{200b}\u{ad}\u{feff}\u{fffd}\u{0}\t\n\r\u{85}\u{a0}\u{2028}\u{3000}]|[a-d ]){0,30}",
        // Scripts whose characters changed their category since the Unicode tables of the oracle are left out.
        "[ -~\u{a0}-\u{520}\u{1e00}-\u{1fff}\u{2000}-\u{206f}\u{3041}-\u{30ff}\u{4e00}-\u{9fcc}\u{1f300}-\u{1f5ff}]{0,30}",
        "[a-c]{90,110}( x)?",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn random_texts_get_the_ids_of_the_tokenizers_crate(text in texts(), cased: bool) {
        let tokens = vocabulary(cased);
        let (ours, oracle) = (Tokenizer::new(spec(&tokens)).unwrap(), oracle(&tokens, !cased));
        // The oracle always takes the texts of markers as markers.
        let options = EncodeOptions { parse_special: true, ..TEXT };
        prop_assert_eq!(ours.encode(&text, options).unwrap(), expected(&oracle, &text, false));
    }
}

#[test]
fn the_markers_stand_around_a_text_and_between_two() {
    let tokens = vocabulary(false);
    let t = Tokenizer::new(spec(&tokens)).unwrap();
    let id = |text: &str| tokens.iter().position(|t| t == text).unwrap() as u32;
    let (cls, sep, unk) = (id("[CLS]"), id("[SEP]"), id("[UNK]"));
    assert_eq!((t.bos(), t.eos(), t.unk()), (Some(cls), Some(sep), Some(unk)));
    let hello = id("hello");
    assert_eq!(t.encode("Héllo", PROMPT).unwrap(), [cls, hello, sep]);
    assert_eq!(t.encode("", PROMPT).unwrap(), [cls, sep]);
    assert_eq!(t.encode("[CLS] hello [SEP]", PROMPT).unwrap(), [cls, hello, sep]);
    assert_eq!(t.encode_pair("hello", "the [SEP]").unwrap().1, 3);
    let (pair, _) = t.encode_pair("hello", "they'").unwrap();
    assert_eq!(pair, [cls, hello, sep, id("they"), id("'"), sep]);
    // What a text spells is no marker where markers are not asked for.
    assert!(!t.encode("[SEP]", TEXT).unwrap().contains(&sep));
    let ids = t.encode("they un able", PROMPT).unwrap();
    assert_eq!(String::from_utf8(t.decode(&ids, false)).unwrap(), "they un able");
}

#[test]
fn a_word_of_more_than_100_characters_is_unknown() {
    let t = Tokenizer::new(spec(&vocabulary(false))).unwrap();
    assert_eq!(t.encode(&"é".repeat(100), TEXT).unwrap().len(), 100);
    assert_eq!(t.encode(&"é".repeat(101), TEXT).unwrap(), [t.unk().unwrap()]);
}

#[test]
fn all_minilm_gets_the_ids_of_its_own_tokenizer() {
    let folder = std::env::var_os("OPENCOTI_TEST_MODELS").map(|dir| PathBuf::from(dir).join("all-MiniLM-L6-v2"));
    let Some(folder) = folder.filter(|folder| folder.exists()) else {
        eprintln!("skipped: no all-MiniLM-L6-v2 in $OPENCOTI_TEST_MODELS");
        return;
    };
    let mut oracle = tokenizers::Tokenizer::from_file(folder.join("tokenizer.json")).expect("reads");
    oracle.with_truncation(None).expect("off");
    oracle.with_padding(None);
    let ours = opencoti_model::Model::load(&folder).expect("loads").tokenizer;
    let mut runner = TestRunner::deterministic();
    for _ in 0..400 {
        let text = texts().new_tree(&mut runner).expect("a text").current();
        // The markers' own texts are where the beginning is added once only.
        if !text.contains("[SEP]") {
            assert_eq!(ours.encode(&text, PROMPT).unwrap(), expected(&oracle, &text, true), "{text:?}");
        }
    }
}
