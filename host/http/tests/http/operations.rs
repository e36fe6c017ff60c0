//! Models, props, slots, metrics, plugins, cancelling, the OpenAPI document.

use std::sync::Arc;

use opencoti_engine::api::StopReason;
use opencoti_http::ServerConfig;
use serde_json::{Value, json};

use crate::fake::{Script, Step, TestServer, config, engine, info, plugins, says, started, token};

fn ok() -> Script {
    says(&["ok"], StopReason::Eos)
}

async fn json_of(server: &TestServer, path: &str) -> Value {
    let response = server.get(path).await;
    assert_eq!(response.status(), 200, "{path}");
    response.json().await.expect("JSON")
}

#[tokio::test]
async fn models_describe_the_model() {
    let server = TestServer::with(ServerConfig { aliases: vec!["small".to_owned()], ..config() }, ok()).await;
    for path in ["/v1/models", "/models"] {
        let list = json_of(&server, path).await;
        let model = &list["data"][0];
        assert_eq!(
            (&list["object"], &model["id"], &model["object"]),
            (&json!("list"), &json!("tiny"), &json!("model"))
        );
        assert_eq!((&model["owned_by"], &model["aliases"]), (&json!("opencoti"), &json!(["small"])));
        assert_eq!((&model["meta"]["n_ctx"], &model["meta"]["ftype"]), (&json!(512), &json!("Q4_1")));
        assert_eq!(list["models"][0]["details"]["parameter_size"], "135M");
        assert_eq!(&json_of(&server, "/v1/models/small").await, model);
    }
    assert_eq!(server.get("/v1/models/other").await.status(), 404);
}

#[tokio::test]
async fn props_say_what_is_in_effect() {
    let server = TestServer::new(ok()).await;
    let props = json_of(&server, "/props").await;
    assert_eq!(props["default_generation_settings"]["n_ctx"], 512);
    let temperature = props["default_generation_settings"]["params"]["temperature"].as_f64().expect("a number");
    assert!((temperature - 0.8).abs() < 1e-6);
    assert_eq!(
        (&props["total_slots"], &props["bos_token"], &props["eos_token"]),
        (&json!(4), &json!("<s>"), &json!("</s>"))
    );
    assert!(props["chat_template"].as_str().is_some_and(|template| template.contains("m.role")));
    let kv = &props["opencoti"]["kv"]["effective"];
    assert_eq!((&kv["n_cells"], &kv["type_k"], &kv["fully_resident"]), (&json!(2048), &json!("q8_0"), &json!(true)));
    assert_eq!((&kv["stores"][0]["name"], &kv["stores"][0]["n_layers"]), (&json!("kv"), &json!(30)));
    let residency = json!({"kv_residency_mode": "resident", "policy": "residency-resident"});
    assert_eq!(props["opencoti"]["residency"], residency);
    assert_eq!(props["default_generation_settings"]["params"]["n_predict"], -1);
    let caps = &props["chat_template_caps"];
    assert_eq!((&caps["supports_system_role"], &caps["supports_tools"]), (&json!(true), &json!(false)));
    assert_eq!((&caps["supports_thinking"], &caps["supports_string_content"]), (&json!(true), &json!(true)));
    assert_eq!(props["endpoint_metrics"], false);
    server.error("/props", json!({}), 501).await;
    let open = TestServer::with(ServerConfig { props: true, ..config() }, ok()).await;
    open.ok("/props", json!({})).await;
    assert_eq!(open.error("/props", json!({"n_ctx": 5}), 400).await["param"], "n_ctx");
}

#[tokio::test]
async fn slots_show_their_work() {
    let server = TestServer::new(ok()).await;
    let slots = json_of(&server, "/slots?fail_on_no_slot=1").await;
    assert_eq!(slots.as_array().map(Vec::len), Some(4));
    assert_eq!((&slots[0]["is_processing"], &slots[1]["is_processing"]), (&json!(true), &json!(false)));
    assert_eq!(
        slots[0]["next_token"],
        json!([{"has_next_token": true, "has_new_line": true, "n_remain": 5, "n_decoded": 3}])
    );
    assert_eq!(slots[0]["params"]["top_k"], 40);
    assert!(slots[1].get("id_task").is_none() && slots[0]["id_task"] == 9);
    assert_eq!(slots[1]["opencoti"]["session_id"], "s");
    let closed = TestServer::with(ServerConfig { slots: false, ..config() }, ok()).await;
    assert_eq!(closed.get("/slots").await.status(), 501);
    let mut full = TestServer::loading(config()).await;
    let (handle, log) = engine(info(), ok(), true);
    full.control.set_ready(handle, Arc::new(plugins));
    full.log = log;
    assert_eq!(full.get("/slots?fail_on_no_slot=1").await.status(), 503);
    assert_eq!(full.get("/slots").await.status(), 200);
}

#[tokio::test]
async fn slots_are_saved_restored_and_erased_in_their_folder_only() {
    let closed = TestServer::new(ok()).await;
    closed.error("/slots/0?action=save", json!({"filename": "a"}), 501).await;
    let folder = tempfile::tempdir().expect("a folder");
    let config = ServerConfig { slot_save_path: Some(folder.path().to_owned()), ..config() };
    let server = TestServer::with(config, ok()).await;
    let saved = server.ok("/slots/1?action=save", json!({"filename": "a.bin"})).await;
    let expected =
        json!({"id_slot": 1, "filename": "a.bin", "n_saved": 84, "n_written": 4096, "timings": {"save_ms": 1.5}});
    assert_eq!(saved, expected);
    let restored = server.ok("/slots/1?action=restore", json!({"filename": "a.bin"})).await;
    assert_eq!(
        (&restored["n_restored"], &restored["n_read"], &restored["timings"]["restore_ms"]),
        (&json!(84), &json!(4096), &json!(1.5))
    );
    assert_eq!(server.ok("/slots/1?action=erase", json!({})).await, json!({"id_slot": 1, "n_erased": 84}));
    let files = server.log.files.lock().expect("the log").clone();
    assert_eq!(files, vec![folder.path().join("a.bin"); 2]);
    for (path, body, param) in [
        ("/slots/1?action=save", json!({"filename": "../a"}), json!("filename")),
        ("/slots/1?action=save", json!({"filename": "a/b"}), json!("filename")),
        ("/slots/1?action=save", json!({"filename": 5}), json!("filename")),
        ("/slots/1?action=save", json!({}), json!("filename")),
        ("/slots/1?action=burn", json!({}), json!("action")),
        ("/slots/1", json!({}), json!("action")),
        ("/slots/9?action=erase", json!({}), Value::Null),
        ("/slots/x?action=erase", json!({}), Value::Null),
    ] {
        assert_eq!(server.error(path, body, 400).await["param"], param, "{path}");
    }
}

#[tokio::test]
async fn metrics_have_our_names_and_llama_cpps() {
    let closed = TestServer::new(ok()).await;
    assert_eq!(closed.get("/metrics").await.status(), 501);
    let recorder = opencoti_http::metrics::install().expect("the only recorder of this process");
    let server = TestServer::with(ServerConfig { metrics: Some(recorder), ..config() }, ok()).await;
    server.ok("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "hi"}]})).await;
    metrics::counter!("llamacpp:prompt_tokens_total").increment(3);
    metrics::histogram!("llamacpp:inter_token_seconds").record(0.004);
    let response = server.get("/metrics").await;
    assert!(response.headers()["content-type"].to_str().expect("text").starts_with("text/plain; version=0.0.4"));
    assert!(response.headers()["process-start-time-unix"].to_str().expect("text").parse::<u64>().is_ok());
    let text = response.text().await.expect("text");
    for line in [
        "opencoti_kv_cells_used{store=\"kv\"} 100",
        "opencoti_requests_deferred 2",
        "llamacpp:prompt_tokens_total 3",
        "llamacpp:inter_token_seconds_bucket{le=\"0.005\"} 1",
        "opencoti_http_requests_total{route=\"/v1/chat/completions\",status=\"200\"}",
        "opencoti_plugin_healthy{plugin=\"gate\",version=\"1.1.0\"} 0",
        "opencoti_plugin_healthy{plugin=\"kv-scalar\",version=\"1.0.0\"} 1",
    ] {
        assert!(text.lines().any(|found| found.starts_with(line)), "{line} is missing in\n{text}");
    }
}

#[tokio::test]
async fn plugins_are_listed_and_found_by_name() {
    let server = TestServer::new(ok()).await;
    assert_eq!(json_of(&server, "/plugins").await, plugins());
    assert_eq!(json_of(&server, "/plugins/gate").await["version"], "1.1.0");
    assert_eq!(server.get("/plugins/none").await.status(), 404);
}

#[tokio::test]
async fn a_request_is_cancelled_by_its_id() {
    let script: Script =
        Arc::new(|request| vec![Step::Say(started(0)), Step::Say(token(0, "a", request, 1)), Step::Hang]);
    let server = TestServer::new(script).await;
    let chat = |stream: bool, id: &'static str| {
        let url = format!("{}/v1/chat/completions", server.base);
        let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": stream});
        tokio::spawn(server.client.post(url).header("X-Request-Id", id).json(&body).send())
    };
    let cancel = |id: &'static str| server.ok(["/v1/requests/", id, "/cancel"].concat().leak(), json!({}));
    let whole = chat(false, "whole");
    server.log.wait_requests(1).await;
    assert_eq!(cancel("whole").await, json!({"id": "whole", "object": "request.cancel", "cancelled": true}));
    let answer = whole.await.expect("no panic").expect("an answer");
    assert_eq!(answer.status(), 499);
    assert_eq!(answer.json::<Value>().await.expect("JSON")["error"]["type"], "cancelled_error");

    let streamed = chat(true, "streamed").await.expect("no panic").expect("an answer");
    assert_eq!(streamed.headers()["x-request-id"], "streamed");
    assert_eq!(cancel("streamed").await["cancelled"], true);
    let text = streamed.text().await.expect("the rest");
    assert!(text.contains("cancelled_error") && !text.contains("[DONE]"), "{text}");
    assert_eq!(cancel("streamed").await["cancelled"], false, "it is not there any more");
    assert_eq!(cancel("never").await["cancelled"], false);
}

#[tokio::test]
async fn the_document_is_served_and_names_the_prefix() {
    let server = TestServer::with(ServerConfig { api_prefix: "/llm".to_owned(), ..config() }, ok()).await;
    let document = json_of(&server, "/openapi.json").await;
    assert_eq!(document["servers"][0]["url"], "/llm");
    let chat = &document["paths"]["/v1/chat/completions"]["post"];
    assert_eq!(
        chat["requestBody"]["content"]["application/json"]["schema"]["$ref"],
        "#/components/schemas/ChatRequest"
    );
    let schema = document["components"]["schemas"]["SamplingFields"]["properties"]["temperature"].to_string();
    assert!(schema.contains("number"), "{schema}");
}
