//! Whole models: made-up ones of real shapes, and the tiny ones of the parity tests, against the CPU executor.

use opencoti_kv::Outputs;
use opencoti_model::Model;
use opencoti_model::synth::{Preset, Quant};

use crate::runner::Runner;
use crate::{config, crate_folder, gpu, relative};

/// Prompts, decoding together, and going on after a pause, with a cache of `codec`.
fn check(model: &Model, codec: &str, limit: f64, what: &str) {
    let Some(gpu) = gpu() else { return };
    let vocabulary = model.graph.weights.iter().find(|w| w.name == "token_embd.weight").unwrap().rows;
    let token = |i: usize| ((i * 7919 + 13) % vocabulary) as u32;
    let mut runners = [Runner::cpu(model, codec, 2048, 256), Runner::cuda(&gpu, model, codec, 2048, config(256))];
    let mut results: Vec<Vec<Vec<f32>>> = Vec::new();
    for runner in &mut runners {
        let mut logits = Vec::new();
        let (a, b) = (runner.cache.create(), runner.cache.create());
        let prompt: Vec<u32> = (0..200).map(token).collect();
        logits.extend(runner.step(&[(a, &prompt[..150])], Outputs::Last));
        logits.extend(runner.step(&[(a, &prompt[150..]), (b, &prompt[..5])], Outputs::Last));
        for i in 0..6 {
            let (x, y) = ([token(300 + i)], [token(400 + i)]);
            logits.extend(runner.step(&[(a, &x), (b, &y)], Outputs::Last));
        }
        logits.extend(runner.step(&[(b, &prompt[..9])], Outputs::All));
        results.push(logits);
    }
    assert_eq!(results[0].len(), 1 + 2 + 12 + 9);
    for (i, (expected, found)) in results[0].iter().zip(&results[1]).enumerate() {
        let error = relative(found, expected);
        assert!(error < limit, "{what} with {codec}: logits {i} differ by {error}");
    }
}

#[test]
fn made_up_models_of_real_shapes_agree_with_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    for (name, quant, codec, limit) in [
        ("smollm2-135m", Quant::Q4_K_M, "f16", 1e-2),
        ("smollm2-135m", Quant::Q4_0, "q8_0", 2e-2),
        ("qwen2-0.5b", Quant::Q8_0, "f16", 1e-2),
        ("qwen3-0.6b", Quant::Q4_K_M, "f16", 1e-2),
        ("qwen3-0.6b", Quant::Q4_0, "q4_0", 5e-2),
        ("gemma3-1b", Quant::Q8_0, "f16", 1e-2),
        ("gemma3-1b", Quant::Q8_0, "q8_0", 2e-2),
    ] {
        let preset = Preset::of(name).unwrap();
        let path = folder.path().join(format!("{name}.gguf"));
        preset.spec(quant, Some(4)).unwrap().write(&path, 1).unwrap();
        let model = Model::load(&path).unwrap();
        check(&model, codec, limit, &format!("{name} {quant:?}"));
    }
}

#[test]
fn tiny_models_agree_with_the_cpu() {
    let folder = crate_folder().join("../model/tests/fixtures");
    for name in ["llama-head-128", "llama-head-96"] {
        let model = Model::load(&folder.join(format!("{name}.gguf"))).unwrap();
        check(&model, "f16", 1e-2, name);
    }
}
