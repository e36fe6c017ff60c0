//! Gemma 4: which rows and caches its layers work on, and what its files may carry.

use opencoti_compute::graph::{Graph, Op};
use opencoti_model::gguf::Value;
use opencoti_model::{LoadOptions, Model};

use crate::cached::Runner;
use crate::fixture::path;
use crate::graphs::diff;
use crate::rewrite::{load, rewrite, with_key};
use crate::{TOLERANCE, fixture, max_diff, reference};

#[test]
fn readers_have_no_cache_and_work_on_output_rows_alone() {
    let graph = fixture("gemma4-elastic").model.graph;
    let windows: Vec<_> = graph.kv_layers.iter().map(|g| g.window).collect();
    assert_eq!(windows, [Some(8), Some(8), None]);
    let last_append = graph.ops.iter().rposition(|op| matches!(op, Op::Append { .. })).expect("one");
    let selected = graph.ops.iter().position(|op| matches!(op, Op::SelectOutputs { .. })).expect("one");
    assert_eq!(selected, last_append + 1);
    assert_eq!(read(&graph), [0, 1, 2, 1, 1, 2]);
}

#[test]
fn a_reader_takes_the_latest_pass_of_its_source_that_ran_before_it() {
    // Blocks 0 1 2 3 1 2 3 4 5.
    let options = LoadOptions { repeat_layers: "1-4".parse().expect("a plan"), ..LoadOptions::default() };
    let model = Model::load_with(&path("gemma4-elastic.gguf"), &options, |_| {}).expect("loads");
    assert_eq!(read(&model.graph), [0, 1, 2, 1, 3, 4, 3, 3, 4]);
    let tokens = fixture("gemma4-elastic").tokens;
    let mut runner = Runner::new(&model, 2);
    let seq = runner.create();
    let found: Vec<f32> = tokens.chunks(9).flat_map(|chunk| runner.step(&[(seq, chunk)]).concat()).collect();
    assert!(max_diff(&found, &reference::logits(&model.graph, &model.weights, &tokens)) <= TOLERANCE);
}

/// The caches that attention reads, in order.
fn read(graph: &Graph) -> Vec<u32> {
    let layers = graph.ops.iter().filter_map(|op| match op {
        Op::Attend { layer, .. } => Some(layer.0),
        _ => None,
    });
    layers.collect()
}

#[test]
fn keys_and_values_that_old_files_carry_for_readers_are_ignored() {
    let fixture = fixture("gemma4-elastic");
    let (_dir, old) = rewrite(&fixture.model.file, |writer, tensor| {
        let (block, _) = tensor.split_once(".attn_q.")?;
        let reader = ["blk.3", "blk.4", "blk.5"].contains(&block);
        let q = fixture.model.file.tensor(tensor)?;
        let writer = writer.tensor(tensor, &q.info().dims, q.info().ty, q.bytes().to_vec());
        reader.then(|| {
            writer
                .f32_tensor(&format!("{block}.attn_k.weight"), &[48, 32], &[0.5; 48 * 32])
                .f32_tensor(&format!("{block}.attn_v.weight"), &[48, 32], &[0.5; 48 * 32])
                .f32_tensor(&format!("{block}.attn_k_norm.weight"), &[32], &[0.5; 32])
        })
    });
    assert!(old.tensor("blk.3.attn_v.weight").is_some());
    let diff = diff(&load(old).expect("loads"), &fixture);
    assert!(diff <= TOLERANCE, "{diff}");
}

#[test]
fn files_that_do_not_fit_are_refused_by_name() {
    let elastic = fixture("gemma4-elastic").model.file;
    let refusal = |key: &str, value: Value| {
        let (_dir, file) = with_key(&elastic, key, value);
        load(file).expect_err("must be refused")
    };
    for shared in [5, 6, 400] {
        let message = refusal("gemma4.attention.shared_kv_layers", Value::U32(shared));
        assert!(
            message.contains(&format!("is {shared}, but before the last {shared} of 6 layers none has")),
            "{message}"
        );
    }
    let message = refusal("gemma4.embedding_length_per_layer_input", Value::U32(u32::MAX));
    assert!(message.contains("\"per_layer_token_embd.weight\" has dimensions {96, 160}"), "{message}");
    let (_dir, file) = rewrite(&elastic, |writer, tensor| {
        (tensor == "output_norm.weight")
            .then(|| writer.f32_tensor(tensor, &[48], &[1.0; 48]).f32_tensor("v.patch_embd.weight", &[4], &[1.0; 4]))
    });
    let message = load(file).expect_err("must be refused");
    assert!(message.contains("\"v.patch_embd.weight\" belongs to an image or audio encoder"), "{message}");
}
