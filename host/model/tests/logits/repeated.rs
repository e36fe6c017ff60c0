//! Blocks that run twice: a plan must equal a file that holds its blocks twice.

use opencoti_model::gguf::write::GgufWriter;
use opencoti_model::gguf::{Array, GgufFile, TensorData, Value};
use opencoti_model::layer_plan::RepeatLayers;
use opencoti_model::{LoadOptions, Model, ModelError};

use crate::cached::Runner;
use crate::fixture::path;
use crate::rewrite::{Rewritten, load, write};
use crate::{Fixture, TOLERANCE, fixture, max_diff, reference};

/// Each tiny model with a plan for it.
const PLANS: [(&str, &str); 10] = [
    ("llama", "1-2"),
    ("llama", "0-1;1-3"),
    ("gemma3", "2,4"),
    ("gemma3-linear-capped", "1-3"),
    ("gemma4", "1-4"),
    ("gemma4-elastic", "1-3"),
    ("gemma4-moe", "1-3"),
    ("gemma4-elastic", "1-2;3-5"),
    ("qwen35-ends-recurrent", "1-3"),
    ("lfm2", "0-2"),
];

fn with_plan(name: &str, plan: &str) -> Result<Model, ModelError> {
    let options = LoadOptions { repeat_layers: plan.parse().expect("a plan"), ..LoadOptions::default() };
    Model::load_with(&path(&format!("{name}.gguf")), &options, |_| {})
}

/// A copy of the file in which every pass of the plan has a block of its own.
fn duplicated(fixture: &Fixture, plan: &str) -> Rewritten {
    let file = &fixture.model.file;
    let blocks = fixture.model.hparams.block_count;
    let plan: RepeatLayers = plan.parse().expect("a plan");
    let order: Vec<usize> = plan.passes(blocks).map(|pass| pass.block).collect();
    let mut writer = keys(file, &order, blocks);
    for info in file.tensors() {
        let mut put = |name: &str| {
            let bytes = file.tensor(&info.name).expect("listed").bytes().to_vec();
            writer = writer.clone().tensor(name, &info.dims, info.ty, bytes);
        };
        match info.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            None if info.name.starts_with("per_layer_token_embd") || info.name.starts_with("per_layer_model_proj") => {
                let (dims, bytes) = layer_inputs(&file.tensor(&info.name).expect("listed"), &order, blocks);
                writer = writer.clone().tensor(&info.name, &dims, info.ty, bytes);
            }
            None => put(&info.name),
            Some((block, rest)) => {
                let block: usize = block.parse().expect("a number");
                let passes = order.iter().enumerate().filter(|(_, of)| **of == block);
                passes.for_each(|(pass, _)| put(&format!("blk.{pass}.{rest}")));
            }
        }
    }
    write(&writer)
}

/// A tensor of f32 with a part a block, along its rows' elements (the table of tokens) or its rows (the projection).
fn layer_inputs(tensor: &TensorData, order: &[usize], blocks: usize) -> (Vec<usize>, Vec<u8>) {
    let mut dims = tensor.info().dims.clone();
    let along = usize::from(tensor.info().name.starts_with("per_layer_model_proj"));
    let part = dims[..=along].iter().product::<usize>() / blocks * 4;
    let pick =
        |bytes: &[u8]| order.iter().flat_map(|block| bytes[block * part..][..part].to_vec()).collect::<Vec<u8>>();
    let bytes = tensor.bytes().chunks(part * blocks).flat_map(pick).collect();
    dims[along] = dims[along] / blocks * order.len();
    (dims, bytes)
}

/// Keys with one entry a block get one a pass; a period of window layers becomes a flag a pass.
fn keys(file: &GgufFile, order: &[usize], blocks: usize) -> GgufWriter {
    let arch = file.metadata().str("general.architecture").expect("text").expect("there").to_owned();
    let mut writer = GgufWriter::new();
    for (key, value) in file.metadata().iter() {
        let value = match (key.strip_prefix(&format!("{arch}.")), value) {
            (Some("block_count"), _) => Value::U32(order.len() as u32),
            (Some("attention.shared_kv_layers"), Value::U32(shared)) => {
                let readers = order.iter().filter(|block| **block >= blocks - *shared as usize);
                Value::U32(readers.count() as u32)
            }
            (Some("attention.sliding_window_pattern"), Value::U32(period)) => windows(*period as usize, order),
            (Some(_), Value::Array(array)) if array.len() == blocks => Value::Array(repeated(array, order)),
            _ => value.clone(),
        };
        writer = writer.key(key, value);
    }
    let pattern = format!("{arch}.attention.sliding_window_pattern");
    match arch == "gemma3" && file.metadata().get(&pattern).is_none() {
        true => writer.key(&pattern, windows(6, order)),
        false => writer,
    }
}

fn repeated(array: &Array, order: &[usize]) -> Array {
    fn pick<T: Clone>(values: &[T], order: &[usize]) -> Vec<T> {
        order.iter().map(|&block| values[block].clone()).collect()
    }
    match array {
        Array::Bool(v) => Array::Bool(pick(v, order)),
        Array::U32(v) => Array::U32(pick(v, order)),
        Array::I32(v) => Array::I32(pick(v, order)),
        Array::F32(v) => Array::F32(pick(v, order)),
        other => panic!("no array a block is of {}", other.element_type().name()),
    }
}

fn windows(period: usize, order: &[usize]) -> Value {
    Value::Array(Array::Bool(order.iter().map(|block| block % period < period - 1).collect()))
}

#[test]
fn a_plan_equals_a_file_with_the_blocks_twice() {
    for (name, plan) in PLANS {
        let fixture = fixture(name);
        let (_dir, file) = duplicated(&fixture, plan);
        let expected = load(file).expect("loads");
        let planned = with_plan(name, plan).expect("loads");
        assert_eq!(planned.graph.kv_layers, expected.graph.kv_layers, "{name} {plan}: each pass has its own cache");
        assert_eq!(planned.graph.state_layers, expected.graph.state_layers, "{name} {plan}: and its own state");
        let logits = |model: &Model| reference::logits(&model.graph, &model.weights, &fixture.tokens);
        assert_eq!(logits(&planned), logits(&expected), "{name} {plan}");
        assert!(max_diff(&logits(&planned), &fixture.logits) > 0.01, "{name} {plan} changes nothing");
    }
}

#[test]
fn a_plan_runs_in_steps_as_in_one() {
    for (name, plan) in PLANS {
        let fixture = fixture(name);
        let model = with_plan(name, plan).expect("loads");
        let mut runner = Runner::new(&model, 2);
        let seq = runner.create();
        let found: Vec<f32> =
            fixture.tokens.chunks(7).flat_map(|chunk| runner.step(&[(seq, chunk)]).concat()).collect();
        let expected = reference::logits(&model.graph, &model.weights, &fixture.tokens);
        assert!(max_diff(&found, &expected) <= TOLERANCE, "{name} {plan}");
    }
}

#[test]
fn an_empty_plan_is_no_plan() {
    let planned = with_plan("llama", "").expect("loads");
    assert_eq!(planned.graph, fixture("llama").model.graph);
}

#[test]
fn a_plan_beyond_the_model_is_refused_with_its_size() {
    let message = with_plan("llama", "1-2;2-4").expect_err("3 blocks").to_string();
    assert!(message.ends_with("the range 2-4 ends beyond the model, which has 3 blocks"), "{message}");
}
