//! The real program: a server on a free port with a made-up model, and what its clients do.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{model, plugins};

/// Until when something that takes milliseconds must have happened, on a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(30);

/// The program with a command line and nothing of this process's configuration.
pub fn opencoti(args: &[&str]) -> Command {
    let mut command = Command::new(plugins::program());
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("OPENCOTI_")) {
        command.env_remove(name);
    }
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs the program to its end.
pub fn run(args: &[&str]) -> Output {
    opencoti(args).output().expect("the program starts")
}

/// A folder with the model and a config.
pub struct Site {
    folder: TempDir,
}

impl Site {
    /// A folder with the made-up model and `config` as `opencoti.toml`.
    pub fn new(config: &str) -> Self {
        let site = Site { folder: tempfile::tempdir().expect("a folder for the test") };
        model::write(&site.path("tiny.gguf")).expect("the model is written");
        site.configure(config);
        site
    }

    /// A folder with a tiny model of the parity tests, which knows token ids only, and no config.
    pub fn with_fixture(name: &str) -> Self {
        let site = Site { folder: tempfile::tempdir().expect("a folder for the test") };
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/model/tests/fixtures");
        std::fs::copy(fixtures.join(name), site.path("tiny.gguf")).expect("the fixture is there");
        site.configure("");
        site
    }

    /// A folder with a model of `$OPENCOTI_TEST_MODELS`, and no config; `None`, said on standard error, where it is not there.
    pub fn with_real_model(name: &str) -> Option<Self> {
        let model = std::env::var_os("OPENCOTI_TEST_MODELS").map(|folder| PathBuf::from(folder).join(name));
        let Some(model) = model.filter(|model| model.exists()) else {
            eprintln!("skipped: no {name} in $OPENCOTI_TEST_MODELS");
            return None;
        };
        let site = Site { folder: tempfile::tempdir().expect("a folder for the test") };
        std::os::unix::fs::symlink(model, site.path("tiny.gguf")).expect("a link to the model");
        site.configure("");
        Some(site)
    }

    /// Replaces the config.
    pub fn configure(&self, config: &str) {
        std::fs::write(self.path("opencoti.toml"), config).expect("the config is written");
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A command line for this folder: the task, its config, the model, what else is fixed, and `args`.
    pub fn args(&self, task: &str, args: &[&str]) -> Vec<String> {
        let text = |path: PathBuf| path.display().to_string();
        let mut line = vec![task.to_owned(), "--config".to_owned(), text(self.path("opencoti.toml"))];
        line.extend(["--model".to_owned(), text(self.path("tiny.gguf"))]);
        line.extend(["--plugin-cache".to_owned(), text(self.path("plugins"))]);
        // Tests run side by side: one compute thread each.
        line.extend(["--threads", "1", "--port", "0"].map(str::to_owned));
        line.extend(args.iter().map(|&arg| arg.to_owned()));
        line
    }

    /// Runs a task of this folder to its end.
    pub fn run(&self, task: &str, args: &[&str]) -> Output {
        let line = self.args(task, args);
        run(&line.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

/// A running server; killed when dropped.
pub struct Server {
    child: Child,
    address: String,
    site: Site,
    client: reqwest::blocking::Client,
}

/// An answer.
#[derive(Debug)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// `Retry-After`, in seconds.
    pub retry_after: Option<u32>,
    /// The body; null when it is no JSON.
    pub body: Value,
}

impl Reply {
    /// The body of a success.
    #[track_caller]
    pub fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.body
    }

    /// Message of an error, of which the body's code must be the status.
    #[track_caller]
    pub fn message(&self) -> &str {
        assert_eq!(self.body["error"]["code"], self.status, "{}", self.body);
        self.body["error"]["message"].as_str().expect("an error has a message")
    }
}

impl Server {
    /// Starts the distribution's plugins with the made-up model and waits until it serves.
    #[track_caller]
    pub fn start(args: &[&str]) -> Server {
        Self::at(Site::new(""), args)
    }

    /// [`Server::start`] with a config.
    #[track_caller]
    pub fn with_config(config: &str, args: &[&str]) -> Server {
        Self::at(Site::new(config), args)
    }

    /// Starts in a folder that is there.
    #[track_caller]
    pub fn at(site: Site, args: &[&str]) -> Server {
        let log = File::create(site.path("log")).expect("the log is created");
        let line = site.args("serve", args);
        let mut command = opencoti(&line.iter().map(String::as_str).collect::<Vec<_>>());
        command.stdout(log.try_clone().expect("the log's handle")).stderr(log);
        let child = command.spawn().expect("the program starts");
        let client = reqwest::blocking::Client::builder().timeout(Duration::from_secs(60));
        let client = client.pool_max_idle_per_host(0).build().expect("an HTTP client");
        let mut server = Server { child, address: String::new(), site, client };
        server.wait_for("the server's start", |server| {
            if server.child.try_wait().expect("the child's state").is_some() {
                panic!("the server ended:\n{}", server.log());
            }
            server.find_address() && server.get("/health").status == 200
        });
        server
    }

    fn find_address(&mut self) -> bool {
        let log = self.log();
        let said = log.lines().find_map(|line| line.split_once("listening on http://"));
        if let Some((_, address)) = said {
            self.address = address.trim().to_owned();
        }
        !self.address.is_empty()
    }

    fn wait_for(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < deadline, "{what} takes too long:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until something is so.
    #[track_caller]
    pub fn wait_until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done() {
            assert!(Instant::now() < deadline, "{what} takes too long:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.site.path("log")).unwrap_or_default()
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Its folder.
    pub fn site(&self) -> &Site {
        &self.site
    }

    fn send(&self, request: reqwest::blocking::RequestBuilder) -> Reply {
        let answer = request.send().unwrap_or_else(|e| panic!("no answer: {e:?}\n{}", self.log()));
        let retry_after = answer.headers().get("retry-after").and_then(|v| v.to_str().ok()?.parse().ok());
        let status = answer.status().as_u16();
        let text = answer.text().unwrap_or_else(|e| panic!("a broken answer: {e:?}\n{}", self.log()));
        Reply { status, retry_after, body: serde_json::from_str(&text).unwrap_or(Value::String(text)) }
    }

    /// GET.
    pub fn get(&self, path: &str) -> Reply {
        self.send(self.client.get(self.url() + path))
    }

    /// POST of JSON.
    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_text(path, &body.to_string())
    }

    /// POST of anything.
    pub fn post_text(&self, path: &str, body: &str) -> Reply {
        let request = self.client.post(self.url() + path).header("content-type", "application/json");
        self.send(request.body(body.to_owned()))
    }

    /// A completion that must succeed.
    #[track_caller]
    pub fn complete(&self, body: &Value) -> Value {
        self.post("/completion", body).ok()
    }

    /// Starts a stream; the status has come.
    #[track_caller]
    pub fn stream(&self, path: &str, body: &Value) -> Events {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let answer = self.client.post(self.url() + path).json(&body).send().expect("an answer");
        assert_eq!(answer.status(), 200, "{:?}", answer.text());
        Events { lines: BufReader::new(answer) }
    }

    /// Sends a request on a connection of its own. Dropping the connection is how a client goes away.
    pub fn connect(&self, path: &str, body: &Value) -> TcpStream {
        let mut connection = TcpStream::connect(&self.address).expect("a connection");
        let body = body.to_string();
        let length = body.len();
        let head = format!("POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n");
        write!(connection, "{head}content-length: {length}\r\n\r\n{body}").expect("the request is sent");
        connection
    }

    /// Sum of a metric's samples.
    #[track_caller]
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let text = text.as_str().expect("metrics are text");
        let of_name = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
        let samples: Vec<f64> =
            text.lines().filter(of_name).filter_map(|l| l.rsplit(' ').next()?.parse().ok()).collect();
        assert!(!samples.is_empty(), "{name} is missing in\n{text}");
        samples.iter().sum()
    }

    /// What slot `id` shows.
    pub fn slot(&self, id: usize) -> Value {
        self.get("/slots").ok()[id].clone()
    }

    /// Waits until no request runs or waits.
    #[track_caller]
    pub fn wait_until_idle(&self) {
        self.wait_until("the end of all requests", || {
            self.metric("opencoti_requests_processing") + self.metric("opencoti_requests_deferred") == 0.0
        });
    }

    /// Tells it to stop and waits for its end.
    #[track_caller]
    pub fn shut_down(mut self) -> ExitStatus {
        self.post("/shutdown", &json!({})).ok();
        let mut status = None;
        self.wait_for("the server's end", |server| {
            status = server.child.try_wait().expect("the child's state");
            status.is_some()
        });
        status.expect("it has ended")
    }

    /// Asserts that it lives and answers what needs no generation.
    #[track_caller]
    pub fn answers(&self) {
        self.get("/health").ok();
        let tokens = self.post("/tokenize", &json!({"content": "the end"})).ok();
        assert!(!tokens["tokens"].as_array().expect("tokens").is_empty());
    }

    /// A plugin's entry in `GET /plugins`.
    #[track_caller]
    pub fn plugin(&self, name: &str) -> Value {
        self.get(&format!("/plugins/{name}")).ok()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The events of a stream, `[DONE]` left out. Dropping them closes the connection.
pub struct Events {
    lines: BufReader<reqwest::blocking::Response>,
}

impl Iterator for Events {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).expect("the stream goes on") == 0 {
                return None;
            }
            match line.trim_end().strip_prefix("data: ") {
                None | Some("[DONE]") => {}
                Some(data) => return Some(serde_json::from_str(data).expect("events are JSON")),
            }
        }
    }
}

/// One sentence on standard error, the last line, of a run that failed.
#[track_caller]
pub fn refusal(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let line = text.lines().last().unwrap_or_default();
    let sentence = line.strip_prefix("opencoti: ").unwrap_or_else(|| panic!("no sentence at the end: {text}"));
    assert!(sentence.len() < 600, "one short sentence: {sentence}");
    sentence.to_owned()
}

/// A path as TOML and command lines take it.
pub fn text(path: &Path) -> String {
    path.display().to_string()
}

/// `n` tokens of bytes, different for each `seed`.
pub fn prompt(seed: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| 0x21 + ((i * i + i * seed * 7 + seed * 31) % 90) as u32).collect()
}
