//! Each scalar codec, for keys and values, with and without rotation, under a running server.

use opencoti_tests::server::{Server, Site, prompt};
use serde_json::{Value, json};

/// Log-probabilities of the five best first tokens, by id.
fn best(server: &Server) -> Vec<(u64, f64)> {
    let body = json!({"prompt": prompt(1, 140), "n_predict": 12, "temperature": 0, "n_probs": 5, "ignore_eos": true});
    let answer = server.complete(&body);
    assert_eq!(answer["tokens_predicted"], 12);
    let tokens = answer["completion_probabilities"].as_array().expect("probabilities");
    assert_eq!(tokens.len(), 12);
    let pair = |p: &Value| (p["id"].as_u64().expect("an id"), p["logprob"].as_f64().expect("a finite number"));
    for token in tokens {
        for (_, logprob) in token["top_logprobs"].as_array().expect("the best").iter().map(pair) {
            assert!(logprob.is_finite() && logprob <= 0.0 && logprob > -50.0, "{token}");
        }
    }
    tokens[0]["top_logprobs"].as_array().expect("the best").iter().map(pair).collect()
}

#[test]
fn every_scalar_codec_generates_what_f16_does_within_its_precision() {
    let reference = best(&Server::start(&["--ctx-size", "512", "--parallel", "1"]));
    for (codec, tolerance) in
        [("f16", 1e-6), ("bf16", 0.02), ("q8_0", 0.02), ("q6_0", 0.06), ("q5_1", 0.2), ("q5_0", 0.2), ("q4_0", 0.5)]
    {
        for rotation in ["none", "hadamard"] {
            let codecs = ["--cache-type-k", codec, "--cache-type-v", codec, "--cache-rotation", rotation];
            let server = Server::start(&[&["--ctx-size", "512", "--parallel", "1"], &codecs[..]].concat());
            let found = best(&server);
            // f16 rounds otherwise after a rotation.
            let tolerance = if codec == "f16" && rotation == "hadamard" { 0.001 } else { tolerance };
            let (token, expected) = reference[0];
            let (_, logprob) = found.iter().find(|(id, _)| *id == token).unwrap_or_else(|| {
                panic!("{codec} {rotation}: {token} is none of the best: {found:?}, expected {reference:?}")
            });
            assert!((logprob - expected).abs() <= tolerance, "{codec} {rotation}: {logprob} instead of {expected}");
        }
    }
}

#[test]
fn keys_and_values_may_have_different_codecs() {
    let server = Server::start(&["--cache-type-k", "q8_0", "--cache-type-v", "q4_0", "--ctx-size", "512"]);
    best(&server);
    assert!(server.log().contains("K q8_0") && server.log().contains("V q4_0"), "{}", server.log());
}

#[test]
fn a_codec_that_nobody_has_is_refused_at_the_start() {
    use opencoti_tests::server::refusal;
    let site = Site::new("");
    let sentence = refusal(&site.run("check", &["--cache-type-k", "q3_9"]));
    assert!(sentence.contains("kv.k") && sentence.contains("q3_9"), "{sentence}");
    let site = Site::new("[kv.k_options]\nrotatoin = 'hadamard'\n");
    let sentence = refusal(&site.run("check", &[]));
    assert!(sentence.contains("rotatoin"), "{sentence}");
}

/// Log-probabilities of the answer to a long prompt, and the server's word on its cache.
fn long_answer(flags: &[&str]) -> (Vec<f64>, Value) {
    let server = Server::start(&[&["--ctx-size", "1024", "--parallel", "2"], flags].concat());
    let body = json!({"prompt": prompt(2, 700), "n_predict": 60, "temperature": 0, "n_probs": 1, "ignore_eos": true});
    let answer = server.complete(&body);
    let tokens = answer["completion_probabilities"].as_array().expect("probabilities");
    let logprobs = tokens.iter().map(|t| t["logprob"].as_f64().expect("a number")).collect();
    (logprobs, server.get("/props").ok())
}

#[test]
fn group_codecs_answer_alike_in_any_batch_size_and_report_every_byte() {
    let flags = |batch: &'static str| {
        ["--cache-type-k", "kvarn4", "--cache-type-v", "kvarn4", "--cache-stage-tokens", "128", "--batch-size", batch]
    };
    let (small, props) = long_answer(&flags("64"));
    let (large, _) = long_answer(&flags("512"));
    for (a, b) in small.iter().zip(&large) {
        assert!((a - b).abs() < 0.05, "{a} in small steps, {b} in large ones");
    }
    let kv = &props["opencoti"]["kv"]["effective"];
    let store = &kv["stores"][0];
    assert_eq!(store["type_k"], "kvarn4");
    let pages = |cells: &str| store[cells].as_u64().expect("cells") / 128;
    let (all, exact) = (pages("n_cells"), pages("n_cells_stage"));
    assert!(exact > 0 && exact <= all, "{store}");
    // Two layers of two KV heads of 32 values: codes of 4 bits, two halves a row and one a column.
    let (k, v) = (32 * 128 / 2 + 2 * (2 * 32 + 128), 128 * 32 / 2 + 2 * (2 * 128 + 32));
    let half = 2 * 128 * 32 * 2;
    assert_eq!(store["n_bytes_stage"], exact * 4 * half);
    assert_eq!(store["n_bytes"], all * 4 * (k + v) + exact * 4 * half);
    assert_eq!(kv["n_bytes"], store["n_bytes"]);
}

#[test]
fn any_codec_may_have_an_exact_tail_and_sink() {
    let server = Server::start(&[
        "--cache-type-k",
        "q4_0",
        "--cache-type-v",
        "q4_0",
        "--ctx-size",
        "1024",
        "--cache-stage-tokens",
        "256",
        "--cache-stage-sink",
        "128",
    ]);
    best(&server);
    let log = server.log();
    assert!(log.contains("the newest 256 tokens and the first 128 in f16"), "{log}");
}

/// Log-probabilities of the ten best first tokens after 1100 tokens of numbered sentences.
fn best_of_real(flags: &[&str]) -> Option<Vec<(u64, f64)>> {
    let site = Site::with_real_model("SmolLM2-135M-Instruct.Q4_1.gguf")?;
    let server = Server::at(site, &[&["--ctx-size", "2048", "--parallel", "1"], flags].concat());
    let line = |i: u32| format!("Box {} holds {} apples and {} pears.\n", i, (i * 37) % 61, (i * 53) % 47);
    let text: String = (1..70).map(line).collect();
    let body = json!({"prompt": text + "Box 70 holds", "n_predict": 4, "temperature": 0, "n_probs": 10});
    let answer = server.complete(&body);
    let best = answer["completion_probabilities"][0]["top_logprobs"].as_array().expect("the best").iter();
    Some(best.map(|p| (p["id"].as_u64().expect("an id"), p["logprob"].as_f64().expect("a number"))).collect())
}

/// The largest difference of the log-probabilities of tokens that are among the best of both.
fn furthest(a: &[(u64, f64)], b: &[(u64, f64)]) -> f64 {
    let found = a.iter().filter_map(|(id, p)| Some((p - b.iter().find(|other| other.0 == *id)?.1).abs()));
    found.fold(0.0, f64::max)
}

#[test]
fn kvarn4_on_a_real_model_is_close_to_f16_and_the_same_in_any_batch_size() {
    let Some(exact) = best_of_real(&[]) else { return };
    let with = |batch| {
        let codecs = ["--cache-type-k", "kvarn4", "--cache-type-v", "kvarn4"];
        best_of_real(&[&codecs[..], &["--cache-stage-tokens", "128", "--batch-size", batch]].concat()).expect("a model")
    };
    let (small, large) = (with("96"), with("512"));
    let apart = furthest(&small, &large);
    assert!(apart < 0.1, "batch sizes differ by {apart}: {small:?} {large:?}");
    let lost = furthest(&exact, &large);
    assert!(lost < 0.6 && exact[0].0 == large[0].0, "{lost}: {exact:?} {large:?}");
}
