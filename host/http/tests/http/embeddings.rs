//! Embeddings, tokens.

use std::sync::Arc;

use opencoti_engine::api::{Pooling, StopReason};
use serde_json::{Value, json};

use crate::fake::{N_VOCAB, TestServer, byte_token, config, engine, info, plugins, says};

const EMBED: &str = "/v1/embeddings";

async fn server() -> TestServer {
    TestServer::new(says(&["x"], StopReason::Eos)).await
}

#[tokio::test]
async fn vectors_are_normalised_and_counted() {
    let server = server().await;
    let answer = server.ok(EMBED, json!({"input": ["a", "bcd", [byte_token(b'e')]], "model": "m"})).await;
    assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("m")));
    assert_eq!(answer["usage"], json!({"prompt_tokens": 2 + 4 + 1, "total_tokens": 7}));
    for (index, entry) in answer["data"].as_array().expect("an array").iter().enumerate() {
        assert_eq!((&entry["object"], &entry["index"]), (&json!("embedding"), &json!(index)));
        let numbers: Vec<f64> =
            entry["embedding"].as_array().expect("numbers").iter().filter_map(Value::as_f64).collect();
        let expected = [0.6, 0.0, -0.8, 0.0];
        assert!(numbers.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-6), "{numbers:?}");
    }
}

#[tokio::test]
async fn base64_dimensions_and_norms_are_honoured() {
    let server = server().await;
    let answer = server.ok(EMBED, json!({"content": "a", "encoding_format": "base64", "dimensions": 1})).await;
    assert_eq!(answer["data"][0]["embedding"], "AACAPw==");
    let answer = server.ok(EMBED, json!({"input": "a", "embd_normalize": -1})).await;
    assert_eq!(answer["data"][0]["embedding"], json!([6.0, 0.0, -8.0, 0.0]));
    let native = server.ok("/embedding", json!({"content": ["a", "b"], "embd_normalize": -1})).await;
    assert_eq!(native[1], json!({"index": 1, "embedding": [[6.0, 0.0, -8.0, 0.0]]}));
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": ""}), "none"),
        (json!({"input": []}), "input"),
        (json!({"input": [[]]}), "input"),
        (json!({"input": 5}), "input"),
        (json!({"input": [N_VOCAB]}), "input[0]"),
        (json!({"input": "a", "encoding_format": "hex"}), "encoding_format"),
        (json!({"input": "a", "dimensions": 0}), "dimensions"),
        (json!({"input": "a", "dimensions": 5}), "dimensions"),
        (json!({"input": "a", "embd_normalize": -2}), "embd_normalize"),
    ] {
        if param == "none" {
            // The beginning token alone.
            server.ok(EMBED, body).await;
        } else {
            assert_eq!(server.error(EMBED, body, 400).await["param"], param);
        }
    }
}

#[tokio::test]
async fn without_pooling_only_the_native_route_answers() {
    let mut server = TestServer::loading(config()).await;
    let mut unpooled = info();
    unpooled.pooling = Pooling::None;
    let (handle, log) = engine(unpooled, says(&["x"], StopReason::Eos), false);
    server.control.set_ready(handle, Arc::new(plugins));
    server.log = log;
    server.error(EMBED, json!({"input": "a"}), 400).await;
    server.ok("/embeddings", json!({"input": "a"})).await;
}

#[tokio::test]
async fn text_becomes_tokens_and_back() {
    let server = server().await;
    let (a, euro) = (byte_token(b'a'), "€".bytes().map(byte_token).collect::<Vec<_>>());
    assert_eq!(server.ok("/tokenize", json!({"content": "a"})).await, json!({"tokens": [a]}));
    assert_eq!(server.ok("/tokenize", json!({"content": "a", "add_special": true})).await, json!({"tokens": [1, a]}));
    assert_eq!(server.ok("/tokenize", json!({"content": ["a", 2, "a"]})).await, json!({"tokens": [a, 2, a]}));
    assert_eq!(server.ok("/tokenize", json!({"content": "</s>"})).await, json!({"tokens": [2]}));
    let raw = server.ok("/tokenize", json!({"content": "</s>", "parse_special": false})).await;
    assert_eq!(raw["tokens"].as_array().map(Vec::len), Some(4));
    let pieces = server.ok("/tokenize", json!({"content": "a€", "with_pieces": true})).await;
    assert_eq!(pieces["tokens"][0], json!({"id": a, "piece": "a"}));
    assert_eq!(pieces["tokens"][1], json!({"id": euro[0], "piece": [0xe2]}));
    assert_eq!(server.ok("/tokenize", json!({})).await, json!({"tokens": []}));
    assert_eq!(server.ok("/detokenize", json!({"tokens": euro})).await, json!({"content": "€"}));
    assert_eq!(server.error("/detokenize", json!({"tokens": [1, -3]}), 400).await["param"], "tokens[1]");
    assert_eq!(server.error("/detokenize", json!({"tokens": ["x"]}), 400).await["param"], "tokens[0]");
    assert_eq!(server.error("/tokenize", json!({"content": {"a": 1}}), 400).await["param"], "content");
}

#[tokio::test]
async fn a_long_text_is_tokenised_beside_other_requests() {
    let server = server().await;
    // No spaces: in this vocabulary each is three bytes.
    let long = "word-".repeat(200_000);
    let (tokens, health) = tokio::join!(server.ok("/tokenize", json!({"content": long})), server.get("/health"));
    assert_eq!(tokens["tokens"].as_array().map(Vec::len), Some(1_000_000));
    assert_eq!(health.status(), 200);
}
