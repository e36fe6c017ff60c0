//! Tokenizers against ids computed by other implementations, hostile vocabularies, and round trips.

use opencoti_model::tokenizer::{EncodeOptions, TokenKind, Tokenizer, TokenizerSpec, Utf8Stream};
use proptest::prelude::*;
use serde_json::Value;

const TEXT: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };
const MARKUP: EncodeOptions = EncodeOptions { add_special: false, parse_special: true };
const PROMPT: EncodeOptions = EncodeOptions { add_special: true, parse_special: true };

fn strings(value: &Value) -> Vec<String> {
    value.as_array().map_or_else(Vec::new, |list| list.iter().map(|s| s.as_str().unwrap().to_owned()).collect())
}

fn spec_of(value: &Value) -> TokenizerSpec {
    let id = |name: &str| value["ids"][name].as_u64().map(|id| id as u32);
    TokenizerSpec {
        model: value["model"].as_str().unwrap().to_owned(),
        pre: value["pre"].as_str().map(str::to_owned),
        tokens: strings(&value["tokens"]),
        scores: value["scores"].as_array().map(|list| list.iter().map(|x| x.as_f64().unwrap() as f32).collect()),
        token_types: value["token_types"]
            .as_array()
            .map(|list| list.iter().map(|x| x.as_i64().unwrap() as i32).collect()),
        merges: strings(&value["merges"]),
        bos: id("bos"),
        eos: id("eos"),
        eot: id("eot"),
        unk: id("unk"),
        add_bos: value["add_bos_token"].as_bool(),
        add_space_prefix: value["add_space_prefix"].as_bool(),
        ..TokenizerSpec::default()
    }
}

fn fixtures() -> Vec<Value> {
    serde_json::from_str(include_str!("fixtures/tokenizers.json")).unwrap()
}

/// The small vocabulary of a model and pre-tokenizer, without a space prefix.
fn fixture(model: &str, pre: Option<&str>) -> TokenizerSpec {
    let found = fixtures().into_iter().find(|f| f["model"] == model && pre.is_none_or(|pre| f["pre"] == pre)).unwrap();
    TokenizerSpec { add_space_prefix: Some(false), ..spec_of(&found) }
}

fn assert_cases(tokenizer: &Tokenizer, cases: &Value, options: EncodeOptions, name: &str) -> usize {
    let cases = cases.as_array().unwrap();
    for case in cases {
        let text = case[0].as_str().unwrap();
        let expected: Vec<u32> = case[1].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        assert_eq!(tokenizer.encode(text, options).unwrap(), expected, "{name}: {text:?}");
    }
    cases.len()
}

#[test]
fn small_vocabularies_give_the_ids_of_the_reference_implementation() {
    for value in fixtures() {
        let spec = TokenizerSpec { add_space_prefix: Some(false), ..spec_of(&value) };
        let name = format!("{} {:?}", spec.model, spec.pre);
        let tokenizer = Tokenizer::new(spec).unwrap();
        assert!(assert_cases(&tokenizer, &value["cases"], MARKUP, &name) >= 16);
    }
}

/// Vocabularies of published models, exported by fixtures/export_vocab.py into the folder OPENCOTI_VOCAB_DIR.
#[test]
fn published_vocabularies_give_the_published_ids() {
    let Some(folder) = std::env::var_os("OPENCOTI_VOCAB_DIR") else { return };
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let value: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let tokenizer = Tokenizer::new(spec_of(&value)).unwrap();
        let name = path.display().to_string();
        // The published ids of Qwen's vocabularies are those of text that isn't composed first.
        let composes = value["pre"].as_str().is_some_and(|pre| pre.starts_with("qwen"));
        let cases = value["cases"].as_array().unwrap().iter();
        let cases = cases.filter(|case| !composes || unicode_normalization::is_nfc(case[0].as_str().unwrap()));
        let n = assert_cases(&tokenizer, &cases.cloned().collect(), TEXT, &name);
        let ends: Vec<_> = tokenizer.eog_ids().iter().map(|&id| tokenizer.token_text(id).unwrap()).collect();
        println!("{name}: {n} texts, {} tokens, ends {ends:?}", tokenizer.n_vocab());
        assert_round_trips(&tokenizer);
    }
}

fn assert_round_trips(tokenizer: &Tokenizer) {
    let long_line = "The quick brown fox 漢字 12345 ".repeat(4_000);
    for text in [
        "a\r\nb\r\n\r\n  c\t\t",
        &"\n".repeat(1_000),
        &" ".repeat(1_000),
        &long_line,
        "</s><|im_end|><eos> <start_of_turn>",
        "😀👨‍👩‍👧 \u{a0}\u{3000} \u{1f}é",
        " leading",
        "trailing ",
    ] {
        let ids = tokenizer.encode(text, TEXT).unwrap();
        assert_eq!(String::from_utf8(tokenizer.decode(&ids, false)).unwrap(), text);
        let mut stream = Utf8Stream::new();
        let mut streamed: String = ids.iter().map(|&id| stream.push(tokenizer.piece(id, false))).collect();
        streamed += &stream.flush();
        // With a space prefix, the stream also shows the spaces that encoding put after tokens found as a whole.
        let visible = |text: &str| text.replace(' ', "");
        assert_eq!(visible(&streamed), visible(text));
    }
}

#[test]
fn long_lines_and_odd_texts_round_trip() {
    for value in fixtures() {
        for prefix in [false, true] {
            let spec = TokenizerSpec { add_space_prefix: Some(prefix), ..spec_of(&value) };
            assert_round_trips(&Tokenizer::new(spec).unwrap());
        }
    }
}

#[test]
fn markers_in_user_text_stay_text_and_markers_in_markup_become_tokens() {
    let tokenizer = Tokenizer::new(fixture("gpt2", Some("qwen2"))).unwrap();
    let (mark, user) = (tokenizer.token_id("<|mark|>").unwrap(), tokenizer.token_id("<|user|>").unwrap());
    let text = tokenizer.encode("<|mark|><|user|>", TEXT).unwrap();
    assert!(!text.contains(&mark) && text.contains(&user));
    assert_eq!(tokenizer.encode("<|mark|><|user|>", MARKUP).unwrap(), [mark, user]);
    assert_eq!(tokenizer.piece(mark, false), b"");
    assert_eq!(tokenizer.piece(mark, true), b"<|mark|>");
    assert_eq!(tokenizer.piece(user, false), b"<|user|>");
    assert!(tokenizer.is_special(mark) && !tokenizer.is_special(user));
}

#[test]
fn control_tokens_never_come_out_of_merging_user_text() {
    let tokens = ["<unk>", "<s>", "</s>", "<", "/", "s", ">", "</", "s>"].map(str::to_owned).to_vec();
    let spec = TokenizerSpec {
        model: "llama".into(),
        token_types: Some(vec![2, 3, 3, 1, 1, 1, 1, 1, 1]),
        scores: Some(vec![0.0; tokens.len()]),
        tokens,
        add_space_prefix: Some(false),
        ..TokenizerSpec::default()
    };
    let tokenizer = Tokenizer::new(spec).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.unk()), (Some(1), Some(2), Some(0)));
    assert_eq!(tokenizer.encode("</s>", TEXT).unwrap(), [7, 8]);
    assert_eq!(tokenizer.encode("</s>", MARKUP).unwrap(), [2]);
    assert!(tokenizer.is_eog(2));
}

#[test]
fn a_rendered_prompt_gets_exactly_one_beginning_token() {
    let mark = |spec: &TokenizerSpec| spec.tokens.iter().position(|t| t == "<|mark|>").map(|i| i as u32);
    let spec = fixture("gpt2", Some("llama-bpe"));
    let bos = mark(&spec).unwrap();
    let tokenizer = Tokenizer::new(TokenizerSpec { bos: Some(bos), ..spec }).unwrap();
    assert!(tokenizer.add_bos());
    for text in ["<|mark|>a", "a"] {
        let ids = tokenizer.encode(text, PROMPT).unwrap();
        assert_eq!(ids.iter().filter(|&&id| id == bos).count(), 1, "{text}");
        assert_eq!(ids[0], bos);
    }
    assert_eq!(tokenizer.encode("", PROMPT).unwrap(), [bos]);
}

#[test]
fn a_space_is_put_in_front_and_after_markers_and_taken_off_again() {
    let spec = TokenizerSpec { add_space_prefix: None, ..fixture("llama", None) };
    let tokenizer = Tokenizer::new(spec).unwrap();
    let ids = tokenizer.encode("the<|mark|>the", MARKUP).unwrap();
    let pieces: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.piece(id, true).to_vec()).collect();
    assert_eq!(pieces, b" the<|mark|> the");
    assert_eq!(tokenizer.decode(&ids, true), b"the<|mark|>the");
}

#[test]
fn decomposed_text_is_composed_for_qwen() {
    let tokenizer = Tokenizer::new(fixture("gpt2", Some("qwen2"))).unwrap();
    assert_eq!(tokenizer.encode("e\u{301}", TEXT).unwrap(), tokenizer.encode("é", TEXT).unwrap());
    let other = Tokenizer::new(fixture("gpt2", Some("smollm"))).unwrap();
    assert_ne!(other.encode("e\u{301}", TEXT).unwrap(), other.encode("é", TEXT).unwrap());
}

#[test]
fn the_byte_table_holds_every_token_once() {
    let tokenizer = Tokenizer::new(fixture("gemma4", None)).unwrap();
    let table: Vec<_> = tokenizer.token_bytes_table().collect();
    assert_eq!(table.len(), tokenizer.n_vocab());
    let byte = tokenizer.token_id("<0xE6>").unwrap() as usize;
    assert_eq!((table[byte].bytes, table[byte].special), (&[0xe6][..], false));
    let mark = tokenizer.token_id("<|mark|>").unwrap() as usize;
    assert_eq!((table[mark].bytes, table[mark].special), (&b"<|mark|>"[..], true));
    assert_eq!(tokenizer.kind(mark as u32), Some(TokenKind::Control));
}

#[test]
fn a_file_without_vocabulary_takes_ids_only() {
    let spec = TokenizerSpec { model: "no_vocab".into(), n_vocab: Some(32), eos: Some(2), ..TokenizerSpec::default() };
    let tokenizer = Tokenizer::new(spec).unwrap();
    assert_eq!(tokenizer.n_vocab(), 32);
    assert!(tokenizer.is_eog(2));
    assert_eq!(tokenizer.piece(5, true), b"");
    let error = tokenizer.encode("x", TEXT).unwrap_err().to_string();
    assert!(error.contains("no tokenizer") && error.contains("no_vocab"), "{error}");
}

#[test]
fn what_an_end_token_is_called_in_another_family_ends_nothing_in_gemma_4() {
    let words = ["<eos>", "<turn|>", "<|tool_response>", "</s>", "<|im_end|>"];
    let spec = |model: &str| {
        let mut spec = fixture(model, (model == "gpt2").then_some("gpt-2"));
        for (word, kind) in words.iter().zip([1, 1, 4, 1, 1]) {
            if !spec.tokens.iter().any(|token| token == word) {
                spec.tokens.push((*word).to_owned());
                spec.token_types.as_mut().unwrap().push(kind);
            }
        }
        spec
    };
    let ends = |model: &str| {
        let tokenizer = Tokenizer::new(spec(model)).unwrap();
        words.map(|word| tokenizer.is_eog(tokenizer.token_id(word).unwrap()))
    };
    assert_eq!(ends("gemma4"), [true, true, true, false, false]);
    assert_eq!(ends("gpt2"), [true, false, false, false, true]);
}

#[test]
fn gemma_4_begins_with_its_token_whatever_the_file_says() {
    let spec = TokenizerSpec { add_bos: Some(false), bos: Some(1), ..fixture("gemma4", None) };
    let tokenizer = Tokenizer::new(spec).unwrap();
    assert_eq!(tokenizer.encode("a", PROMPT).unwrap()[0], 1);
}

#[test]
fn an_unknown_pre_tokenizer_is_refused_with_the_known_ones() {
    let spec = TokenizerSpec { pre: Some("qwen9".into()), ..fixture("gpt2", Some("gpt-2")) };
    let error = Tokenizer::new(spec).err().unwrap().to_string();
    for known in ["'qwen9'", "dbrx", "gpt-4o", "lfm2", "llama-bpe", "qwen35", "refact", "smaug-bpe", "smollm", "tekken"]
    {
        assert!(error.contains(known), "{error} lacks {known}");
    }
}

#[test]
fn broken_vocabularies_are_refused_in_one_sentence_that_names_the_key() {
    let base = || fixture("llama", None);
    let bpe = || fixture("gpt2", Some("gpt-2"));
    let n = base().tokens.len();
    let scores = |at: usize, score: f32| {
        let mut scores = vec![0.0; n];
        scores[at] = score;
        Some(scores)
    };
    for (spec, expected) in [
        (TokenizerSpec { model: "wordle".into(), ..base() }, "tokenizer.ggml.model is 'wordle'"),
        (TokenizerSpec { model: "t5".into(), ..base() }, "'t5', a kind of tokenizer that is not implemented"),
        (TokenizerSpec { model: "bert".into(), unk: None, ..base() }, "tokenizer.ggml.unknown_token_id is missing"),
        (TokenizerSpec { tokens: vec![], ..base() }, "tokenizer.ggml.tokens is empty"),
        (TokenizerSpec { scores: None, ..base() }, "tokenizer.ggml.scores is missing"),
        (TokenizerSpec { scores: Some(vec![0.0]), ..base() }, "tokenizer.ggml.scores has 1 entries"),
        (TokenizerSpec { scores: scores(3, f32::NAN), ..base() }, "tokenizer.ggml.scores[3]"),
        (TokenizerSpec { token_types: Some(vec![1; 2]), ..base() }, "tokenizer.ggml.token_type has 2 entries"),
        (TokenizerSpec { token_types: Some(vec![9; n]), ..base() }, "tokenizer.ggml.token_type[0] is 9"),
        (TokenizerSpec { bos: Some(u32::MAX), ..base() }, "tokenizer.ggml.bos_token_id is 4294967295"),
        (TokenizerSpec { suppress_tokens: vec![1, 1 << 30], ..base() }, "tokenizer.ggml.suppress_tokens is 1073741824"),
        (TokenizerSpec { merges: vec![], ..bpe() }, "tokenizer.ggml.merges is missing"),
        (TokenizerSpec { merges: vec!["ab".into()], ..bpe() }, "tokenizer.ggml.merges[0] is \"ab\""),
        (TokenizerSpec { pre: Some("qwen9".into()), ..bpe() }, "tokenizer.ggml.pre is 'qwen9'"),
        (TokenizerSpec { model: "none".into(), n_vocab: None, ..TokenizerSpec::default() }, "vocab_size"),
        (
            TokenizerSpec { model: "none".into(), n_vocab: Some(4), bos: Some(4), ..TokenizerSpec::default() },
            "bos_token_id is 4",
        ),
    ] {
        let error = Tokenizer::new(spec).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(expected), "{error:?} should contain {expected:?}");
        assert!(!error.contains('\n'));
    }
}

#[test]
fn of_duplicated_tokens_the_first_is_used_and_both_print() {
    let mut spec = fixture("gpt2", Some("gpt-2"));
    let a = spec.tokens.iter().position(|t| t == "a").unwrap() as u32;
    spec.tokens.push("a".into());
    spec.token_types.as_mut().unwrap().push(1);
    let last = spec.tokens.len() as u32 - 1;
    let tokenizer = Tokenizer::new(spec).unwrap();
    assert_eq!(tokenizer.encode("a", TEXT).unwrap(), [a]);
    assert_eq!(tokenizer.piece(last, false), b"a");
}

fn random_spec() -> impl Strategy<Value = TokenizerSpec> {
    let model = prop_oneof![Just("llama"), Just("gpt2"), Just("gemma4"), Just("bert"), Just("none"), Just("x")];
    let token =
        prop_oneof!["[ab ▁\nĠé]{0,3}", Just("<0x41>".to_owned()), Just("<0xZZ>".to_owned()), Just("</s>".to_owned())];
    let id = || proptest::option::of(0u32..12);
    (
        (model, proptest::option::of(prop_oneof![Just("qwen2"), Just("smollm"), Just("?")])),
        proptest::collection::vec(token, 0..10),
        proptest::option::of(proptest::collection::vec(any::<f32>(), 0..10)),
        proptest::option::of(proptest::collection::vec(0i32..8, 0..10)),
        proptest::collection::vec("[ab ▁Ġ]{0,5}", 0..6),
        (id(), id(), id(), proptest::option::of(any::<bool>())),
        proptest::option::of(0usize..20),
    )
        .prop_map(|((model, pre), tokens, scores, types, merges, (bos, eos, unk, flag), n_vocab)| {
            let n = tokens.len();
            TokenizerSpec {
                model: model.into(),
                pre: pre.map(str::to_owned),
                // Mostly of the right length, so that building goes on.
                scores: scores.map(|mut s| {
                    if n % 4 != 0 {
                        s.resize(n, -1.0)
                    };
                    s
                }),
                token_types: types.map(|mut t| {
                    if n % 3 != 0 {
                        t.resize(n, 1)
                    };
                    t
                }),
                tokens,
                merges,
                bos,
                eos,
                unk,
                add_bos: flag,
                add_eos: flag,
                add_space_prefix: flag,
                n_vocab,
                ..TokenizerSpec::default()
            }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn no_vocabulary_and_no_text_makes_it_panic(spec in random_spec(), text in "([ab ▁\n']|</s>|\\PC){0,12}", special: bool) {
        if let Ok(tokenizer) = Tokenizer::new(spec) {
            let options = EncodeOptions { add_special: special, parse_special: special };
            if let Ok(ids) = tokenizer.encode(&text, options) {
                prop_assert!(ids.iter().all(|&id| (id as usize) < tokenizer.n_vocab()));
                tokenizer.decode(&ids, true);
            }
            tokenizer.decode(&[0, 7, u32::MAX], special);
        }
    }
}

proptest! {
    #[test]
    fn random_text_round_trips(text in "([ \n\r\t]|\\PC|[a-z<|>/]){0,40}", which in 0usize..11) {
        let value = &fixtures()[which];
        let tokenizer = Tokenizer::new(TokenizerSpec { add_space_prefix: Some(which == 10), ..spec_of(value) }).unwrap();
        let ids = tokenizer.encode(&text, TEXT).unwrap();
        let back = String::from_utf8(tokenizer.decode(&ids, false)).unwrap();
        // Qwen's tokenizers compose; everything else comes back as it was, but `▁` which SentencePiece takes for a space.
        let expected: String = match &value["pre"] {
            Value::String(pre) if pre.starts_with("qwen") => unicode_normalization::UnicodeNormalization::nfc(text.as_str()).collect(),
            Value::Null => text.replace('▁', " "),
            _ => text,
        };
        prop_assert_eq!(back, expected);
    }
}
