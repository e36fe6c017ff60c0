//! Files with experts: the forms in which they may come, and what they are refused for.

use opencoti_model::gguf::{GgufFile, Value};

use crate::rewrite::{load, rewrite, with_key};
use crate::{TOLERANCE, fixture, max_diff, reference};

const MODELS: [&str; 2] = ["qwen3moe", "llama-experts"];

fn floats(file: &GgufFile, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).expect("there");
    tensor.bytes().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn diff_of_file(name: &str, file: GgufFile) -> f32 {
    let (f, model) = (fixture(name), load(file).expect("loads"));
    max_diff(&reference::logits(&model.graph, &model.weights, &f.tokens), &f.logits)
}

#[test]
fn gate_and_up_in_one_stack_are_the_two() {
    for name in MODELS {
        let original = fixture(name).model.file;
        let (_dir, fused) = rewrite(&original, |writer, tensor| {
            if tensor.contains("ffn_up_exps") {
                return Some(writer);
            }
            let block = tensor.strip_suffix(".ffn_gate_exps.weight")?;
            let up = format!("{block}.ffn_up_exps.weight");
            let [cols, rows, experts] = original.tensor(tensor)?.info().dims[..] else { return None };
            let (gate, up) = (floats(&original, tensor), floats(&original, &up));
            let pairs = gate.chunks(cols * rows).zip(up.chunks(cols * rows));
            let both: Vec<f32> = pairs.flat_map(|(gate, up)| [gate, up].concat()).collect();
            Some(writer.f32_tensor(&format!("{block}.ffn_gate_up_exps.weight"), &[cols, 2 * rows, experts], &both))
        });
        assert!(fused.tensor("blk.1.ffn_gate_up_exps.weight").is_some());
        assert!(diff_of_file(name, fused) <= TOLERANCE, "{name}");
    }
}

#[test]
fn scales_beside_a_stack_multiply_the_products_of_each_expert_or_of_all() {
    let original = fixture("qwen3moe").model.file;
    let (_dir, scaled) = rewrite(&original, |writer, tensor| {
        let one_each: Vec<f32> = match tensor {
            "blk.0.ffn_down_exps.weight" | "blk.1.ffn_up_exps.weight" => (0..8).map(|e| 0.5 + e as f32).collect(),
            "blk.0.ffn_gate_exps.weight" => vec![4.0; 8],
            _ => return None,
        };
        let dims = original.tensor(tensor)?.info().dims.clone();
        let values = floats(&original, tensor);
        let experts = values.chunks(dims[0] * dims[1]).zip(&one_each);
        let divided: Vec<f32> = experts.flat_map(|(values, s)| values.iter().map(move |v| v / s)).collect();
        let scale = if tensor.contains("gate") { &one_each[..1] } else { &one_each };
        let name = tensor.replace(".weight", ".scale");
        Some(writer.f32_tensor(tensor, &dims, &divided).f32_tensor(&name, &[scale.len()], scale))
    });
    assert!(diff_of_file("qwen3moe", scaled) <= TOLERANCE);
}

#[test]
fn senseless_counts_of_experts_are_refused() {
    let file = fixture("qwen3moe").model.file;
    let refusal = |key: &str, value: u32| {
        let (_dir, file) = with_key(&file, key, Value::U32(value));
        load(file).expect_err("must be refused")
    };
    for used in [0, 9] {
        let message = refusal("qwen3moe.expert_used_count", used);
        assert!(message.contains(&format!("\"qwen3moe.expert_used_count\" is {used}, expected 1 to the 8 experts")));
    }
    let message = refusal("qwen3moe.expert_count", 0);
    assert!(message.contains("\"qwen3moe.expert_count\" is 0"), "{message}");
    let message = refusal("qwen3moe.expert_feed_forward_length", 16);
    assert!(message.contains("has dimensions {64, 32, 8}, expected {64, 16, 8}"), "{message}");
    let message = refusal("qwen3moe.expert_count", 16);
    assert!(message.contains("has dimensions {64, 8}, expected {64, 16}"), "{message}");
}
