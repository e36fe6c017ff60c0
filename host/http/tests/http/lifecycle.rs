//! From listening to the end, keys, CORS, paths.

use std::sync::Arc;
use std::time::Duration;

use opencoti_engine::api::StopReason;
use opencoti_http::{Cors, CorsOrigins, Listen, Server, ServerConfig};
use serde_json::{Value, json};

use crate::fake::{Step, TestServer, config, engine, info, plugins, says, started};

const CHAT: &str = "/v1/chat/completions";

fn hello() -> Value {
    json!({"messages": [{"role": "user", "content": "hi"}]})
}

#[tokio::test]
async fn a_server_answers_503_while_the_model_loads_and_after_it_failed() {
    let server = TestServer::loading(config()).await;
    server.control.set_progress(0.25);
    for path in ["/health", "/v1/models", "/props"] {
        let response = server.get(path).await;
        assert_eq!(response.status(), 503, "{path}");
        let body: Value = response.json().await.expect("JSON");
        let expected = json!({"error": {
            "code": 503, "message": "Loading model", "type": "unavailable_error", "param": null, "progress": 0.25}});
        assert_eq!(body, expected, "{path}");
    }
    server.error(CHAT, hello(), 503).await;
    server.control.set_failed("tiny.gguf: not a GGUF file");
    let error = server.error(CHAT, hello(), 503).await;
    assert!(error["message"].as_str().is_some_and(|message| message.contains("tiny.gguf: not a GGUF file")), "{error}");
    let (handle, _) = engine(info(), says(&["ok"], StopReason::Eos), false);
    server.control.set_ready(handle, Arc::new(plugins));
    assert_eq!(
        server.get("/health").await.json::<Value>().await.expect("JSON"),
        json!({"status": "ok", "features": {}})
    );
    server.ok(CHAT, hello()).await;
}

#[tokio::test]
async fn every_answer_names_the_server_and_the_request() {
    let server = TestServer::new(says(&["ok"], StopReason::Eos)).await;
    for path in ["/health", "/nothing"] {
        let response = server.get(path).await;
        assert_eq!(response.headers()["server"], "opencoti");
        assert!(response.headers()["x-request-id"].to_str().expect("text").starts_with("req_"));
    }
    let own = server.client.get(format!("{}/health", server.base)).header("X-Request-Id", "mine-1").send().await;
    assert_eq!(own.expect("an answer").headers()["x-request-id"], "mine-1");
    let odd = server.client.get(format!("{}/health", server.base)).header("X-Request-Id", "a b/c").send().await;
    assert!(odd.expect("an answer").headers()["x-request-id"].to_str().expect("text").starts_with("req_"));
}

#[tokio::test]
async fn a_path_or_method_that_does_not_exist_is_told_so() {
    let server = TestServer::new(says(&["ok"], StopReason::Eos)).await;
    for path in ["/nothing", "/v1/message", "/v1/response", "/polykv/pool", "/slots/1/2"] {
        let response = server.get(path).await;
        assert_eq!(response.status(), 404, "{path}");
        let expected =
            json!({"error": {"message": "File Not Found", "type": "not_found_error", "code": 404, "param": null}});
        assert_eq!(response.json::<Value>().await.expect("JSON"), expected, "{path}");
    }
    let response = server.get(CHAT).await;
    assert_eq!(response.status(), 405);
    assert!(response.headers()["allow"].to_str().expect("text").contains("POST"));
}

#[tokio::test]
async fn a_prefix_moves_every_route() {
    let server =
        TestServer::with(ServerConfig { api_prefix: "/llm".to_owned(), ..config() }, says(&["ok"], StopReason::Eos))
            .await;
    assert_eq!(server.get("/health").await.status(), 200);
    server.ok(CHAT, hello()).await;
    let root = server.base.trim_end_matches("/llm");
    assert_eq!(server.client.get(format!("{root}/health")).send().await.expect("an answer").status(), 404);
    for wrong in ["llm", "/a{b}", "/a b"] {
        let bound = Server::bind(ServerConfig { api_prefix: wrong.to_owned(), ..config() }).await;
        assert!(bound.is_err(), "{wrong}");
    }
}

#[tokio::test]
async fn keys_open_all_but_the_public_routes() {
    let keys = vec!["first".to_owned(), "second".to_owned()];
    let server = TestServer::with(ServerConfig { api_keys: keys, ..config() }, says(&["ok"], StopReason::Eos)).await;
    for path in ["/health", "/v1/health", "/models", "/v1/models"] {
        assert_eq!(server.get(path).await.status(), 200, "{path}");
    }
    for path in ["/props", "/slots", "/plugins", "/openapi.json", "/nothing"] {
        let response = server.get(path).await;
        assert_eq!(response.status(), 401, "{path}");
        let expected = json!({"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401, "param": null}});
        assert_eq!(response.json::<Value>().await.expect("JSON"), expected);
    }
    for (name, value, status) in [
        ("Authorization", "Bearer first", 200),
        ("Authorization", "bearer second", 200),
        ("X-Api-Key", "second", 200),
        ("Authorization", "Bearer firs", 401),
        ("Authorization", "Basic first", 401),
        ("Authorization", "first", 401),
        ("X-Api-Key", "", 401),
    ] {
        let url = format!("{}{CHAT}", server.base);
        let response = server.client.post(url).header(name, value).json(&hello()).send().await.expect("an answer");
        assert_eq!(response.status(), status, "{name}: {value}");
    }
}

async fn cors_headers(server: &TestServer, method: reqwest::Method, path: &str, origin: &str) -> reqwest::Response {
    let url = format!("{}{path}", server.base);
    let request = server.client.request(method, url).header("Origin", origin);
    request.header("Access-Control-Request-Headers", "authorization,x-own").send().await.expect("an answer")
}

#[tokio::test]
async fn cors_follows_its_mode() {
    let cors = |origins, credentials| Cors { origins, credentials, ..Cors::default() };
    let list = CorsOrigins::List(vec!["https://a.example".to_owned()]);
    let table = [
        (cors(CorsOrigins::Any, false), "https://a.example", Some("*")),
        (cors(CorsOrigins::Any, true), "https://a.example", Some("https://a.example")),
        (cors(CorsOrigins::Localhost, false), "http://localhost:3000", Some("http://localhost:3000")),
        (cors(CorsOrigins::Localhost, false), "http://[::1]", Some("http://[::1]")),
        (cors(CorsOrigins::Localhost, false), "https://a.example", None),
        (cors(list.clone(), false), "https://a.example", Some("https://a.example")),
        (cors(list, true), "https://b.example", None),
    ];
    for (cors, origin, allowed) in table {
        let credentials = cors.credentials;
        let config = ServerConfig { cors: cors.clone(), api_keys: vec!["k".to_owned()], ..config() };
        let server = TestServer::with(config, says(&["ok"], StopReason::Eos)).await;
        for (method, path) in
            [(reqwest::Method::OPTIONS, CHAT), (reqwest::Method::GET, "/health"), (reqwest::Method::GET, "/props")]
        {
            let response = cors_headers(&server, method.clone(), path, origin).await;
            let headers = response.headers();
            let found = headers.get("access-control-allow-origin").map(|value| value.to_str().expect("text"));
            assert_eq!(found, allowed, "{cors:?} {method} {origin}");
            assert_eq!(headers.contains_key("access-control-allow-credentials"), credentials, "{cors:?}");
            if method == reqwest::Method::OPTIONS {
                assert_eq!(response.status(), 200, "a preflight needs no key");
                assert_eq!(headers["access-control-allow-methods"], "GET, POST, DELETE, OPTIONS");
                assert_eq!(headers["access-control-allow-headers"], "authorization,x-own");
                assert_eq!(response.text().await.expect("a body"), "");
            }
        }
    }
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_and_the_next_is_served() {
    let server = TestServer::with(ServerConfig { body_limit: 1000, ..config() }, says(&["ok"], StopReason::Eos)).await;
    server.error(CHAT, json!({"messages": "x".repeat(2000)}), 413).await;
    server.ok(CHAT, hello()).await;
}

#[tokio::test]
async fn a_body_that_never_comes_times_out() {
    let timeout = Duration::from_millis(100);
    let server =
        TestServer::with(ServerConfig { read_timeout: timeout, ..config() }, says(&["ok"], StopReason::Eos)).await;
    let never = futures::stream::pending::<Result<Vec<u8>, std::io::Error>>();
    let request = server.client.post(format!("{}{CHAT}", server.base)).body(reqwest::Body::wrap_stream(never));
    assert_eq!(request.send().await.expect("an answer").status(), 408);
}

#[tokio::test]
async fn shutdown_is_for_callers_on_this_machine_and_drains() {
    let script: crate::fake::Script = Arc::new(|request| {
        let mut steps = vec![Step::Say(started(0)), Step::Say(crate::fake::token(0, "a", request, 1))];
        steps.push(Step::Pause(Duration::from_millis(300)));
        steps.push(Step::Say(crate::fake::done(0, request, 1, StopReason::Eos)));
        steps
    });
    let server = TestServer::new(script).await;
    let url = format!("{}/shutdown", server.base);
    let proxied = server.client.post(&url).header("X-Forwarded-For", "192.0.2.7").send().await.expect("an answer");
    assert_eq!(proxied.status(), 403);
    let foreign = server.client.post(&url).header("Origin", "https://evil.example").send().await.expect("an answer");
    assert_eq!(foreign.status(), 403);

    let running = server.post(CHAT, hello());
    let stop = async {
        server.log.wait_requests(1).await;
        server.client.post(&url).send().await.expect("an answer").status()
    };
    let (answer, stopped) = tokio::join!(running, stop);
    assert_eq!(stopped, 200);
    assert_eq!(answer.status(), 200, "a running request ends as if nothing had happened");
    let served = tokio::time::timeout(Duration::from_secs(20), server.serving).await.expect("the server ends");
    served.expect("no panic").expect("no error");
    assert!(server.client.get(format!("{}/health", server.base)).send().await.is_err(), "nobody listens any more");
}

#[tokio::test]
async fn a_request_that_does_not_end_is_cut_off_after_the_grace() {
    let config = ServerConfig { shutdown_grace: Duration::from_millis(50), ..config() };
    let server = TestServer::with(config, Arc::new(|_| vec![Step::Hang])).await;
    let client = server.client.clone();
    let url = format!("{}{CHAT}", server.base);
    let hanging =
        tokio::spawn(async move { client.post(url).json(&hello()).send().await.map(|answer| answer.status()) });
    server.log.wait_requests(1).await;
    server.control.shutdown();
    let served = tokio::time::timeout(Duration::from_secs(20), server.serving).await.expect("the server ends");
    served.expect("no panic").expect("no error");
    hanging.abort();
}

#[cfg(unix)]
#[tokio::test]
async fn a_unix_socket_serves_and_replaces_a_stale_file_but_not_a_live_server() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("server.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).expect("a stale socket"));
    let config = ServerConfig { listen: Listen::Unix(path.clone()), ..config() };
    let server = Server::bind(config.clone()).await.expect("the stale file is replaced");
    let (handle, _log) = engine(info(), says(&["ok"], StopReason::Eos), false);
    let control = server.control();
    control.set_ready(handle, Arc::new(plugins));
    let serving = tokio::spawn(server.serve(std::future::pending()));
    let mut stream = tokio::net::UnixStream::connect(&path).await.expect("a connection");
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(Server::bind(config).await.is_err(), "a live server keeps its socket");
    control.shutdown();
    serving.await.expect("no panic").expect("no error");
    assert!(!path.exists());
}
