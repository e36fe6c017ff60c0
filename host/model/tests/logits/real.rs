//! Real models, where the folder `$OPENCOTI_TEST_MODELS` has them: predictions on a paragraph against those of transformers with
//! the same weights expanded to f32 (see `fixtures/make_real_references.py`). This covers quantised weights and real sizes.

use std::path::PathBuf;

use opencoti_model::Model;
use opencoti_model::tokenizer::EncodeOptions;

use crate::cached::Runner;
use crate::fixture::path;
use crate::reference;

/// Mean divergence that rounding activations to sixteen bits may cause, in nats; 4e-8 to 8e-8 were observed.
const MEAN_KLD: f64 = 1e-5;

/// What transformers makes of the paragraph, and predicts: the most probable tokens of every position.
struct Reference {
    text: String,
    tokens: Vec<u32>,
    top_ids: Vec<Vec<usize>>,
    top_log_probs: Vec<Vec<f64>>,
}

impl Reference {
    fn read(name: &str) -> Reference {
        let json = std::fs::read_to_string(path(&format!("{name}.reference.json"))).expect("the reference");
        let mut json: serde_json::Value = serde_json::from_str(&json).expect("json");
        let mut field = |name: &str| json[name].take();
        Reference {
            text: serde_json::from_value(field("text")).expect("text"),
            tokens: serde_json::from_value(field("tokens")).expect("ids"),
            top_ids: serde_json::from_value(field("top_ids")).expect("ids"),
            top_log_probs: serde_json::from_value(field("top_log_probs")).expect("numbers"),
        }
    }

    /// Divergence of our prediction at a position from the reference, over its most probable tokens and all others together.
    fn divergence(&self, position: usize, logits: &[f32]) -> f64 {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
        let (mut kld, mut rest, mut our_rest) = (0.0, 1.0, 1.0);
        for (&id, &expected) in self.top_ids[position].iter().zip(&self.top_log_probs[position]) {
            let ours = f64::from(logits[id] - max) - sum.ln();
            kld += expected.exp() * (expected - ours);
            rest -= expected.exp();
            our_rest -= ours.exp();
        }
        let (rest, our_rest) = (f64::max(rest, 1e-9), f64::max(our_rest, 1e-9));
        kld + rest * (rest / our_rest).ln()
    }
}

/// The model of this name, if the folder has it.
fn find(name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("OPENCOTI_TEST_MODELS")?;
    Some(PathBuf::from(folder).join(format!("{name}.gguf"))).filter(|path| path.exists())
}

/// A model that the folder has, with its reference.
fn load(name: &str) -> Option<(Model, Reference)> {
    let Some(path) = find(name) else {
        eprintln!("skipped: no {name}.gguf in $OPENCOTI_TEST_MODELS");
        return None;
    };
    Some((Model::load(&path).expect("loads"), Reference::read(name)))
}

/// Whether the file's tokenizer gives the ids that transformers made of the same keys.
fn check_tokens(name: &str) {
    let Some((model, reference)) = load(name) else { return };
    let options = EncodeOptions { add_special: true, parse_special: false };
    let tokens = model.tokenizer.encode(&reference.text, options).expect("a vocabulary");
    assert_eq!(tokens, reference.tokens, "{name}");
}

/// Mean divergence of the first positions, of which these are the logits.
fn mean_divergence(reference: &Reference, rows: &[&[f32]]) -> f64 {
    rows.iter().enumerate().map(|(p, row)| reference.divergence(p, row)).sum::<f64>() / rows.len() as f64
}

/// The graph and the weights themselves: no more than rounding of f32 may be left.
fn check_interpreter(name: &str) {
    let Some((model, reference)) = load(name) else { return };
    let n = 12;
    let logits = reference::logits(&model.graph, &model.weights, &reference.tokens[..n]);
    let rows: Vec<&[f32]> = logits.chunks_exact(logits.len() / n).collect();
    let mean = mean_divergence(&reference, &rows);
    eprintln!("{name}, exact: mean divergence {mean:.2e}");
    assert!(mean.abs() < 1e-5, "{name}: mean divergence {mean:.2e}");
}

/// The executor, which rounds the activations that meet quantised weights to sixteen bits.
fn check_executor(name: &str) {
    let Some((model, reference)) = load(name) else { return };
    let mut runner = Runner::new(&model, 2);
    let seq = runner.create();
    let logits =
        reference.tokens.chunks(32).flat_map(|chunk| runner.step(&[(seq, chunk)]).concat()).collect::<Vec<_>>();
    let rows: Vec<&[f32]> = logits.chunks_exact(logits.len() / reference.tokens.len()).collect();
    let mean = mean_divergence(&reference, &rows);
    eprintln!("{name}, executor: mean divergence {mean:.2e} over {} tokens", rows.len());
    assert!(mean < MEAN_KLD, "{name}: mean divergence {mean:.2e}");
}

const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1";
const GEMMA3: &str = "gemma-3-270m-Q4_K_M";

#[test]
fn smollm2_reads_text_as_transformers_does() {
    check_tokens(SMOLLM2);
}

#[test]
fn gemma3_270m_reads_text_as_transformers_does() {
    check_tokens(GEMMA3);
}

#[test]
fn the_graph_of_smollm2_predicts_as_transformers_does() {
    check_interpreter(SMOLLM2);
}

#[test]
fn the_graph_of_gemma3_270m_predicts_as_transformers_does() {
    check_interpreter(GEMMA3);
}

#[test]
fn smollm2_predicts_as_transformers_does() {
    check_executor(SMOLLM2);
}

#[test]
fn gemma3_270m_predicts_as_transformers_does() {
    check_executor(GEMMA3);
}

/// Texts, tokens and unit vectors of the embedding model.
struct Embedded {
    text: String,
    tokens: Vec<u32>,
    vector: Vec<f32>,
}

const MINILM: &str = "all-MiniLM-L6-v2";

/// The embedding model and its references, if the folder has it.
fn load_minilm() -> Option<(Model, Vec<Embedded>)> {
    let path = std::env::var_os("OPENCOTI_TEST_MODELS").map(|folder| PathBuf::from(folder).join(MINILM));
    let Some(path) = path.filter(|path| path.exists()) else {
        eprintln!("skipped: no {MINILM} in $OPENCOTI_TEST_MODELS");
        return None;
    };
    let json =
        std::fs::read_to_string(crate::fixture::path(&format!("{MINILM}.reference.json"))).expect("the reference");
    let mut json: Vec<serde_json::Value> = serde_json::from_str(&json).expect("json");
    let embedded = json.iter_mut().map(|entry| Embedded {
        text: serde_json::from_value(entry["text"].take()).expect("text"),
        tokens: serde_json::from_value(entry["tokens"].take()).expect("ids"),
        vector: serde_json::from_value(entry["vector"].take()).expect("numbers"),
    });
    Some((Model::load(&path).expect("loads"), embedded.collect()))
}

/// Mean of rows of this width, scaled to length 1.
fn unit_mean(rows: &[f32], width: usize) -> Vec<f32> {
    let mut mean = vec![0f64; width];
    rows.chunks_exact(width).for_each(|row| mean.iter_mut().zip(row).for_each(|(m, v)| *m += f64::from(*v)));
    let length = mean.iter().map(|v| v * v).sum::<f64>().sqrt();
    mean.iter().map(|v| (v / length) as f32).collect()
}

#[test]
fn minilm_reads_text_as_transformers_does() {
    let Some((model, embedded)) = load_minilm() else { return };
    let options = EncodeOptions { add_special: true, parse_special: false };
    for e in embedded {
        assert_eq!(model.tokenizer.encode(&e.text, options).expect("encodes"), e.tokens, "{:?}", e.text);
    }
}

#[test]
fn minilm_embeds_as_transformers_does() {
    let Some((model, embedded)) = load_minilm() else { return };
    let width = model.hparams.embedding_length;
    let mut runner = Runner::new(&model, 2);
    let mut vectors = Vec::new();
    for e in embedded.iter().filter(|e| e.tokens.len() <= 128) {
        let vector = unit_mean(&runner.hidden(&[&e.tokens]).concat(), width);
        let diff = crate::max_diff(&vector, &e.vector);
        eprintln!("{} tokens: {diff:.1e}", e.tokens.len());
        assert!(diff < 1e-5, "{:?}: {diff}", e.text);
        vectors.push(vector);
    }
    let cosine: f32 = vectors[0].iter().zip(&vectors[1]).map(|(a, b)| a * b).sum();
    assert!((cosine - 0.755).abs() <= 0.003, "{cosine}");
}
