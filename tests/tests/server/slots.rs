//! Saving, erasing and restoring slots.

use std::path::Path;

use opencoti_tests::server::{Reply, Server, Site, prompt, text};
use serde_json::{Value, json};

fn with_files(folder: &Path, more: &[&str]) -> Server {
    let folder = text(folder);
    let fixed = ["--parallel", "1", "--ctx-size", "1024", "--slot-save-path", &folder];
    Server::start(&[&fixed[..], more].concat())
}

/// Tiny models whose sequences can't be shared at any token: sliding windows.
const UNSHAREABLE: [&str; 1] = ["gemma3.gguf"];

/// A server with such a model.
fn unshareable(fixture: &str, folder: &Path) -> Server {
    let folder = text(folder);
    Server::at(Site::with_fixture(fixture), &["--parallel", "2", "--ctx-size", "256", "--slot-save-path", &folder])
}

fn act(server: &Server, slot: &str, action: &str, body: Value) -> Reply {
    server.post(&format!("/slots/{slot}?action={action}"), &body)
}

fn cached(server: &Server, prompt: &[u32]) -> u64 {
    let answer = server.complete(&json!({"prompt": prompt, "n_predict": 1, "temperature": 0}));
    answer["timings"]["cache_n"].as_u64().expect("a count")
}

#[test]
fn a_saved_slot_comes_back_after_it_was_erased_and_in_another_server() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = prompt(1, 200);
    let file = json!({"filename": "state.bin"});
    let server = with_files(folder.path(), &[]);
    let before = server.complete(&json!({"prompt": prompt, "n_predict": 20, "temperature": 0, "ignore_eos": true}));

    let saved = act(&server, "0", "save", file.clone()).ok();
    assert_eq!(saved["n_saved"], 219, "the prompt and what was fed back: {saved}");
    assert_eq!(saved["n_written"], folder.path().join("state.bin").metadata().unwrap().len());
    assert_eq!(act(&server, "0", "erase", json!({})).ok()["n_erased"], 219);
    assert_eq!(server.metric("opencoti_kv_cells_used"), 0.0, "erasing frees every page");
    let nothing = act(&server, "0", "save", json!({"filename": "nothing.bin"}));
    assert_eq!(nothing.status, 404, "{}", nothing.body);

    assert_eq!(act(&server, "0", "restore", file.clone()).ok()["n_restored"], 219);
    assert_eq!(cached(&server, &prompt), 199);
    drop(server);

    let server = with_files(folder.path(), &[]);
    act(&server, "0", "restore", file).ok();
    let again = server.complete(&json!({"prompt": prompt, "n_predict": 20, "temperature": 0, "ignore_eos": true}));
    assert_eq!((&again["timings"]["cache_n"], &again["content"]), (&json!(199), &before["content"]));
}

#[test]
fn files_that_do_not_fit_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = prompt(1, 150);
    let server = with_files(folder.path(), &[]);
    cached(&server, &prompt);
    act(&server, "0", "save", json!({"filename": "good.bin"})).ok();

    let refused = |server: &Server, name: &str, status: u16, parts: &[&str]| {
        let reply = act(server, "0", "restore", json!({"filename": name}));
        assert_eq!(reply.status, status, "{name}: {}", reply.body);
        let message = reply.message();
        assert!(message.contains(name) && parts.iter().all(|part| message.contains(part)), "{name}: {message}");
    };
    let good = std::fs::read(folder.path().join("good.bin")).unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    let mut damaged = good.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    write("damaged.bin", &damaged);
    write("short.bin", &good[..good.len() - 100]);
    write("text.bin", b"not a state");
    refused(&server, "damaged.bin", 400, &["damaged"]);
    refused(&server, "short.bin", 400, &["bytes long, expected"]);
    refused(&server, "text.bin", 400, &["no state file"]);
    refused(&server, "nowhere.bin", 404, &[]);
    for name in ["nowhere.bin", "text.bin"] {
        let reply = act(&server, "0", "restore", json!({"filename": name}));
        assert!(!reply.message().contains(&text(folder.path())), "{}", reply.message());
    }
    // A refusal changes nothing.
    assert_eq!(cached(&server, &prompt), 149);
    drop(server);

    let other = with_files(folder.path(), &["--cache-type-k", "q8_0"]);
    refused(&other, "good.bin", 400, &["f16", "q8_0"]);
    other.answers();
}

#[test]
fn names_that_leave_the_folder_and_slots_that_are_not_there_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let server = with_files(folder.path(), &[]);
    cached(&server, &prompt(1, 10));
    for name in ["../state.bin", "a/b", "a\\b", "..", ""] {
        let reply = act(&server, "0", "save", json!({"filename": name}));
        assert_eq!((reply.status, &reply.body["error"]["param"]), (400, &json!("filename")), "{name}: {}", reply.body);
    }
    for slot in ["1", "-1", "x"] {
        assert_eq!(act(&server, slot, "erase", json!({})).status, 400, "slot {slot}");
    }
    assert_eq!(act(&server, "0", "explode", json!({})).status, 400);
    assert_eq!(folder.path().read_dir().unwrap().count(), 0, "nothing was written");
    let without = Server::start(&[]);
    assert_eq!(act(&without, "0", "erase", json!({})).status, 501);
}

#[test]
fn a_prompt_is_reused_at_its_snapshots_before_and_after_a_restore() {
    for fixture in UNSHAREABLE {
        let folder = tempfile::tempdir().unwrap();
        let file = json!({"filename": "state.bin"});
        let ask = json!({"prompt": prompt(1, 60), "n_predict": 150, "temperature": 0, "ignore_eos": true});
        let server = unshareable(fixture, folder.path());
        let first = server.complete(&ask);
        assert_eq!(first["timings"]["cache_n"], 0, "{fixture}");
        // The window has left the prompt, and the state is that of the answer's end.
        let again = server.complete(&ask);
        assert_eq!((&again["timings"]["cache_n"], &again["content"]), (&json!(59), &first["content"]), "{fixture}");
        let slot = first["id_slot"].to_string();
        act(&server, &slot, "save", file.clone()).ok();
        drop(server);

        let server = unshareable(fixture, folder.path());
        assert_eq!(act(&server, "1", "restore", file).ok()["n_restored"], 209, "{fixture}");
        let again = server.complete(&ask);
        assert_eq!((&again["timings"]["cache_n"], &again["content"]), (&json!(59), &first["content"]), "{fixture}");
        let props = server.get("/props").ok();
        let kv = &props["opencoti"]["kv"]["effective"];
        assert!(kv["n_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{kv}");
    }
}

#[test]
fn prompts_with_a_common_beginning_share_its_snapshot() {
    for fixture in UNSHAREABLE {
        let folder = tempfile::tempdir().unwrap();
        let server = unshareable(fixture, folder.path());
        let found: Vec<u64> =
            (10..13).map(|tail| cached(&server, &[prompt(1, 100), prompt(tail, 50)].concat())).collect();
        // The second one says where the snapshot is worth having.
        assert!(found[..2] == [0, 0] && found[2] >= 100, "{fixture}: {found:?}");
    }
}
