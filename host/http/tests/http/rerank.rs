//! Ranking, and what a model that does not generate answers.

use std::sync::Arc;

use opencoti_engine::api::{EngineInfo, Pooling, Ranking, StopReason};
use serde_json::{Value, json};

use crate::fake::{TestServer, config, engine, info, plugins, says};

const RERANK: &str = "/v1/rerank";

async fn server(change: impl FnOnce(&mut EngineInfo)) -> TestServer {
    let mut server = TestServer::loading(config()).await;
    let mut info = info();
    change(&mut info);
    let (handle, log) = engine(info, says(&["x"], StopReason::Eos), false);
    server.control.set_ready(handle, Arc::new(plugins));
    server.log = log;
    server
}

fn places(results: &Value) -> Vec<u64> {
    results.as_array().expect("results").iter().filter_map(|r| r["index"].as_u64()).collect()
}

#[tokio::test]
async fn a_ranking_head_orders_documents_by_its_score() {
    let server = server(|info| info.ranking = Ranking::Head).await;
    // The scripted head likes long texts: their tokens, less one for the end and less three.
    let body = json!({"query": "q", "documents": ["abcd", "a", {"text": "abcdefgh"}], "model": "m"});
    for path in [RERANK, "/rerank", "/reranking", "/v1/reranking"] {
        let answer = server.ok(path, body.clone()).await;
        assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("m")));
        assert_eq!(places(&answer["results"]), [2, 0, 1]);
        let pairs = 3 * 2 + 4 + 1 + 8;
        assert_eq!(answer["usage"], json!({"prompt_tokens": pairs, "total_tokens": pairs}), "{answer}");
        let scores: Vec<f64> =
            answer["results"].as_array().unwrap().iter().map(|r| r["relevance_score"].as_f64().unwrap()).collect();
        assert!(scores.iter().all(|s| (0.0..=1.0).contains(s)), "{scores:?}");
    }
    let answer = server
        .ok(
            RERANK,
            json!({"query": "q", "documents": ["abcd", "a"], "top_n": 1, "return_documents": true, "raw_scores": true}),
        )
        .await;
    assert_eq!(answer["results"], json!([{"index": 0, "relevance_score": 1.0, "document": {"text": "abcd"}}]));
    assert_eq!(answer["model"], "tiny");
}

#[tokio::test]
async fn texts_are_answered_in_the_other_shape() {
    let server = server(|info| info.ranking = Ranking::Head).await;
    let answer = server.ok("/rerank", json!({"query": "q", "texts": ["a", "abcd"], "raw_scores": true})).await;
    assert_eq!(answer, json!([{"index": 1, "score": 1.0}, {"index": 0, "score": -2.0}]));
    let answer = server.ok("/rerank", json!({"query": "q", "texts": ["abc"], "return_text": true})).await;
    assert_eq!(answer, json!([{"index": 0, "score": 0.5, "text": "abc"}]));
}

#[tokio::test]
async fn without_a_head_texts_are_ordered_by_the_cosine_of_embeddings() {
    let server = server(|info| info.ranking = Ranking::Cosine).await;
    let answer = server.ok(RERANK, json!({"query": "q", "documents": ["one", "another"]})).await;
    // The scripted embeddings all point the same way.
    assert_eq!(places(&answer["results"]), [0, 1]);
    for result in answer["results"].as_array().unwrap() {
        assert!((result["relevance_score"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{result}");
    }
    // The beginning token counts.
    assert_eq!(answer["usage"]["prompt_tokens"], 2 + 4 + 8);
}

#[tokio::test]
async fn what_cannot_be_ranked_is_refused_by_field() {
    for ranking in [Ranking::Head, Ranking::Cosine] {
        let server = server(|info| info.ranking = ranking).await;
        for (body, param) in [
            (json!({}), "query"),
            (json!({"query": "q"}), "documents"),
            (json!({"query": "q", "documents": []}), "documents"),
            (json!({"query": "q", "texts": []}), "texts"),
            (json!({"query": 5, "documents": ["a"]}), "query"),
            (json!({"query": null, "documents": ["a"]}), "query"),
            (json!({"query": "q", "documents": "a"}), "documents"),
            (json!({"query": "q", "documents": ["a", 5]}), "documents[1]"),
            (json!({"query": "q", "documents": [{"title": "a"}]}), "documents[0]"),
            (json!({"query": "q", "documents": [{"text": ["a"]}]}), "documents[0].text"),
            (json!({"query": "q", "documents": ["a"], "top_n": 0}), "top_n"),
            (json!({"query": "q", "documents": ["a"], "top_n": -1}), "top_n"),
            (json!({"query": "q", "documents": ["a"], "top_n": "all"}), "top_n"),
            (json!({"query": "q", "documents": ["a"], "return_documents": "yes"}), "return_documents"),
            (json!({"query": "q", "documents": vec!["a"; 2049]}), "documents"),
            (json!({"query": "q", "documents": ["a", "b".repeat(600)]}), "documents[1]"),
        ] {
            let text: String = body.to_string().chars().take(80).collect();
            assert_eq!(server.error(RERANK, body, 400).await["param"], param, "{text}");
        }
    }
}

#[tokio::test]
async fn a_model_that_is_not_known_to_embed_ranks_nothing() {
    let server = server(|info| info.ranking = Ranking::None).await;
    let error = server.error(RERANK, json!({"query": "q", "documents": ["a"]}), 400).await;
    assert!(error["message"].as_str().unwrap().contains("embedding model or a reranker"), "{error}");
}

#[tokio::test]
async fn a_reranker_embeds_nothing() {
    let server = server(|info| (info.ranking, info.pooling) = (Ranking::Head, Pooling::Rank)).await;
    for path in ["/v1/embeddings", "/embedding"] {
        let error = server.error(path, json!({"input": "a"}), 400).await;
        assert!(error["message"].as_str().unwrap().contains("use /v1/rerank"), "{error}");
    }
}
