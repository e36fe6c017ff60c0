//! Bad plugins under a running server: what panics is quarantined and the server goes on; what can't be loaded is named.

use std::path::Path;

use opencoti_tests::plugins::{compile_c, plugin};
use opencoti_tests::server::{Server, Site, prompt, refusal, run, text};
use serde_json::json;

const F32: [&str; 8] = ["--cache-type-k", "f32", "--cache-type-v", "f32", "--ctx-size", "512", "--parallel", "2"];

/// A config with `faulty` alone, which has one of its own.
fn faulty(config: &str) -> String {
    format!("[[plugin]]\nname = 'faulty'\npath = '{}'\nconfig = {config}\n", plugin("faulty").display())
}

/// A server with the codec `f32` of `faulty`.
fn with_faulty(config: &str) -> Server {
    Server::with_config(&faulty(config), &F32)
}

fn generate(server: &Server, seed: usize) -> opencoti_tests::server::Reply {
    server.post("/completion", &json!({"prompt": prompt(seed, 20), "n_predict": 5, "ignore_eos": true}))
}

#[test]
fn a_codec_without_a_fault_serves() {
    let server = with_faulty("{}");
    assert_eq!(generate(&server, 1).ok()["tokens_predicted"], 5);
    assert_eq!(server.plugin("faulty")["state"], "active");
}

#[test]
fn a_codec_that_panics_is_quarantined_and_the_server_goes_on() {
    for entry in ["append", "prepare_query", "score", "accumulate"] {
        let server = with_faulty(&format!("{{ panic_in = '{entry}' }}"));
        let failed = generate(&server, 1);
        assert_eq!(failed.status, 500, "{entry}: {}", failed.body);
        let message = failed.message();
        assert!(message.contains("faulty") && message.contains("panicked"), "{entry}: {message}");

        let shown = server.plugin("faulty");
        assert_eq!(shown["state"], "quarantined", "{entry}: {shown}");
        assert!(shown["reason"].as_str().is_some_and(|r| r.contains(entry)), "{entry}: {shown}");
        assert_eq!(server.metric("opencoti_plugin_healthy"), 0.0);
        server.answers();

        // Nothing calls it any more, and everybody hears why before anything is computed.
        for seed in 2..4 {
            let refused = generate(&server, seed);
            assert_eq!(refused.status, 503, "{entry}: {}", refused.body);
            let message = refused.message();
            assert!(message.contains("`faulty` is in quarantine"), "{entry}: {message}");
        }
        let refused = server.post("/v1/embeddings", &json!({"input": "the end"}));
        assert_eq!(refused.status, 503, "{entry}: {}", refused.body);
        server.wait_until_idle();
        server.answers();
    }
}

#[test]
fn a_codec_that_panics_in_the_middle_of_an_answer_ends_its_stream_with_an_error() {
    // Two layers, two sides, two heads: the prompt and a few tokens pass.
    let server = with_faulty("{ panic_in = 'append', after = 60 }");
    let body = json!({"prompt": prompt(1, 5), "n_predict": 200, "ignore_eos": true});
    let events: Vec<_> = server.stream("/completion", &body).collect();
    assert!(events.len() > 1, "some tokens came before it: {events:?}");
    let last = events.last().expect("events");
    let message = last["error"]["message"].as_str().unwrap_or_else(|| panic!("no error at the end: {last}"));
    assert!(message.contains("faulty"), "{message}");
    assert_eq!(server.plugin("faulty")["state"], "quarantined");
    server.answers();
}

#[test]
fn a_codec_that_reports_an_error_fails_the_request_and_is_not_quarantined() {
    let server = with_faulty("{ error_in = 'append' }");
    let failed = generate(&server, 1);
    assert_eq!(failed.status, 500, "{}", failed.body);
    assert!(failed.message().contains("asked to fail in append"), "{}", failed.message());
    let shown = server.plugin("faulty");
    assert_eq!(shown["state"], "active", "{shown}");
    assert!(shown["failures"].as_u64().is_some_and(|n| n > 0), "{shown}");
    server.answers();
}

#[test]
fn a_plugin_that_panics_at_the_start_is_refused_by_name() {
    for entry in ["create", "codecs", "open", "layout", "query_bytes"] {
        let site = Site::new(&faulty(&format!("{{ panic_in = '{entry}' }}")));
        for task in ["check", "serve"] {
            let sentence = refusal(&site.run(task, &F32));
            let said = sentence.contains("plugin `faulty`") && sentence.contains(&format!("panic in {entry}"));
            assert!(said, "{entry}, {task}: {sentence}");
        }
    }
}

#[test]
fn a_plugin_that_panics_at_the_end_harms_no_shutdown() {
    for entry in ["close", "destroy"] {
        let server = with_faulty(&format!("{{ panic_in = '{entry}' }}"));
        generate(&server, 1).ok();
        let status = server.shut_down();
        assert!(status.success(), "{entry}: {status}");
    }
}

#[test]
fn the_built_in_rule_decides_for_an_admission_policy_that_panics() {
    let path = plugin("faulty-admission");
    let config =
        format!("[[plugin]]\nname = 'kv-scalar'\n[[plugin]]\nname = 'faulty-admission'\npath = '{}'\n", path.display());
    let server = Server::with_config(&config, &["--ctx-size", "1024", "--parallel", "1", "--cache-tokens", "256"]);
    for seed in 0..3 {
        assert_eq!(generate(&server, seed).ok()["tokens_predicted"], 5);
    }
    let refused = server.post("/completion", &json!({"prompt": prompt(5, 300), "n_predict": 100}));
    assert_eq!(refused.status, 429, "the built-in rule refuses: {}", refused.body);
    let shown = server.plugin("faulty-admission");
    assert_eq!((&shown["state"], &shown["failures"]), (&json!("quarantined"), &json!(1)), "{shown}");
    assert!(shown["reason"].as_str().is_some_and(|r| r.contains("asked to panic in decide")), "{shown}");
    server.answers();
}

#[test]
fn a_plugin_that_can_not_be_loaded_is_refused_in_one_sentence_wherever_it_is_named() {
    let site = Site::new("");
    let c_codec = |name: &str, flags: &[&str]| {
        compile_c("codec.c", flags, &site.path(name)).expect("the fixture compiles");
        site.path(name)
    };
    std::fs::write(site.path("text.so"), "#!/bin/sh\n").expect("written");
    for (path, part) in [
        (site.path("text.so"), "is not a shared library"),
        (c_codec("layout.so", &["-DFIXTURE_LAYOUT"]), "another layout of the plugin API"),
        (c_codec("version.so", &["-DFIXTURE_MAJOR=2"]), "was built for plugin API 2.0.0, expected 1.x"),
        (site.path("missing.so"), "does not exist"),
    ] {
        let names_it = |sentence: &str| sentence.contains(&*text(&path)) && sentence.contains(part);
        site.configure(&format!("[[plugin]]\nname = 'c-codec'\npath = '{}'\n", path.display()));
        for task in ["check", "serve"] {
            let sentence = refusal(&site.run(task, &[]));
            assert!(names_it(&sentence), "{task}: {sentence}");
        }
        let sentence = refusal(&run(&["plugins", &text(&path), "--plugin-cache", &text(&site.path("plugins"))]));
        assert!(names_it(&sentence), "plugins FILE: {sentence}");
    }
    // The next start is not harmed by what was refused.
    refused_nothing(&site.path("good.so"));
}

fn refused_nothing(path: &Path) {
    compile_c("codec.c", &[], path).expect("the fixture compiles");
    let config = format!("[[plugin]]\nname = 'c-codec'\npath = '{}'\n", path.display());
    let server =
        Server::with_config(&config, &["--cache-type-k", "c-f32", "--cache-type-v", "c-f32", "--ctx-size", "256"]);
    assert_eq!(generate(&server, 1).ok()["tokens_predicted"], 5, "a codec in C serves");
}

#[test]
fn plugins_that_the_config_can_not_have_are_refused_in_one_sentence() {
    for (config, parts) in [
        ("[[plugin]]\nname = 'nobody'\n", &["nobody"][..]),
        ("[[plugin]]\nname = 'kv-scalar'\nversion = '^7'\n", &["kv-scalar", "^7"]),
        ("[[plugin]]\nname = 'kv-scalar'\nsha256 = '00'\n", &["sha256"]),
        ("[[plugin]]\nname = 'residency-resident'\n", &["kv.k", "f16"]),
    ] {
        let sentence = refusal(&Site::new(config).run("check", &[]));
        assert!(parts.iter().all(|part| sentence.contains(part)), "{config}: {sentence}");
    }
}
