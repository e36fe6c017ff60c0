//! Prefixes are shared: with what still runs, and among prompts that come at once.

use opencoti_tests::server::{Server, prompt};
use serde_json::json;

#[test]
fn a_prompt_shares_the_prefix_of_a_generation_that_still_runs() {
    let server = Server::start(&["--parallel", "2", "--ctx-size", "8192"]);
    let common = prompt(1, 300);
    let mut running = server.stream("/completion", &json!({"prompt": common, "n_predict": 7000, "ignore_eos": true}));
    running.next().expect("a token");
    let longer = [common.clone(), prompt(2, 10)].concat();
    let answer = server.complete(&json!({"prompt": longer, "n_predict": 4}));
    assert_eq!((&answer["timings"]["cache_n"], &answer["timings"]["prompt_n"]), (&json!(300), &json!(10)));
    // A fork at any token, not only at the end of what is cached.
    let other = [&common[..177], &prompt(3, 20)].concat();
    let answer = server.complete(&json!({"prompt": other, "n_predict": 4}));
    assert_eq!((&answer["timings"]["cache_n"], &answer["timings"]["prompt_n"]), (&json!(177), &json!(20)));
    assert_eq!(running.next().expect("a token")["stop"], false, "the donor still runs");
}

#[test]
fn identical_cold_prompts_are_computed_once() {
    let server = Server::start(&["--parallel", "4", "--ctx-size", "2048", "--batch-size", "16"]);
    let body = json!({"prompt": prompt(1, 1000), "n_predict": 3, "temperature": 0, "ignore_eos": true});
    let answers: Vec<_> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4).map(|_| scope.spawn(|| server.complete(&body))).collect();
        clients.into_iter().map(|client| client.join().expect("a client")).collect()
    });
    let computed: u64 = answers.iter().map(|a| a["timings"]["prompt_n"].as_u64().expect("a count")).sum();
    // Whoever shares computes the last token again, for its logits.
    assert_eq!(computed, 1000 + 3);
    assert!(answers.iter().all(|a| a["content"] == answers[0]["content"]), "shared or not, the text is the same");
}

#[test]
fn a_request_may_decline_the_cache() {
    let server = Server::start(&["--parallel", "1", "--ctx-size", "512"]);
    let mut body = json!({"prompt": prompt(1, 100), "n_predict": 8, "temperature": 0});
    let first = server.complete(&body);
    let cached = server.complete(&body);
    body["cache_prompt"] = json!(false);
    let fresh = server.complete(&body);
    let counts = [&first, &cached, &fresh].map(|a| a["timings"]["cache_n"].as_u64().expect("a count"));
    assert_eq!(counts, [0, 99, 0]);
    assert!(first["content"] == cached["content"] && first["content"] == fresh["content"]);
}
