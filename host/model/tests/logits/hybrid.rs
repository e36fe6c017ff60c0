//! Recurrent layers: other ways to write a hybrid down, and what is refused.

use opencoti_model::gguf::{Array, Value};

use crate::rewrite::{load, rewrite, with_key};
use crate::{TOLERANCE, fixture, max_diff, reference};

#[test]
fn a_list_of_recurrent_blocks_and_an_interval_say_the_same() {
    let f = fixture("qwen35");
    let list = Value::Array(Array::Bool(vec![true, true, true, false]));
    for (key, value) in [("attention.recurrent_layers", list), ("full_attention_interval", Value::U32(4))] {
        let (_dir, file) = with_key(&f.model.file, &format!("qwen35.{key}"), value);
        assert_eq!(load(file).expect("loads").graph, f.model.graph, "{key}");
    }
    let (_dir, file) = with_key(&f.model.file, "qwen35.full_attention_interval", Value::U32(2));
    assert!(load(file).expect_err("must be refused").contains("blk.1.attn_q.weight"));
}

/// The first files of Qwen3-Next have queries, keys, values and gates in one projection, in turns for each key head.
#[test]
fn a_fused_projection_of_key_heads_in_turns_is_taken_apart() {
    let f = fixture("qwen3next");
    let original = &f.model.file;
    let (_dir, file) = rewrite(original, |writer, name| {
        if name.ends_with("attn_gate.weight") {
            return Some(writer);
        }
        let block = name.strip_suffix("attn_qkv.weight")?;
        let (mixed, z) = (original.tensor(name)?, original.tensor(&format!("{block}attn_gate.weight"))?);
        let row = mixed.bytes().len() / mixed.info().dims[1];
        let rows = |from: &[u8], start: usize, n: usize| from[start * row..(start + n) * row].to_vec();
        // Two key heads of 16, with two value heads of 16 each.
        let of_head = |head: usize| {
            let qkv = [(16 * head, 16), (32 + 16 * head, 16), (64 + 32 * head, 32)];
            let qkv = qkv.map(|(start, n)| rows(mixed.bytes(), start, n)).concat();
            [qkv, rows(z.bytes(), 32 * head, 32)].concat()
        };
        let bytes = [of_head(0), of_head(1)].concat();
        Some(writer.tensor(&format!("{block}ssm_in.weight"), &[64, 192], mixed.info().ty, bytes))
    });
    let model = load(file).expect("loads");
    assert!(model.graph.weights.iter().any(|w| w.name == "blk.0.ssm_in.weight"));
    assert!(max_diff(&reference::logits(&model.graph, &model.weights, &f.tokens), &f.logits) <= TOLERANCE);
}

#[test]
fn blocks_that_draft_are_no_part_of_the_trunk() {
    let f = fixture("qwen35");
    let (_dir, file) = rewrite(&f.model.file, |writer, name| {
        let tensor = f.model.file.tensor(name).expect("listed");
        let kept = writer.tensor(name, &tensor.info().dims, tensor.info().ty, tensor.bytes().to_vec());
        (name == "blk.3.attn_norm.weight").then(|| kept.f32_tensor("blk.4.nextn.enorm.weight", &[64], &[1.0; 64]))
    });
    assert!(load(file.clone()).expect_err("must be refused").contains("blk.4.nextn.enorm.weight"));
    let (_dir, file) = with_key(&file, "qwen35.block_count", Value::U32(5));
    let (_dir, file) = with_key(&file, "qwen35.nextn_predict_layers", Value::U32(1));
    let model = load(file).expect("loads");
    assert_eq!((model.hparams.block_count, model.hparams.nextn_blocks), (4, 1));
    assert_eq!(model.graph, f.model.graph);
}

#[test]
fn sizes_of_delta_nets_that_make_no_sense_are_refused_by_key() {
    let f = fixture("qwen35");
    for (key, value, what) in [
        ("ssm.group_count", 0, "expected at least 1"),
        ("ssm.time_step_rank", 5, "is 5, expected a multiple of the 2 key heads"),
        ("ssm.inner_size", 97, "is 97, expected a multiple of the 6 value heads"),
        ("ssm.state_size", u32::MAX, "a state that no memory can hold"),
        ("ssm.conv_kernel", 3, "blk.0.ssm_conv1d.weight"),
        ("nextn_predict_layers", 4, "expected less than the 4 blocks"),
    ] {
        let (_dir, file) = with_key(&f.model.file, &format!("qwen35.{key}"), Value::U32(value));
        let message = load(file).expect_err("must be refused");
        assert!(message.contains(what), "{key}: {message}");
    }
}

#[test]
fn a_block_without_kv_heads_where_attention_is_needed_is_refused() {
    for (name, key) in [("llama", "llama"), ("qwen35", "qwen35")] {
        let f = fixture(name);
        let (_dir, file) = with_key(&f.model.file, &format!("{key}.attention.head_count_kv"), Value::U32(0));
        let message = load(file).expect_err("must be refused");
        assert!(message.contains("is 0 in layer"), "{name}: {message}");
    }
}
