//! The routes of pools.

use std::sync::Arc;

use opencoti_engine::api::{EngineError, Event};
use opencoti_engine::pools::MakePool;
use serde_json::{Value, json};

use super::fake::{Script, Step, TestServer, byte_token, config, engine, fails, info, plugins, pool, started};

/// A prompt becomes pool 3.
fn makes() -> Script {
    Arc::new(|_| vec![Step::Say(started(0)), Step::Say(Event::Pool(Box::new(pool(3))))])
}

async fn get(server: &TestServer, path: &str) -> Value {
    let response = server.get(path).await;
    assert_eq!(response.status(), 200, "{path}");
    response.json().await.expect("JSON")
}

#[tokio::test]
async fn a_pool_is_made_of_a_text_of_tokens_of_a_session_or_of_a_slot() {
    let server = TestServer::new(makes()).await;
    let made = server.ok("/polykv/pools", json!({"prompt": "ab", "pin": true})).await;
    let keys = ["pool_id", "parent", "branch_pos", "prefix_len", "prefix_hash", "pinned", "children", "orphaned_pin"];
    assert!(keys.iter().all(|key| made.get(key).is_some()), "{made}");
    assert_eq!((&made["pool_id"], &made["prefix_hash"]), (&json!(3), &json!("00000000000000ab")));
    assert_eq!(made["admission"]["settle_tokens"], 48);
    let request = server.log.last();
    // The beginning token, and the text's.
    assert_eq!(request.prompt, [1, byte_token(b'a'), byte_token(b'b')]);
    assert_eq!(request.make_pool, Some(MakePool { pinned: true, ..MakePool::default() }));
    assert_eq!(request.n_predict, Some(0));
    server.ok("/polykv/pools", json!({"tokens": [5, 6, 7], "expect_len": 3, "ephemeral": true})).await;
    assert_eq!(server.log.last().prompt, [5, 6, 7]);
    for from in [json!({"from_session": "s"}), json!({"from_slot": 2})] {
        assert_eq!(server.ok("/polykv/pools", from).await["ephemeral"], true, "what is captured goes by itself");
    }
    let kept = server.ok("/polykv/pools", json!({"from_slot": 2, "ephemeral": false, "pin": true})).await;
    assert_eq!((&kept["ephemeral"], &kept["pinned"]), (&json!(false), &json!(true)));
}

#[tokio::test]
async fn a_fork_gives_the_whole_prefix_of_the_child() {
    let server = TestServer::new(makes()).await;
    server.ok("/polykv/pools/2/fork", json!({"tokens": [5, 6, 7], "branch_pos": 2, "pin": true})).await;
    let spec = server.log.last().make_pool.expect("a pool is asked for");
    assert_eq!(spec, MakePool { parent: Some((2, Some(2))), pinned: true, ephemeral: false });
    server.ok("/polykv/pools/2/fork", json!({"prompt": "ab"})).await;
    assert_eq!(server.log.last().make_pool.and_then(|spec| spec.parent), Some((2, None)));
}

#[tokio::test]
async fn bodies_that_make_no_pool_are_refused_with_what_is_wrong() {
    let server = TestServer::new(makes()).await;
    for (path, body, word) in [
        ("/polykv/pools", json!({}), "exactly one of"),
        ("/polykv/pools", json!({"prompt": "a", "tokens": [5]}), "found prompt and tokens"),
        ("/polykv/pools", json!({"tokens": []}), "no tokens"),
        ("/polykv/pools", json!({"tokens": [5, 999]}), "tokens[1]"),
        ("/polykv/pools", json!({"tokens": [5], "expect_len": 2}), "expect_len"),
        ("/polykv/pools", json!({"from_slot": 9}), "from_slot"),
        ("/polykv/pools/2/fork", json!({}), "exactly one of"),
        ("/polykv/pools/2/fork", json!({"tokens": [5], "branch_pos": -1}), "branch_pos"),
        ("/polykv/pools/3/sampling", json!({}), "placement"),
        ("/polykv/pools/3/admission", json!({"mode": "loud"}), "advisory or enforced"),
        ("/polykv/pools/3/admission", json!({"target_tps_per_session": -1}), "target_tps_per_session"),
        ("/polykv/pools/3/admission", json!({"settle_max_ms": 1e9 as i64}), "settle_max_ms"),
    ] {
        let error = server.error(path, body, 400).await;
        assert!(error["message"].as_str().is_some_and(|text| text.contains(word)), "{error}");
    }
    server.error("/polykv/pools/3/sampling", json!({"placement": "device"}), 501).await;
    for path in ["/polykv/pools/9/pin", "/polykv/pools/x/pin"] {
        server.error(path, json!({}), 404).await;
    }
}

#[tokio::test]
async fn a_refusal_of_the_engine_keeps_its_status() {
    for (error, status) in [
        (EngineError::Conflict("all 4 pools are in use".to_owned()), 409),
        (EngineError::Rejected { retry_after: 60, reason: "pools", message: "full".to_owned() }, 429),
    ] {
        let server = TestServer::new(fails(error)).await;
        server.error("/polykv/pools", json!({"prompt": "a"}), status).await;
    }
}

#[tokio::test]
async fn pools_are_shown_and_changed() {
    let server = TestServer::new(makes()).await;
    let list = get(&server, "/polykv/pools").await;
    assert_eq!((&list["pools_max"], &list["seq_ids_used"], &list["tree_depth"]), (&json!(4), &json!(1), &json!(2)));
    assert_eq!(list["pools"][0], get(&server, "/polykv/pools/3").await);
    assert_eq!(server.get("/polykv/pools/9").await.status(), 404);
    assert_eq!(server.ok("/polykv/pools/3/pin", json!({})).await["pinned"], true);
    assert_eq!(server.ok("/polykv/pools/3/unpin", json!({})).await["pinned"], false);
    assert_eq!(server.ok("/polykv/pools/3/release", json!({})).await["released"], true);
    let placed = server.ok("/polykv/pools/3/sampling", json!({"placement": "cpu"})).await;
    assert_eq!(placed["sampling"]["placement"], "cpu");
    let body =
        json!({"mode": "enforced", "target_tps_per_session": 12.5, "on_saturation": "warn", "settle_max_ms": 100});
    let admission = &server.ok("/polykv/pools/3/admission", body).await["admission"];
    assert_eq!(
        *admission,
        json!({"mode": "enforced", "target_tps_per_session": 12.5, "on_saturation": "warn",
               "guarantee_min_sessions": 1, "settle_tokens": 48, "settle_max_ms": 100})
    );
}

#[tokio::test]
async fn capacity_and_rates_have_the_fields_of_the_contract() {
    let server = TestServer::new(makes()).await;
    let now = get(&server, "/polykv/pools/3/capacity?expected_tokens=77").await;
    for (key, value) in [
        ("can_admit", json!(false)),
        ("reason", json!("context headroom exhausted")),
        ("free_cells", json!(77)),
        ("settle_remaining_ms", json!(1500)),
        ("projected_mean_tps_model", json!(15.0)),
        ("projected_mean_tps_measured", json!(18.0)),
        ("projected_mean_tps_if_admitted", json!(18.0)),
        ("drop_per_admit_ewma", json!(2.0)),
        ("projected_idle_estimate", json!(false)),
    ] {
        assert_eq!(now[key], value, "{key}");
    }
    let rates = get(&server, "/polykv/tps?once=1").await;
    assert_eq!((&rates["aggregate"], &rates["n_warming"]), (&json!(40.0), &json!(1)));
    assert_eq!(rates["sessions"][0]["ctx_headroom_tokens"], 412);
    let mut stream = server.get("/polykv/tps").await;
    assert_eq!(stream.headers()["content-type"], "text/event-stream");
    let first = stream.chunk().await.expect("no error").expect("an event");
    assert!(first.starts_with(b"data: {\"aggregate\":40.0"), "{first:?}");
}

#[tokio::test]
async fn without_pools_the_routes_are_not_there_and_an_attach_is_refused() {
    let server = TestServer::loading(config()).await;
    let none = opencoti_engine::api::EngineInfo { max_pools: 0, ..info() };
    server.control.set_ready(engine(none, makes(), false).0, Arc::new(plugins));
    assert_eq!(server.get("/polykv/pools").await.status(), 404);
    assert_eq!(server.get("/polykv/tps?once=1").await.status(), 404);
    server.error("/polykv/pools", json!({"prompt": "a"}), 404).await;
    let error = server.error("/completion", json!({"prompt": "a", "pool_id": 1}), 400).await;
    assert_eq!(error["param"], "pool_id");
}
