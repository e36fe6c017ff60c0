//! The command line: what it prints, what it refuses.

use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

use opencoti_tests::server::{Server, Site, opencoti, refusal, run, text};
use serde_json::Value;

#[track_caller]
fn stdout(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn check_names_the_nearest_key_of_an_unknown_one() {
    let site = Site::new("[engine]\nparalell = 2\n");
    let sentence = refusal(&site.run("check", &[]));
    assert!(sentence.contains("`engine.paralell`") && sentence.contains("`engine.parallel`"), "{sentence}");
    let sentence = refusal(&site.run("serve", &[]));
    assert!(sentence.contains("`engine.parallel`"), "{sentence}");
}

#[test]
fn check_says_what_would_be_loaded_and_leaves_no_trace() {
    let site = Site::new("[engine]\nctx_size = 512\n");
    let said = stdout(site.run("check", &[]));
    for part in ["kv-scalar", "residency-resident", "admission-gate", "tiny (llama", "512 tokens a sequence", "valid"] {
        assert!(said.contains(part), "{part} is missing in\n{said}");
    }
    let sentence = refusal(&site.run("check", &["--ctx-size", "20000"]));
    assert!(sentence.contains("engine.ctx_size") && sentence.contains("16384"), "{sentence}");
    let sentence = refusal(&run(&["check", "--model", "nowhere.gguf", "--plugin-cache", &text(&site.path("plugins"))]));
    assert!(sentence.contains("nowhere.gguf"), "{sentence}");
}

#[test]
fn a_model_that_is_damaged_is_refused_by_name() {
    let site = Site::new("");
    let whole = std::fs::read(site.path("tiny.gguf")).expect("the model");
    for (bytes, part) in [(&whole[..whole.len() / 2], "tiny.gguf"), (&b"not a model"[..], "tiny.gguf")] {
        std::fs::write(site.path("tiny.gguf"), bytes).expect("written");
        for task in ["check", "serve"] {
            let sentence = refusal(&site.run(task, &[]));
            assert!(sentence.contains(part), "{task}: {sentence}");
        }
        let sentence = refusal(&run(&["model", &text(&site.path("tiny.gguf"))]));
        assert!(sentence.contains(part), "{sentence}");
    }
}

#[test]
fn help_config_prints_the_committed_reference() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/config.md");
    let committed = std::fs::read_to_string(page).expect("the reference page");
    assert_eq!(stdout(run(&["help-config"])), committed);
    // The example is a config that the program takes.
    let site = Site::new("");
    site.configure(&stdout(run(&["help-config", "--example", "--model", &text(&site.path("tiny.gguf"))])));
    stdout(site.run("check", &[]));
}

#[test]
fn model_tells_sizes_and_what_kv_costs() {
    let site = Site::new("");
    let file = text(&site.path("tiny.gguf"));
    let cache = text(&site.path("plugins"));
    let told: Value =
        serde_json::from_str(&stdout(run(&["model", &file, "--json", "--plugin-cache", &cache]))).unwrap();
    assert_eq!((&told["name"], &told["architecture"]), (&"tiny".into(), &"llama".into()));
    assert_eq!((&told["layers"], &told["context"], &told["vocabulary"]), (&2.into(), &16384.into(), &265.into()));
    // Two layers, two heads of 32 values, K and V, two bytes each.
    assert_eq!(told["kv_bytes_per_token"]["f16"], 512.0);
    let q4 = told["kv_bytes_per_token"]["q4_0"].as_f64().expect("a cost");
    assert_eq!(q4, 512.0 * 4.5 / 16.0);
    assert!(stdout(run(&["model", &file, "--plugin-cache", &cache])).contains("chat template"));
}

#[test]
fn the_command_and_the_route_show_the_same_plugins() {
    let server = Server::start(&["--ctx-size", "256"]);
    let facts = |text: &str| -> Vec<[Value; 4]> {
        let list: Value = serde_json::from_str(text).expect("JSON");
        let plugins = list.as_array().expect("a list").iter();
        plugins.map(|p| ["name", "version", "sha256", "codecs"].map(|key| p[key].clone())).collect()
    };
    let listed = facts(&stdout(server.site().run("plugins", &["--json"])));
    let shown = facts(&server.get("/plugins").ok().to_string());
    assert_eq!(listed, shown);
    let names: Vec<_> = listed.iter().map(|p| p[0].as_str().unwrap_or_default()).collect();
    assert_eq!(names, ["kv-scalar", "kv-turbo", "kv-tcq", "kv-kvarn", "residency-resident", "admission-gate"]);
}

#[test]
fn chat_answers_what_is_piped_into_it() {
    // An answer goes on to the context's end, so that only a cleared conversation has room for the next one.
    let server = Server::start(&["--ctx-size", "128", "--parallel", "1"]);
    let chat = |lines: &str, url: &str| {
        let mut command = opencoti(&["chat", "--url", url, "--system", "be brief"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().expect("its input").write_all(lines.as_bytes()).expect("the lines are sent");
        child.wait_with_output().expect("it ends")
    };
    let said = stdout(chat("the inn\n/bogus\n/clear\nanother\n/quit\nnot read\n", &server.url()));
    assert!(said.contains("`/bogus` is no command"), "{said}");
    assert_eq!(server.metric("llamacpp:ttft_seconds_count"), 2.0, "two answers: {said}");
    // The end of the input ends it, too.
    stdout(chat("the inn\n", &server.url()));
    // A server that is not there is an error of that message alone.
    let output = chat("the inn\n", "http://127.0.0.1:1");
    assert!(String::from_utf8_lossy(&output.stderr).contains("no server answers at http://127.0.0.1:1"));
}

#[test]
fn shutdown_ends_the_process_with_success_and_what_runs_with_an_answer() {
    let server = Server::start(&["--ctx-size", "16384", "--parallel", "1"]);
    let body = serde_json::json!({"prompt": "the inn", "n_predict": 300, "ignore_eos": true});
    let mut running = server.stream("/completion", &body);
    running.next().expect("a token");
    let status = std::thread::scope(|scope| {
        let ending = scope.spawn(|| running.last().expect("an end"));
        let status = server.shut_down();
        assert_eq!(ending.join().expect("the client")["tokens_predicted"], 300, "it may finish");
        status
    });
    assert!(status.success(), "{status}");
}
