//! Encoders against the hidden states and scores of transformers: in a plain interpreter and as the engine runs them, alone and
//! in a batch with others. Then single mistakes, each of which must be seen.

use opencoti_compute::graph::{Activation, Graph, Op, RowIndex, Value};
use opencoti_model::Model;
use opencoti_model::arch::Architecture;
use opencoti_model::gguf;
use opencoti_model::hparams::PoolingType;
use proptest::prelude::*;

use crate::cached::Runner;
use crate::fixture::facts;
use crate::rewrite::{load, with_key};
use crate::{Fixture, TOLERANCE, fixture, max_diff, reference};

/// First token of the second text of a fixture's pair.
fn second(name: &str) -> usize {
    facts(name)["second"].as_u64().expect("a row") as usize
}

/// Hidden states of all tokens by the interpreter.
fn hidden(graph: &Graph, f: &Fixture, second: usize) -> Vec<f32> {
    let graph = Graph { logits: None, ..graph.clone() };
    reference::pair(&graph, &f.model.weights, &f.tokens, second)
}

fn diff(name: &str, change: impl Fn(&mut Graph)) -> f32 {
    let mut f = fixture(name);
    change(&mut f.model.graph);
    max_diff(&hidden(&f.model.graph, &f, second(name)), &f.logits)
}

#[test]
fn the_interpreter_agrees_with_transformers() {
    for name in ["bert", "bert-rank"] {
        let found = diff(name, |_| {});
        assert!(found <= TOLERANCE, "{name}: {found}");
    }
    let f = fixture("bert-rank");
    let scores = reference::pair(&f.model.graph, &f.model.weights, &f.tokens, second("bert-rank"));
    let expected = facts("bert-rank")["scores"][0].as_f64().expect("a score") as f32;
    assert!((scores[0] - expected).abs() < TOLERANCE, "{}, expected {expected}", scores[0]);
}

#[test]
fn one_text_agrees_with_transformers() {
    for threads in [1, 2] {
        let f = fixture("bert");
        let mut runner = Runner::new(&f.model, threads);
        let found = runner.hidden(&[&f.tokens]).concat();
        let diff = max_diff(&found, &f.logits);
        assert!(diff <= TOLERANCE, "{threads} threads: {diff}");
    }
}

#[test]
fn a_pair_of_texts_gets_the_score_of_transformers() {
    let f = fixture("bert-rank");
    let expected = facts("bert-rank")["scores"][0].as_f64().expect("a score") as f32;
    let found = Runner::new(&f.model, 2).score(&f.tokens, second("bert-rank"));
    assert_eq!(found.len(), 1);
    assert!((found[0] - expected).abs() < TOLERANCE, "{found:?}, expected {expected}");
    let without_types = Runner::new(&f.model, 2).score(&f.tokens, f.tokens.len());
    assert!((without_types[0] - expected).abs() > 10.0 * TOLERANCE, "{without_types:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn texts_in_a_batch_are_as_alone(lengths in prop::collection::vec(1usize..41, 1..5), at in 0usize..5) {
        let f = fixture("bert");
        let mut texts: Vec<&[u32]> = lengths.iter().map(|&n| &f.tokens[..n]).collect();
        texts.truncate(2);
        texts.insert(at.min(texts.len()), &f.tokens);
        let mut runner = Runner::new(&f.model, 2);
        let together = runner.hidden(&texts);
        for (&text, found) in texts.iter().zip(&together) {
            let alone = runner.hidden(&[text]).concat();
            prop_assert!(max_diff(found, &alone) <= TOLERANCE);
            if text.len() == f.tokens.len() {
                prop_assert!(max_diff(found, &f.logits) <= TOLERANCE);
            }
        }
    }
}

#[test]
fn missing_token_types_are_seen() {
    let none = |g: &mut Graph| {
        let token = g.ops.iter().find_map(|op| if let Op::Embed { out, .. } = op { Some(*out) } else { None });
        for op in &mut g.ops {
            if let Op::EmbedBy { out, index: RowIndex::TokenType, .. } = *op {
                *op = Op::Scale { out, x: token.expect("tokens"), factor: 0.0 };
            }
        }
    };
    assert!(diff("bert", none) > 10.0 * TOLERANCE);
    let f = fixture("bert-rank");
    assert!(max_diff(&hidden(&f.model.graph, &f, f.tokens.len()), &f.logits) > 10.0 * TOLERANCE, "all of type 0");
}

#[test]
fn missing_positions_are_seen() {
    let by_type = |g: &mut Graph| {
        for op in &mut g.ops {
            if let Op::EmbedBy { index, .. } = op {
                *index = RowIndex::TokenType;
            }
        }
    };
    assert!(diff("bert", by_type) > 0.1);
}

#[test]
fn the_tanh_form_of_gelu_is_seen() {
    let tanh = |g: &mut Graph| {
        for op in &mut g.ops {
            if let Op::Act { act, .. } = op {
                *act = Activation::GeluTanh;
            }
        }
    };
    assert!(diff("bert", tanh) > TOLERANCE, "{}", diff("bert", tanh));
}

#[test]
fn a_causal_mask_is_seen() {
    assert!(diff("bert", |g| g.bidirectional = false) > 0.1);
}

#[test]
fn another_epsilon_is_seen() {
    let times = |factor: f32| {
        move |g: &mut Graph| {
            for op in &mut g.ops {
                if let Op::LayerNorm { eps, .. } = op {
                    *eps *= factor;
                }
            }
        }
    };
    assert!(diff("bert", times(100.0)) > TOLERANCE);
}

#[test]
fn norms_before_the_sums_are_seen() {
    // The stream that is added to is the sum, not what the norm makes of it.
    let before = |g: &mut Graph| {
        let mut sum_of: Vec<(Value, Value)> = Vec::new();
        for op in &mut g.ops {
            match op {
                Op::LayerNorm { out, x, .. } => sum_of.push((*out, *x)),
                Op::Add { a, .. } => {
                    if let Some((_, sum)) = sum_of.iter().find(|(normed, _)| *normed == *a) {
                        *a = *sum;
                    }
                }
                _ => {}
            }
        }
    };
    assert!(diff("bert", before) > 0.1);
}

#[test]
fn missing_biases_are_seen() {
    let no_bias = |g: &mut Graph| {
        for op in &mut g.ops {
            if let Op::MatMul { bias, .. } = op {
                *bias = None;
            }
        }
    };
    assert!(diff("bert", no_bias) > 0.1);
}

#[test]
fn a_head_is_built_for_ranking_alone() {
    let f = fixture("bert-rank");
    assert_eq!(f.model.hparams.pooling, Some(PoolingType::Rank));
    assert!(f.model.graph.logits.is_some() && f.model.graph.bidirectional && f.model.graph.token_types() == 2);
    let (_dir, mean) = with_key(&f.model.file, "bert.pooling_type", gguf::Value::U32(1));
    let model = load(mean).expect("loads");
    assert!(model.graph.logits.is_none() && model.graph.hidden.is_some());
}

#[test]
fn a_file_that_contradicts_the_architecture_is_refused() {
    let f = fixture("bert");
    for (key, value, expected) in [
        ("bert.attention.causal", gguf::Value::Bool(true), "is true, but bert reads texts in both directions here"),
        ("bert.pooling_type", gguf::Value::U32(9), "is 9, expected 0 (none), 1 (mean), 2 (cls), 3 (last) or 4 (rank)"),
        ("bert.context_length", gguf::Value::U32(65), "has dimensions {64, 64}, expected {64, 65}"),
        ("bert.attention.head_count", gguf::Value::U32(3), "3 heads do not divide the embedding length 64"),
        ("bert.pooling_type", gguf::Value::U32(4), "tensor \"cls.output.weight\" is missing"),
    ] {
        let (_dir, file) = with_key(&f.model.file, key, value);
        let error = load(file).expect_err(expected);
        assert!(error.contains(expected), "{error}");
    }
    let llama = fixture("llama");
    let (_dir, file) = with_key(&llama.model.file, "llama.attention.causal", gguf::Value::Bool(false));
    let error = load(file).expect_err("a variant");
    assert!(error.contains("is false, but llama is causal here"), "{error}");
    let same: Model = fixture("bert").model;
    assert_eq!(Architecture::of(&same.file).expect("known").name, "bert");
}
