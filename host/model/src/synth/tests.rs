//! Made-up models against what is known of the real ones.

use std::collections::BTreeMap;

use super::*;
use crate::gguf::GgufFile;

fn spec(name: &str, quant: Quant) -> Spec {
    Preset::of(name).unwrap().spec(quant, None).unwrap()
}

fn types(spec: &Spec) -> BTreeMap<String, usize> {
    let mut types = BTreeMap::new();
    spec.tensors().iter().for_each(|t| *types.entry(t.ty.to_string()).or_default() += 1);
    types
}

/// Types and bytes of the three models of the GPU measurements, whose types were compared with llama.cpp's quantiser
/// tensor by tensor.
#[test]
fn the_mix_of_types_is_that_of_llama_cpp() {
    let expected = [
        ("gemma4-26b-a4b", &[("F32", 392), ("Q4_K", 192), ("Q5_0", 32), ("Q6_K", 14), ("Q8_0", 28)][..], 16.78),
        ("qwen3-14b", &[("F32", 161), ("Q4_K", 241), ("Q6_K", 41)], 9.00),
        ("qwen35-35b-a3b", &[("F32", 301), ("Q4_K", 371), ("Q6_K", 61)], 21.16),
    ];
    for (name, counts, gigabytes) in expected {
        let spec = spec(name, Quant::Q4_K_M);
        let counts: BTreeMap<String, usize> = counts.iter().map(|(ty, n)| ((*ty).to_owned(), *n)).collect();
        assert_eq!(types(&spec), counts, "{name}");
        let found = spec.file_bytes() as f64 / 1e9;
        assert!((found - gigabytes).abs() < 0.006, "{name}: {found} GB");
    }
}

#[test]
fn presets_have_the_parameters_their_names_say() {
    // Billions of parameters. Of Gemma's E2B and E4B about half and a third are inputs of layers, which are not counted
    // in the name.
    let expected = [
        ("smollm2-135m", 0.135),
        ("smollm2-360m", 0.362),
        ("smollm2-1.7b", 1.71),
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.6),
        ("qwen2-0.5b", 0.494),
        ("qwen2-7b", 7.62),
        ("qwen2-14b", 14.8),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.19),
        ("qwen3-14b", 14.8),
        ("qwen3-32b", 32.8),
        ("qwen3-30b-a3b", 30.5),
        ("gemma3-270m", 0.268),
        ("gemma3-1b", 1.0),
        ("gemma3-4b", 3.88),
        ("gemma3-12b", 11.8),
        ("gemma3-27b", 27.0),
        ("gemma4-26b-a4b", 25.2),
        ("gemma4-31b", 30.7),
        ("qwen35-0.8b", 0.75),
        ("qwen35-9b", 8.95),
        ("qwen35-27b", 26.9),
        ("qwen35-35b-a3b", 34.7),
        ("qwen3next-80b-a3b", 79.7),
    ];
    for (name, billions) in expected {
        let elements: usize = spec(name, Quant::F16).tensors().iter().map(Tensor::elements).sum();
        let found = elements as f64 / 1e9;
        assert!((found / billions - 1.0).abs() < 0.02, "{name}: {found} billion");
    }
}

#[test]
fn rows_that_no_block_divides_have_smaller_blocks() {
    // SmolLM2-135M is 576 wide.
    assert_eq!(
        types(&spec("smollm2-135m", Quant::Q4_K_M)).keys().collect::<Vec<_>>(),
        ["F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"]
    );
    assert_eq!(types(&spec("smollm2-135m", Quant::Q8_0)).keys().collect::<Vec<_>>(), ["F32", "Q8_0"]);
    assert_eq!(types(&spec("qwen3-8b", Quant::Q4_0)).keys().collect::<Vec<_>>(), ["F32", "Q4_0", "Q6_K"]);
    assert_eq!(types(&spec("qwen3-8b", Quant::F16)).keys().collect::<Vec<_>>(), ["F16", "F32"]);
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_gives_others() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("made.gguf");
    let spec = Preset::of("smollm2-135m").unwrap().spec(Quant::Q4_K_M, Some(1)).unwrap();
    let bytes = |seed| {
        spec.write(&path, seed).unwrap();
        std::fs::read(&path).unwrap()
    };
    let first = bytes(1);
    assert_eq!(first.len() as u64, spec.file_bytes());
    assert_eq!(first, bytes(1));
    assert_ne!(first, bytes(2));
}

#[test]
fn random_tensors_have_the_deviation_of_their_width() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("made.gguf");
    for quant in ["f16", "q8_0", "q4_0", "q4_k_m"] {
        for (preset, tensors) in [("smollm2-135m", ["blk.0.ffn_down.weight", "token_embd.weight"])] {
            let spec = Preset::of(preset).unwrap().spec(quant.parse().unwrap(), Some(1)).unwrap();
            spec.write(&path, 7).unwrap();
            let file = GgufFile::open(&path).unwrap();
            for name in tensors {
                let tensor = file.tensor(name).unwrap();
                let (info, ty) = (tensor.info(), tensor.info().ty.weight_type().unwrap());
                let mut values = vec![0.0; info.elements()];
                opencoti_compute::quant::dequantize_row(ty, tensor.bytes(), &mut values).unwrap();
                let n = values.len() as f64;
                let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
                let deviation = (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n).sqrt();
                let expected = 1.0 / (info.dims[0] as f64).sqrt();
                assert!(
                    (deviation / expected - 1.0).abs() < 0.05,
                    "{quant} {name} ({ty}): {deviation}, not {expected}"
                );
                // Codes from -8 to 7 and the like have a mean of half a step below 0.
                assert!(mean.abs() < 0.12 * expected, "{quant} {name} ({ty}): mean {mean}");
            }
        }
    }
}

#[test]
fn unknown_names_and_too_many_layers_are_refused() {
    let message = Preset::of("qwen9").unwrap_err().to_string();
    assert!(message.starts_with("there is no preset \"qwen9\"; known are smollm2-135m, "), "{message}");
    let message = "q9".parse::<Quant>().unwrap_err().to_string();
    assert_eq!(message, "there is no quantisation \"q9\"; known are f16, q8_0, q4_0, q4_k_m");
    for found in [0, 81] {
        let message = Preset::of("llama3-70b").unwrap().spec(Quant::F16, Some(found)).unwrap_err().to_string();
        assert_eq!(message, format!("llama3-70b has 1 to 80 layers, not {found}"));
    }
}
