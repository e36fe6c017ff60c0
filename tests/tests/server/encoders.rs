//! Models that embed and rank: tiny ones with random weights always, all-MiniLM-L6-v2 where `$OPENCOTI_TEST_MODELS` has it.

use std::path::{Path, PathBuf};

use opencoti_model::gguf::write::GgufWriter;
use opencoti_model::gguf::{Array, GgufFile, Value as Key};
use opencoti_tests::server::{Server, Site, prompt, refusal};
use serde_json::{Value, json};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/model/tests/fixtures").join(name)
}

fn vector(value: &Value) -> Vec<f32> {
    value.as_array().expect("a vector").iter().map(|v| v.as_f64().expect("a number") as f32).collect()
}

fn vectors(answer: &Value) -> Vec<Vec<f32>> {
    answer["data"].as_array().expect("a list").iter().map(|entry| vector(&entry["embedding"])).collect()
}

fn max_diff(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Words of the tiny vocabulary: every pair of these letters.
fn words() -> Vec<String> {
    "abcdefghijk".chars().flat_map(|a| "abcdefghijk".chars().map(move |b| format!("{a}{b}"))).collect()
}

/// A tiny encoder of the parity tests with a vocabulary of words in place of bare ids.
fn with_words(name: &str) -> Site {
    let site = Site::with_fixture(name);
    let file = GgufFile::open(&fixture(name)).expect("the fixture");
    let n = 120;
    let markers = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(str::to_owned);
    let tokens: Vec<String> = markers.into_iter().chain(words().iter().map(|w| format!("▁{w}"))).take(n).collect();
    let types = (0..n).map(|id| if id < 5 { 3 } else { 1 }).collect();
    let keys = file.metadata().iter().filter(|(key, _)| !key.starts_with("tokenizer."));
    let mut writer = keys.fold(GgufWriter::new(), |writer, (key, value)| writer.key(key, value.clone()));
    writer = writer
        .str("tokenizer.ggml.model", "bert")
        .key("tokenizer.ggml.tokens", Key::Array(Array::Str(tokens)))
        .key("tokenizer.ggml.token_type", Key::Array(Array::I32(types)));
    for info in file.tensors() {
        let bytes = file.tensor(&info.name).expect("listed").bytes().to_vec();
        writer = writer.tensor(&info.name, &info.dims, info.ty, bytes);
    }
    writer.write_to(&site.path("tiny.gguf")).expect("written");
    site
}

#[test]
fn an_encoder_embeds_token_ids_as_transformers_does() {
    let server = Server::at(Site::with_fixture("bert.gguf"), &[]);
    let facts = std::fs::read_to_string(fixture("bert.json")).expect("the ids");
    let facts: Value = serde_json::from_str(&facts).expect("JSON");
    let bytes = std::fs::read(fixture("bert.logits")).expect("the hidden states");
    let hidden: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let width = hidden.len() / 41;
    let mut mean = vec![0f32; width];
    hidden.chunks_exact(width).for_each(|row| mean.iter_mut().zip(row).for_each(|(m, v)| *m += v));
    let length = mean.iter().map(|v| v * v).sum::<f32>().sqrt();
    mean.iter_mut().for_each(|v| *v /= length);

    let ids = facts["tokens"].clone();
    let answer = server.post("/v1/embeddings", &json!({"input": [ids, [1, 2, 3], ids]})).ok();
    let found = vectors(&answer);
    for found in [&found[0], &found[2]] {
        // Keys and values are kept in f16.
        assert!(max_diff(found, &mean) < 2e-3, "{}", max_diff(found, &mean));
    }
    assert_eq!(answer["usage"]["prompt_tokens"], 41 + 3 + 41);
    let rows = server.post("/embedding", &json!({"content": [ids], "embd_normalize": -1})).ok();
    assert_eq!(rows[0]["embedding"].as_array().map(Vec::len), Some(1));
}

#[test]
fn many_short_texts_are_as_each_alone() {
    let server = Server::at(with_words("bert.gguf"), &["--max-queue", "16"]);
    let words = words();
    let texts: Vec<String> =
        (0..300).map(|i| (0..1 + i % 7).map(|k| words[(i * 5 + k * 3) % 110].clone() + " ").collect()).collect();
    let together = vectors(&server.post("/v1/embeddings", &json!({"input": texts})).ok());
    assert_eq!(together.len(), 300);
    for i in (0..300).step_by(23) {
        let alone = vectors(&server.post("/v1/embeddings", &json!({"input": texts[i]})).ok());
        assert!(max_diff(&alone[0], &together[i]) < 1e-5, "{i}");
    }
    server.wait_until_idle();
}

#[test]
fn an_encoder_generates_nothing_and_says_so() {
    let server = Server::at(with_words("bert.gguf"), &[]);
    let chat = json!({"messages": [{"role": "user", "content": "ab cd"}]});
    for (path, body) in [
        ("/v1/chat/completions", &chat),
        ("/completion", &json!({"prompt": "ab"})),
        ("/v1/completions", &json!({"prompt": "ab", "stream": true})),
        ("/completion", &json!({"prompt": prompt(1, 3)})),
    ] {
        let reply = server.post(path, body);
        assert_eq!(reply.status, 400, "{path}: {}", reply.body);
        assert!(reply.message().contains("is an encoder") && reply.message().contains("/v1/embeddings"), "{path}");
    }
    assert_eq!(server.post("/tokenize", &json!({"content": "ab zz", "add_special": true})).ok()["tokens"][0], 2);
    server.get("/v1/models").ok();
    server.get("/props").ok();
    assert_eq!(server.metric("opencoti_requests_processing"), 0.0);
}

#[test]
fn a_text_longer_than_the_encoder_reads_is_refused_with_both_numbers() {
    let server = Server::at(with_words("bert.gguf"), &["--batch-size", "16"]);
    // 62 words and two markers fit, although a step was asked to be smaller.
    server.post("/v1/embeddings", &json!({"input": "ab ".repeat(62)})).ok();
    let reply = server.post("/v1/embeddings", &json!({"input": ["ab", "ab ".repeat(63)]}));
    assert_eq!(reply.status, 400, "{}", reply.body);
    assert!(reply.message().contains("65") && reply.message().contains("64"), "{}", reply.message());
    let reply = server.post("/v1/rerank", &json!({"query": "ab", "documents": ["ab", "ab ".repeat(63)]}));
    assert_eq!((reply.status, &reply.body["error"]["param"]), (400, &json!("documents[1]")));
    assert!(reply.message().contains("65 tokens") && reply.message().contains("64"), "{}", reply.message());
}

#[test]
fn a_reranker_scores_pairs() {
    let server = Server::at(with_words("bert-rank.gguf"), &[]);
    let documents: Vec<String> = words().chunks(5).take(12).map(|chunk| chunk.join(" ")).collect();
    let ask = |body: Value| server.post("/v1/rerank", &body).ok();
    let answer = ask(json!({"query": "ab cd", "documents": documents}));
    let results = answer["results"].as_array().expect("results");
    assert_eq!(results.len(), 12);
    let scores: Vec<f64> = results.iter().map(|r| r["relevance_score"].as_f64().expect("a score")).collect();
    assert!(scores.windows(2).all(|w| w[0] >= w[1]) && scores.iter().all(|s| (0.0..=1.0).contains(s)), "{scores:?}");
    assert!(scores[0] - scores[11] > 1e-3, "{scores:?}");
    let best = results[0]["index"].as_u64().expect("an index") as usize;
    // Alone the best gets the same score, and the raw one is its logit.
    let alone = ask(json!({"query": "ab cd", "documents": [documents[best]], "raw_scores": true}));
    let raw = alone["results"][0]["relevance_score"].as_f64().expect("a score");
    assert!((1.0 / (1.0 + (-raw).exp()) - scores[0]).abs() < 1e-5, "{raw} {scores:?}");
    // The order of query and text matters: they have different token types.
    let swapped = ask(json!({"query": documents[best], "documents": ["ab cd"], "raw_scores": true}));
    assert!((swapped["results"][0]["relevance_score"].as_f64().expect("a score") - raw).abs() > 1e-3);
    assert_eq!(server.post("/v1/embeddings", &json!({"input": "ab"})).status, 400);
    // The same file as an embedding model.
    let server = Server::at(with_words("bert-rank.gguf"), &["--pooling", "cls"]);
    server.post("/v1/embeddings", &json!({"input": "ab"})).ok();
    let cosine = server.post("/rerank", &json!({"query": "ab", "texts": ["ab", "cd"]})).ok();
    assert_eq!(cosine[0]["index"], 0);
    assert!((cosine[0]["score"].as_f64().expect("a score") - 1.0).abs() < 1e-4, "{cosine}");
}

#[test]
fn rank_pooling_without_a_head_and_broken_folders_are_refused_at_the_start() {
    let site = with_words("bert.gguf");
    let sentence = refusal(&site.run("check", &["--pooling", "rank"]));
    assert!(sentence.contains("no head that scores texts"), "{sentence}");
    std::fs::remove_file(site.path("tiny.gguf")).expect("removed");
    std::fs::create_dir(site.path("tiny.gguf")).expect("a folder");
    let sentence = refusal(&site.run("check", &[]));
    assert!(sentence.contains("config.json cannot be read"), "{sentence}");
    std::fs::write(site.path("tiny.gguf/config.json"), r#"{"model_type": "llama"}"#).expect("written");
    std::fs::write(site.path("tiny.gguf/model.safetensors"), [2, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']).expect("written");
    let sentence = refusal(&site.run("check", &[]));
    assert!(sentence.contains("convert others to GGUF"), "{sentence}");
}

#[test]
fn minilm_embeds_and_ranks_real_sentences() {
    let Some(site) = Site::with_real_model("all-MiniLM-L6-v2") else { return };
    let server = Server::at(site, &[]);
    let references = std::fs::read_to_string(fixture("all-MiniLM-L6-v2.reference.json")).expect("the references");
    let references: Vec<Value> = serde_json::from_str(&references).expect("JSON");
    let texts: Vec<&Value> = references.iter().map(|r| &r["text"]).collect();
    let found = vectors(&server.post("/v1/embeddings", &json!({"input": texts})).ok());
    for (found, reference) in found.iter().zip(&references) {
        let diff = max_diff(found, &vector(&reference["vector"]));
        assert!(diff < 1e-3, "{}: {diff}", reference["text"]);
    }
    let cosine: f32 = found[0].iter().zip(&found[1]).map(|(a, b)| a * b).sum();
    assert!((cosine - 0.755).abs() <= 0.003, "{cosine}");
    let query = json!({"query": texts[0], "documents": [texts[2], texts[1], texts[3]]});
    let ranked = server.post("/v1/rerank", &query).ok();
    assert_eq!(ranked["results"][0]["index"], 1, "{ranked}");
    let score = ranked["results"][0]["relevance_score"].as_f64().expect("a score");
    assert!((score - 0.755).abs() <= 0.003, "{score}");
    let chat = json!({"messages": [{"role": "user", "content": "Hello"}]});
    assert_eq!(server.post("/v1/chat/completions", &chat).status, 400);
}
