//! `bert`: BERT encoders (all-MiniLM, BGE, E5, GTE of the first generation, cross-encoders that rank).
//!
//! Token, position and token-type embeddings are summed and normed; each block adds what attention and then a plain
//! feed-forward with GELU make of it, and norms *after* each sum. Every token sees every other, so there is no mask, no rope and
//! no vocabulary head: the result is the hidden states. A classifier (`cls.*`) gives a text, or a pair of texts, scores.

use opencoti_compute::graph::{Activation, Graph, KvGeometry, RowIndex, Value};

use super::builder::ArchBuilder;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::hparams::{HParams, PoolingType};
use crate::layer_plan::Pass;

pub(super) fn build(file: &GgufFile, hp: &HParams) -> Result<Graph, ModelError> {
    check(file, hp)?;
    let mut b = ArchBuilder::new(file);
    let e = hp.embedding_length;
    let table = b.matrix("token_embd.weight", e, hp.vocab_size)?;
    let places = b.matrix("position_embd.weight", e, hp.context_length)?;
    let token = b.graph.embed(table, 1.0);
    let place = b.graph.embed_by(places, RowIndex::Position);
    let mut x = b.graph.add(token, place);
    if let Some(types) = file.tensor("token_types.weight") {
        let n = types.info().dims.get(1).copied().unwrap_or(1);
        let types = b.matrix("token_types.weight", e, n)?;
        let ty = b.graph.embed_by(types, RowIndex::TokenType);
        x = b.graph.add(x, ty);
    }
    let mut x = norm(&mut b, "token_embd_norm", x, hp)?;
    for pass in hp.passes() {
        x = block(&mut b, hp, pass, x)?;
    }
    let scores = match hp.pooling {
        Some(PoolingType::Rank) => Some(rank_head(&mut b, file, hp, x)?),
        _ => None,
    };
    b.finish_encoder(x, scores)
}

fn block(b: &mut ArchBuilder<'_>, hp: &HParams, pass: Pass, x: Value) -> Result<Value, ModelError> {
    let l = pass.block;
    let (e, layer, head) = (hp.embedding_length, hp.layers[l], hp.head);
    let [q, k, v] = b.qkv(l, x, e, layer, head)?;
    let cache = b.graph.kv_layer(KvGeometry {
        n_kv_heads: layer.n_kv_heads,
        k_head_dim: head.key,
        v_head_dim: head.value,
        window: None,
    });
    b.graph.append(cache, k, v);
    let scale = hp.attention_scale.unwrap_or(1.0 / (head.key as f32).sqrt());
    let attended = b.graph.attend(q, cache, None, scale, None);
    let (attended, x) = b.select_outputs_in_last_pass(pass, attended, x);
    let projected = b.linear(&format!("blk.{l}.attn_output"), attended, layer.n_heads * head.value, e)?;
    let sum = b.graph.add(x, projected);
    let x = norm(b, &format!("blk.{l}.attn_output_norm"), sum, hp)?;

    let up = b.linear(&format!("blk.{l}.ffn_up"), x, e, layer.feed_forward)?;
    let up = b.graph.act(up, Activation::GeluErf);
    let down = b.linear(&format!("blk.{l}.ffn_down"), up, layer.feed_forward, e)?;
    let sum = b.graph.add(x, down);
    norm(b, &format!("blk.{l}.layer_output_norm"), sum, hp)
}

fn norm(b: &mut ArchBuilder<'_>, name: &str, x: Value, hp: &HParams) -> Result<Value, ModelError> {
    let weight = b.vector(&format!("{name}.weight"), hp.embedding_length)?;
    let bias = b.vector(&format!("{name}.bias"), hp.embedding_length)?;
    Ok(b.graph.layer_norm(x, weight, bias, hp.rms_eps))
}

/// Scores of those of the output rows that are asked for them: a dense layer with tanh, and the classifier.
fn rank_head(b: &mut ArchBuilder<'_>, file: &GgufFile, hp: &HParams, hidden: Value) -> Result<Value, ModelError> {
    let e = hp.embedding_length;
    let chosen = b.graph.select_logits(hidden);
    let pooled = match b.has("cls.weight") {
        true => {
            let dense = b.linear("cls", chosen, e, e)?;
            b.graph.act(dense, Activation::Tanh)
        }
        false => chosen,
    };
    // One score for ranking; classifiers have one for each class.
    let classes = file.tensor("cls.output.weight").and_then(|t| t.info().dims.get(1).copied()).unwrap_or(1);
    b.linear("cls.output", pooled, e, classes)
}

/// Refuses what relatives of the family do and this description does not.
fn check(file: &GgufFile, hp: &HParams) -> Result<(), ModelError> {
    let torn = hp.layers.iter().any(|layer| layer.n_heads.checked_mul(hp.head.key) != Some(hp.embedding_length));
    if torn {
        let detail = format!("times the head size {} is not the width {}", hp.head.key, hp.embedding_length);
        return Err(ModelError::Key {
            file: file.name().to_owned(),
            key: "bert.attention.head_count".to_owned(),
            detail,
        });
    }
    Ok(())
}
