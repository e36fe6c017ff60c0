//! More requests than slots and cells.

use std::collections::BTreeMap;
use std::time::Duration;

use opencoti_tests::server::{Reply, Server, Site, prompt};
use serde_json::{Value, json};

const REQUESTS: usize = 64;
const SMALL: [&str; 8] = ["--parallel", "8", "--ctx-size", "256", "--cache-tokens", "512", "--max-queue", "24"];

/// What the `i`th client asks: prompts of several lengths, some with a beginning in common, some with two answers, each
/// with a declared bound.
fn request(i: usize) -> Value {
    let own = prompt(i, 20 + i * 2);
    let prompt = if i.is_multiple_of(3) { [prompt(99, 40), own].concat() } else { own };
    json!({"prompt": prompt, "n_predict": predicted(i), "n": choices(i), "ignore_eos": true})
}

fn predicted(i: usize) -> usize {
    20 + i % 40
}

fn choices(i: usize) -> usize {
    if i % 8 == 5 { 2 } else { 1 }
}

/// 64 requests at once.
fn crowd(server: &Server) -> Vec<Reply> {
    let ask = |i: usize| server.post("/completion", &request(i));
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..REQUESTS).map(|i| scope.spawn(move || ask(i))).collect();
        clients.into_iter().map(|client| client.join().expect("a client")).collect()
    })
}

/// Every request ends in answers of their length, or in a refusal that says when to come back.
fn check(replies: &[Reply]) {
    let mut counts: BTreeMap<u16, usize> = BTreeMap::new();
    for (i, reply) in replies.iter().enumerate() {
        *counts.entry(reply.status).or_default() += 1;
        match reply.status {
            200 => {
                let answers = reply.body.as_array().map_or(std::slice::from_ref(&reply.body), Vec::as_slice);
                assert_eq!(answers.len(), choices(i), "request {i}");
                for answer in answers {
                    assert_eq!(answer["tokens_predicted"], predicted(i), "request {i}: {answer}");
                }
            }
            429 => {
                assert!(reply.retry_after.is_some_and(|seconds| seconds >= 1), "request {i}: {:?}", reply.retry_after);
                assert!(!reply.message().is_empty());
            }
            _ => panic!("request {i} ended in {}: {}", reply.status, reply.body),
        }
    }
    // The cells hold two of them at least.
    assert!(counts.get(&200).is_some_and(|&n| n >= 2), "{counts:?}");
}

#[test]
fn each_of_64_requests_is_answered_or_refused_and_afterwards_only_reclaimable_prefixes_are_left() {
    let server = Server::start(&SMALL);
    check(&crowd(&server));
    server.wait_until_idle();
    let (used, reclaimable) = (server.metric("opencoti_kv_cells_used"), server.metric("opencoti_kv_cells_reclaimable"));
    assert!(used > 0.0 && used == reclaimable, "{used} cells are used, {reclaimable} of them reclaimable");
    // What is left stands in nobody's way.
    let whole = server.complete(&json!({"prompt": prompt(90, 200), "n_predict": 50, "ignore_eos": true}));
    assert_eq!((&whole["tokens_predicted"], &whole["truncated"]), (&json!(50), &json!(false)));
}

#[test]
fn without_retained_prefixes_every_page_is_free_after_the_crowd() {
    let server = Server::start(&[&SMALL[..], &["--cache-retain", "0"]].concat());
    check(&crowd(&server));
    server.wait_until_idle();
    assert_eq!(server.metric("opencoti_kv_cells_used"), 0.0);
    assert_eq!(server.metric("opencoti_sequences_retained"), 0.0);
}

#[test]
fn sliding_windows_are_given_back_like_whole_sequences() {
    let fixture = || Site::with_fixture("gemma3.gguf");
    let server = Server::at(fixture(), &SMALL);
    check(&crowd(&server));
    server.wait_until_idle();
    // Of both stores together.
    let (used, reclaimable) = (server.metric("opencoti_kv_cells_used"), server.metric("opencoti_kv_cells_reclaimable"));
    assert!(used > 0.0 && used == reclaimable, "{used} cells are used, {reclaimable} of them reclaimable");
    drop(server);
    let server = Server::at(fixture(), &[&SMALL[..], &["--cache-retain", "0"]].concat());
    check(&crowd(&server));
    server.wait_until_idle();
    assert_eq!(server.metric("opencoti_kv_cells_used"), 0.0);
}

#[test]
fn a_crowd_of_which_most_go_away_leaves_nothing() {
    let server = Server::start(&[&SMALL[..], &["--cache-retain", "0", "--batch-size", "8"]].concat());
    let body = |i: usize| {
        let mut body = request(i);
        (body["n_predict"], body["stream"]) = (json!(100), json!(i.is_multiple_of(2)));
        body
    };
    for round in 0..4 {
        let connections: Vec<_> = (0..32).map(|i| server.connect("/completion", &body(i + round * 7))).collect();
        // They leave one after the other, at whatever the server is doing for them.
        for connection in connections {
            drop(connection);
            std::thread::sleep(Duration::from_millis(1));
        }
        server.wait_until_idle();
        assert_eq!(server.metric("opencoti_kv_cells_used"), 0.0);
    }
    let whole = server.complete(&json!({"prompt": prompt(90, 200), "n_predict": 50, "ignore_eos": true}));
    assert_eq!(whole["tokens_predicted"], 50);
}

#[test]
fn a_request_beyond_every_cell_is_refused_before_prefill_and_harms_nobody() {
    let server = Server::start(&["--parallel", "2", "--ctx-size", "1024", "--cache-tokens", "256"]);
    let refused = server.post("/completion", &json!({"prompt": prompt(1, 300), "n_predict": 100}));
    assert_eq!(refused.status, 429, "{}", refused.body);
    assert!(refused.retry_after.is_some_and(|seconds| seconds >= 1));
    assert!(refused.message().contains("400"), "{}", refused.message());
    assert_eq!(server.metric("opencoti_kv_cells_used"), 0.0);
    server.complete(&json!({"prompt": prompt(1, 100), "n_predict": 5}));
}

#[test]
fn a_full_queue_refuses_the_next_request() {
    let server = Server::start(&["--parallel", "1", "--max-queue", "1", "--ctx-size", "8192"]);
    let endless = json!({"prompt": prompt(1, 5), "n_predict": 8000, "ignore_eos": true});
    let running = server.stream("/completion", &endless);
    let waiting = server.connect("/completion", &endless);
    server.wait_until("the second request's wait", || server.metric("opencoti_requests_deferred") == 1.0);
    let refused = server.post("/completion", &endless);
    assert_eq!(refused.status, 429, "{}", refused.body);
    assert!(refused.message().contains("waiting"), "{}", refused.message());
    drop((running, waiting));
    server.wait_until_idle();
}
