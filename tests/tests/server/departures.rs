//! Clients that go away while queued, in prefill and in decode: their slot is free at the next step.

use opencoti_tests::server::{Server, prompt};
use serde_json::json;

/// One slot, and steps so small that a long prompt takes hundreds of them.
const SLOW: [&str; 6] = ["--parallel", "1", "--ctx-size", "16384", "--batch-size", "2"];

#[test]
fn in_decode() {
    let server = Server::start(&SLOW);
    let body = json!({"prompt": prompt(1, 5), "n_predict": 16000, "ignore_eos": true});
    let mut events = server.stream("/completion", &body);
    events.next().expect("a token");
    assert_eq!(server.slot(0)["is_processing"], true);
    drop(events);
    server.wait_until_idle();
    let cached = server.slot(0)["opencoti"]["n_cached"].as_u64().expect("a count");
    assert!(cached < 16000, "it went on to its end");
    server.complete(&json!({"prompt": prompt(2, 5), "n_predict": 2}));
}

#[test]
fn in_prefill() {
    let server = Server::start(&SLOW);
    let connection = server.connect("/completion", &json!({"prompt": prompt(1, 12000), "n_predict": 1}));
    server.wait_until("the prompt's beginning", || {
        server.slot(0)["n_prompt_tokens_processed"].as_u64().is_some_and(|n| n > 0)
    });
    drop(connection);
    server.wait_until_idle();
    let cached = server.slot(0)["opencoti"]["n_cached"].as_u64().expect("a count");
    assert!(cached < 12000, "the prompt was computed to its end");
    server.complete(&json!({"prompt": prompt(2, 5), "n_predict": 2}));
}

#[test]
fn in_the_queue() {
    let server = Server::start(&SLOW);
    let mut running =
        server.stream("/completion", &json!({"prompt": prompt(1, 5), "n_predict": 16000, "ignore_eos": true}));
    let connection = server.connect("/completion", &json!({"prompt": prompt(2, 5), "n_predict": 1}));
    server.wait_until("the second request's wait", || server.metric("opencoti_requests_deferred") == 1.0);
    drop(connection);
    server.wait_until("its leaving", || server.metric("opencoti_requests_deferred") == 0.0);
    assert_eq!(server.metric("opencoti_requests_processing"), 1.0, "the first one is still running");
    assert_eq!(running.next().expect("a token")["stop"], false);
}

#[test]
fn a_request_is_cancelled_by_its_id() {
    let server = Server::start(&SLOW);
    let body = json!({"prompt": prompt(1, 5), "n_predict": 16000, "ignore_eos": true}).to_string();
    std::thread::scope(|scope| {
        let request = reqwest::blocking::Client::new().post(server.url() + "/completion");
        let request = request.header("x-request-id", "mine").header("content-type", "application/json").body(body);
        let client = scope.spawn(|| request.send().expect("an answer"));
        server.wait_until("the request's start", || server.slot(0)["is_processing"] == true);
        assert_eq!(server.post("/v1/requests/mine/cancel", &json!({})).ok()["cancelled"], true);
        assert_eq!(client.join().expect("the client").status(), 499);
    });
    server.wait_until_idle();
    assert_eq!(server.post("/v1/requests/mine/cancel", &json!({})).ok()["cancelled"], false);
}
