//! Each scalar codec, for keys and values, with and without rotation, under a running server.

use opencoti_tests::server::{Server, prompt};
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
    use opencoti_tests::server::{Site, refusal};
    let site = Site::new("");
    let sentence = refusal(&site.run("check", &["--cache-type-k", "q3_9"]));
    assert!(sentence.contains("kv.k") && sentence.contains("q3_9"), "{sentence}");
    let site = Site::new("[kv.k_options]\nrotatoin = 'hadamard'\n");
    let sentence = refusal(&site.run("check", &[]));
    assert!(sentence.contains("rotatoin"), "{sentence}");
}
