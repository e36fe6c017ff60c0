//! Many agents on one prefix: what they share is computed once and held once, and what is their own stays their own.

use opencoti_tests::server::{Server, Site, prompt};
use serde_json::{Value, json};

/// Pages have so many token slots.
const PAGE: usize = 128;

/// A pool of tokens.
#[track_caller]
fn pool(server: &Server, tokens: &[u32]) -> u64 {
    let made = server.post("/polykv/pools", &json!({"tokens": tokens, "expect_len": tokens.len()})).ok();
    assert_eq!(made["prefix_len"], tokens.len(), "{made}");
    made["pool_id"].as_u64().expect("an id")
}

/// What an agent asks: the document, then its own.
fn turn(pool: u64, agent: usize, document: &[u32], own: usize) -> Value {
    let whole = [document, &prompt(agent + 100, own)].concat();
    json!({
        "prompt": whole, "n_predict": 12, "temperature": 0,
        "ignore_eos": true, "n_probs": 10, "pool_id": pool, "session_id": format!("agent-{agent}"),
    })
}

/// Answers that compute everything for themselves.
fn alone(mut body: Value) -> Value {
    body["cache_prompt"] = json!(false);
    if let Some(fields) = body.as_object_mut() {
        fields.remove("pool_id");
        fields.remove("session_id");
    }
    body
}

/// The largest difference between the log-probabilities that two answers report, as long as they say the same.
fn difference(a: &Value, b: &Value) -> f64 {
    let steps = |answer: &Value| answer["completion_probabilities"].as_array().cloned().expect("probabilities");
    let mut worst: f64 = 0.0;
    for (a, b) in steps(a).iter().zip(&steps(b)) {
        let tops = |step: &Value| step["top_logprobs"].as_array().cloned().expect("ten of them");
        for top in tops(a) {
            let same = tops(b).into_iter().find(|other| other["id"] == top["id"]);
            if let Some(other) = same {
                let (x, y) = (top["logprob"].as_f64(), other["logprob"].as_f64());
                worst = worst.max((x.expect("a number") - y.expect("a number")).abs());
            }
        }
        if a["id"] != b["id"] {
            break;
        }
    }
    worst
}

/// Two agents on a document: their answers, and that the document is computed once and held once.
fn gate(site: Site, document: usize, window: Option<usize>, extra: &[&str]) {
    let common = ["--parallel", "3", "--polykv-max-pools", "2", "--ctx-size"];
    let server = Server::at(site, &[&common[..], extra].concat());
    let document = prompt(1, document);
    let id = pool(&server, &document);
    let used = server.metric("opencoti_kv_cells_used");
    let mut computed = document.len() as u64;
    for agent in [1, 2] {
        let body = turn(id, agent, &document, 39);
        let shared = server.complete(&body);
        assert_eq!(shared["timings"]["cache_n"], document.len(), "agent {agent}");
        assert_eq!(shared["timings"]["prompt_n"], 39, "agent {agent}");
        let slots = server.get("/slots").ok();
        let bound = slots.as_array().expect("slots").iter().filter(|s| s["opencoti"]["pool_id"] == id);
        let shared_now = bound.filter_map(|s| s["opencoti"]["n_pool_shared"].as_u64()).max();
        assert_eq!(shared_now, Some(document.len() as u64), "agent {agent}");
        computed += 39;
        let private = server.complete(&alone(body));
        assert_eq!(private["timings"]["cache_n"], 0);
        assert!(difference(&shared, &private) < 2e-2, "agent {agent}: {}", difference(&shared, &private));
        assert_eq!(shared["content"], private["content"], "agent {agent}");
    }
    assert_eq!(computed, (document.len() + 2 * 39) as u64);
    let info = server.get(&format!("/polykv/pools/{id}")).ok();
    assert_eq!((&info["n_sessions"], &info["hits"]), (&json!(2), &json!(2)), "{info}");
    // The pool holds its own pages, of windows too.
    let pages = document.len().div_ceil(PAGE) + window.map_or(0, |w| w / PAGE + 2);
    assert!(used <= (pages * PAGE) as f64, "{used} cells for {} tokens", document.len());
    assert_eq!(server.post(&format!("/polykv/pools/{id}/release"), &json!({})).status, 200);
    assert_eq!(server.get(&format!("/polykv/pools/{id}")).status, 404);
}

#[test]
fn two_agents_share_a_document_of_874_tokens_and_say_what_they_say_alone() {
    gate(Site::new(""), 874, None, &["2048"]);
}

#[test]
fn the_same_with_two_geometries_of_pages() {
    gate(Site::with_fixture("gemma3.gguf"), 190, Some(8), &["256"]);
}

#[test]
fn the_same_with_recurrent_layers_at_the_exact_boundary() {
    gate(Site::with_fixture("qwen35.gguf"), 190, None, &["256"]);
}

#[test]
fn eight_agents_hold_a_seventh_of_the_pages_of_private_copies() {
    const AGENTS: usize = 8;
    const DOCUMENT: usize = 6400;
    let flags = ["--parallel", "8", "--polykv-max-pools", "1", "--ctx-size", "8192"];
    let document = prompt(1, DOCUMENT);
    let server = Server::start(&flags);
    let id = pool(&server, &document);
    (0..AGENTS).for_each(|agent| drop(server.complete(&turn(id, agent, &document, 39))));
    let shared = server.metric("opencoti_kv_cells_used");
    let private = {
        let server = Server::start(&flags);
        (0..AGENTS).for_each(|agent| drop(server.complete(&alone(turn(id, agent, &document, 39)))));
        server.metric("opencoti_kv_cells_used")
    };
    assert!(private / shared >= 6.9, "{private} cells against {shared}");
}

#[test]
fn agents_that_join_at_once_compute_the_document_once() {
    let server =
        Server::start(&["--parallel", "4", "--polykv-max-pools", "1", "--ctx-size", "2048", "--batch-size", "32"]);
    let document = prompt(1, 900);
    let id = pool(&server, &document);
    let answers: Vec<Value> = std::thread::scope(|scope| {
        let document = &document;
        let server = &server;
        let join = |agent| scope.spawn(move || server.complete(&turn(id, agent, document, 20)));
        let agents: Vec<_> = (0..4).map(join).collect();
        agents.into_iter().map(|agent| agent.join().expect("an agent")).collect()
    });
    assert!(answers.iter().all(|a| a["timings"]["prompt_n"] == 20), "{answers:?}");
}

#[test]
fn a_pool_is_forked_pinned_compacted_and_released() {
    let server = Server::start(&["--parallel", "2", "--polykv-max-pools", "3", "--ctx-size", "2048"]);
    let root = prompt(1, 300);
    let parent = pool(&server, &root);
    let grown = [&root[..], &prompt(2, 200)].concat();
    let path = |id: u64, what: &str| format!("/polykv/pools/{id}/{what}");
    let child = server.post(&path(parent, "fork"), &json!({"tokens": grown, "pin": true})).ok();
    let child = child["pool_id"].as_u64().expect("an id");
    assert_eq!(server.complete(&turn(child, 1, &grown, 10))["timings"]["cache_n"], 500);
    let short = server.post(&path(parent, "fork"), &json!({"tokens": prompt(2, 10)}));
    assert_eq!(short.status, 400);
    assert!(short.message().contains("child prefix shorter than branch_pos"), "{}", short.message());
    // A summary in place of what came after the root's first 200 tokens.
    let summary = [&root[..200], &prompt(3, 40)].concat();
    let branch = server.post(&path(parent, "fork"), &json!({"tokens": summary, "branch_pos": 200})).ok();
    assert_eq!((&branch["branch_pos"], &branch["parent"]), (&json!(200), &json!(parent)));
    let full = server.post("/polykv/pools", &json!({"tokens": [5]}));
    assert_eq!(full.status, 409, "{}", full.body);
    for what in ["unpin", "release"] {
        server.post(&path(child, what), &json!({})).ok();
    }
    let list = server.get("/polykv/pools").ok();
    assert_eq!((&list["seq_ids_used"], &list["pools_max"], &list["tree_depth"]), (&json!(2), &json!(3), &json!(2)));
}

#[test]
fn a_newcomer_is_refused_at_once_and_told_what_is_short_while_the_session_that_fills_the_cache_goes_on() {
    let server = Server::start(&["--parallel", "3", "--ctx-size", "1024", "--cache-tokens", "1024"]);
    let body = json!({"prompt": prompt(1, 100), "n_predict": 700, "ignore_eos": true, "session_id": "greedy"});
    let mut greedy = server.stream("/completion", &body);
    greedy.next().expect("a token");
    let small = server.complete(&json!({"prompt": prompt(2, 20), "n_predict": 20, "ignore_eos": true}));
    assert_eq!(small["tokens_predicted"], 20);
    let began = std::time::Instant::now();
    let refused = server.post("/completion", &json!({"prompt": prompt(3, 200), "n_predict": 100}));
    let took = began.elapsed();
    assert_eq!(refused.status, 429, "{}", refused.body);
    for word in ["`kv`", "300", "free"] {
        assert!(refused.message().contains(word), "{word} is not in {}", refused.message());
    }
    assert!(took < std::time::Duration::from_secs(2), "{took:?}");
    let last = greedy.last().expect("an end");
    assert_eq!((&last["tokens_predicted"], &last["truncated"]), (&json!(700), &json!(false)));
}
