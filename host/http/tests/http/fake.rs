//! An engine that answers by a script, a server around it, and what tests say to both.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use opencoti_engine::api::{
    Command, EmbedRequest, Embedding, EngineError, EngineHandle, EngineInfo, Event, Finish, GenerateRequest, Notice,
    Pooling, Ranking, RequestId, SlotFile, SlotInfo, SlotTask, StateStats, Stats, StopReason, StoreStats, Timings,
    TokenProb, TokenProbs,
};
use opencoti_engine::pools::{
    Capacity, Placement, PoolAdmission, PoolChange, PoolCommand, PoolId, PoolInfo, PoolList, Projection, Rates,
    SessionRate,
};
use opencoti_engine::sampling::SamplingParams;
use opencoti_http::{Listen, Server, ServerConfig, ServerControl};
use opencoti_model::chat::ChatTemplate;
use opencoti_model::tokenizer::{Tokenizer, TokenizerSpec};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// An answer with a thought, a text and a call, in pieces that cut its markers.
pub(crate) const THINKS_AND_CALLS: &[&str] = &[
    "<think>\nRome",
    " it is.</think>\n",
    "Let me see.\n<tool_",
    "call>\n{\"name\": \"weather\", \"argu",
    "ments\": {\"city\": \"Rom",
    "e\"}}\n</tool_call>",
];

/// What the engine does with a request.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Sends an event.
    Say(Event),
    /// Waits.
    Pause(Duration),
    /// Waits until the client is gone or cancels.
    Hang,
}

/// The steps for each request.
pub(crate) type Script = Arc<dyn Fn(&GenerateRequest) -> Vec<Step> + Send + Sync>;

/// What happened in the engine.
#[derive(Default)]
pub(crate) struct Log {
    pub(crate) requests: Mutex<Vec<GenerateRequest>>,
    /// Requests whose receiver was dropped before their end.
    pub(crate) gone: Mutex<u32>,
    pub(crate) cancelled: Mutex<Vec<RequestId>>,
    pub(crate) files: Mutex<Vec<std::path::PathBuf>>,
}

impl Log {
    pub(crate) fn last(&self) -> GenerateRequest {
        self.requests.lock().expect("the log").last().cloned().expect("a request reached the engine")
    }

    /// The text of the last request's prompt, without the beginning token.
    pub(crate) fn last_prompt(&self) -> String {
        let prompt = self.last().prompt;
        let text = String::from_utf8(tokenizer().decode(&prompt[1..], true)).expect("a prompt is text");
        // The vocabulary has bytes only, so the spelling of spaces stays.
        text.replace('▁', " ")
    }

    pub(crate) fn count(&self) -> usize {
        self.requests.lock().expect("the log").len()
    }

    /// Waits until so many clients are gone.
    pub(crate) async fn wait_gone(&self, n: u32) {
        let began = Instant::now();
        while *self.gone.lock().expect("the log") < n {
            assert!(began.elapsed() < Duration::from_secs(20), "the engine never saw the client go away");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until so many requests have come.
    pub(crate) async fn wait_requests(&self, n: usize) {
        let began = Instant::now();
        while self.count() < n {
            assert!(began.elapsed() < Duration::from_secs(20), "the request never reached the engine");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Token id of a byte.
pub(crate) fn byte_token(byte: u8) -> u32 {
    3 + u32::from(byte)
}

/// 3 control tokens, 256 bytes, 2 markers.
pub(crate) const N_VOCAB: usize = 261;

fn tokenizer() -> Tokenizer {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["<|im_start|>", "<|im_end|>"].map(str::to_owned));
    let mut types = vec![2, 3, 3];
    types.extend([6; 256]);
    types.extend([3, 3]);
    let spec = TokenizerSpec {
        model: "llama".to_owned(),
        scores: Some(vec![0.0; tokens.len()]),
        token_types: Some(types),
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        add_bos: Some(true),
        add_space_prefix: Some(false),
        tokens,
        ..TokenizerSpec::default()
    };
    Tokenizer::new(spec).expect("the test vocabulary")
}

const TEMPLATE: &str = "{%- for m in messages -%}[{{ m.role }}]{{ m.content }}\n{% endfor -%}\
    {%- if enable_thinking is defined -%}(thinking: {{ enable_thinking }}){%- endif -%}\
    {%- if add_generation_prompt -%}[assistant]{%- endif -%}{# <think> #}";

pub(crate) fn info() -> EngineInfo {
    EngineInfo {
        model_alias: "tiny".to_owned(),
        model_path: "/models/tiny.gguf".to_owned(),
        architecture: "llama".to_owned(),
        file_type: "Q4_1".to_owned(),
        n_params: 134_515_008,
        model_bytes: 90_000_000,
        n_embd: 4,
        n_ctx_train: 2048,
        n_ctx: 512,
        n_slots: 4,
        kv_codecs: ("q8_0".to_owned(), "q5_1".to_owned()),
        repeat_layers: None,
        residency_policy: Some("residency-resident".to_owned()),
        tokenizer: Arc::new(tokenizer()),
        template: Arc::new(ChatTemplate::new(TEMPLATE, "<s>", "</s>").expect("the test template")),
        template_source: "test".to_owned(),
        default_sampling: SamplingParams::default(),
        default_n_predict: None,
        max_queue: 16,
        max_pools: 4,
        kv_unified: true,
        pooling: Pooling::Mean,
        generates: true,
        ranking: Ranking::Cosine,
    }
}

fn timings(prompt: usize, predicted_n: u32) -> Timings {
    Timings { cache_n: 1, prompt_n: (prompt as u32).saturating_sub(1), prompt_ms: 4.0, predicted_n, predicted_ms: 2.0 }
}

/// A token of a text, with two alternatives when asked for.
pub(crate) fn token(index: u32, text: &str, request: &GenerateRequest, nth: u32) -> Event {
    let first = text.bytes().next().unwrap_or(b' ');
    let prob = |id: u32, bytes: &[u8], value: f32| TokenProb { id, bytes: bytes.to_vec(), value };
    let probs = TokenProbs {
        token: prob(byte_token(first), text.as_bytes(), -0.25),
        top: vec![prob(byte_token(first), text.as_bytes(), -0.25), prob(byte_token(b'?'), b"?", -2.0)],
    };
    Event::Token {
        index,
        text: text.to_owned(),
        tokens: vec![byte_token(first)],
        probs: if request.sampling.n_probs > 0 { vec![probs] } else { Vec::new() },
        timings: timings(request.prompt.len(), nth),
    }
}

pub(crate) fn started(index: u32) -> Event {
    Event::Started { index, id_slot: index, notice: Notice::default() }
}

pub(crate) fn done(index: u32, request: &GenerateRequest, n: u32, reason: StopReason) -> Event {
    Event::Done(Finish {
        index,
        id_slot: index,
        reason,
        truncated: false,
        has_new_line: false,
        tokens_cached: request.prompt.len() as u32 + n,
        seed: 77,
        session_tps: 0.0,
        timings: timings(request.prompt.len(), n),
    })
}

/// Each choice says the texts, one event each, and ends.
pub(crate) fn says(texts: &'static [&'static str], reason: StopReason) -> Script {
    Arc::new(move |request| {
        let mut steps: Vec<Step> = (0..request.n_choices).map(|index| Step::Say(started(index))).collect();
        if let Some(n) = request.prompt_logprobs {
            let probs = request.prompt.iter().enumerate().map(|(position, &id)| {
                let bytes = id.checked_sub(3).map(|byte| vec![byte as u8]).unwrap_or_default();
                let token = TokenProb { id, bytes, value: -1.0 };
                (position > 0).then(|| TokenProbs { top: vec![token.clone(); n as usize], token })
            });
            steps.push(Step::Say(Event::PromptLogprobs { index: 0, probs: probs.collect() }));
        }
        for (nth, text) in texts.iter().enumerate() {
            for index in 0..request.n_choices {
                steps.push(Step::Say(token(index, text, request, nth as u32 + 1)));
            }
        }
        for index in 0..request.n_choices {
            steps.push(Step::Say(done(index, request, texts.len() as u32, reason.clone())));
        }
        steps
    })
}

/// The request fails at once.
pub(crate) fn fails(error: EngineError) -> Script {
    Arc::new(move |_| vec![Step::Say(Event::Failed(error.clone()))])
}

async fn generate(
    steps: Vec<Step>,
    sender: mpsc::UnboundedSender<Event>,
    log: Arc<Log>,
    cancel: Arc<tokio::sync::Notify>,
) {
    for step in steps {
        match step {
            Step::Say(event) => {
                if sender.send(event).is_err() {
                    *log.gone.lock().expect("the log") += 1;
                    return;
                }
            }
            Step::Pause(time) => tokio::time::sleep(time).await,
            Step::Hang => {
                tokio::select! {
                    () = sender.closed() => *log.gone.lock().expect("the log") += 1,
                    () = cancel.notified() => {
                        let error = EngineError::Unavailable("the request was cancelled".to_owned());
                        let _ = sender.send(Event::Failed(error));
                    }
                }
                return;
            }
        }
    }
}

fn slots(busy: bool) -> Vec<SlotInfo> {
    let task = SlotTask {
        id: RequestId(9),
        n_prompt_tokens: 10,
        n_prompt_tokens_processed: 8,
        n_prompt_tokens_cache: 2,
        n_decoded: 3,
        n_remain: Some(5),
        has_new_line: true,
        sampling: SamplingParams::default(),
    };
    (0..4)
        .map(|id| SlotInfo {
            id,
            n_ctx: 512,
            task: Some(task.clone()).filter(|_| busy || id == 0),
            n_cached: 7,
            session_id: Some("s".to_owned()),
            pool: Some(3),
            n_pool_shared: 5,
        })
        .collect()
}

fn stats() -> Stats {
    let store = StoreStats {
        name: "kv".to_owned(),
        codecs: ("q8_0".to_owned(), "q5_1".to_owned()),
        n_layers: 30,
        cells_total: 2048,
        cells_resident: 2048,
        cells_used: 100,
        cells_shared: 10,
        cells_reclaimable: 5,
        bytes: 1 << 20,
        stage_cells: 0,
        stage_bytes: 0,
        cpu_tiles: (true, false),
    };
    let state =
        StateStats { n_layers: 24, plane_bytes: 1 << 16, planes_total: 12, planes_used: 5, ..StateStats::default() };
    Stats { stores: vec![store], state: Some(state), snapshots: 4, processing: 1, deferred: 2, retained: 3 }
}

pub(crate) fn pool(id: PoolId) -> PoolInfo {
    PoolInfo {
        id,
        parent: Some(0),
        branch_pos: 65,
        prefix_len: 82,
        prefix_hash: 0xab,
        pinned: false,
        released: false,
        ephemeral: true,
        children: vec![4, 5],
        orphaned_pin: false,
        n_sessions: 2,
        hits: 7,
        admission: PoolAdmission::default(),
        placement: Placement::Auto,
    }
}

/// There is pool 3, and it is full.
fn pools(command: PoolCommand) {
    let known = |id: PoolId| match id {
        3 => Ok(pool(id)),
        _ => Err(EngineError::NotFound(format!("there is no pool {id}"))),
    };
    match command {
        PoolCommand::Capture(capture, reply) => {
            drop(reply.send(Ok(PoolInfo { pinned: capture.pinned, ephemeral: capture.ephemeral, ..pool(3) })));
        }
        PoolCommand::List(reply) => drop(reply.send(PoolList { pools: vec![pool(3)], max: 4, depth: 2 })),
        PoolCommand::Get(id, reply) => drop(reply.send(known(id))),
        PoolCommand::Change(id, change, reply) => drop(reply.send(known(id).map(|mut pool| {
            match change {
                PoolChange::Pin => pool.pinned = true,
                PoolChange::Unpin => pool.pinned = false,
                PoolChange::Release => pool.released = true,
                PoolChange::Place(placement) => pool.placement = placement,
                PoolChange::Admission(admission) => pool.admission = admission,
            }
            pool
        }))),
        PoolCommand::Capacity(id, expected, reply) => drop(reply.send(known(id).map(|_| Capacity {
            can_admit: false,
            reason: "context headroom exhausted".to_owned(),
            headroom_sessions: 0,
            mean_active_tps: 20.0,
            compaction_pressure: 0.5,
            free_cells: expected.unwrap_or(0),
            settling: true,
            settle_remaining: Duration::from_millis(1500),
            n_warming: 1,
            n_pool_sessions: 2,
            guaranteed: false,
            projection: Projection { by_model: 15.0, by_measure: Some(18.0), is_idle_estimate: false },
            drop_per_admit: Some(2.0),
        }))),
        PoolCommand::Rates(reply) => drop(reply.send(Rates {
            aggregate: 40.0,
            n_warming: 1,
            sessions: vec![SessionRate {
                session_id: Some("s".to_owned()),
                slot: 1,
                pool: Some(3),
                tps: 20.0,
                active: true,
                ctx_used: 100,
                ctx_total: 512,
            }],
        })),
    }
}

/// By the number of tokens alone; a head's score grows with the second text.
fn embedding(request: &EmbedRequest) -> Vec<f32> {
    let n = request.tokens.len() as f32;
    match request.pooling {
        Some(Pooling::Rank) => vec![request.second.map_or(0.0, |second| n - second as f32 - 3.0)],
        _ => vec![3.0 * n, 0.0, -4.0 * n, 0.0],
    }
}

/// Starts the engine; `busy` fills every slot.
pub(crate) fn engine(info: EngineInfo, script: Script, busy: bool) -> (EngineHandle, Arc<Log>) {
    let (sender, mut commands) = mpsc::unbounded_channel();
    let log = Arc::new(Log::default());
    let shared = Arc::clone(&log);
    tokio::spawn(async move {
        let cancel = Arc::new(tokio::sync::Notify::new());
        while let Some(command) = commands.recv().await {
            match command {
                Command::Generate(_, request, events) => {
                    let steps = script(&request);
                    shared.requests.lock().expect("the log").push(*request);
                    tokio::spawn(generate(steps, events, Arc::clone(&shared), Arc::clone(&cancel)));
                }
                Command::Embed(request, reply) => {
                    let _ = reply.send(Ok(Embedding { vectors: vec![embedding(&request)] }));
                }
                Command::Cancel(id, reply) => {
                    shared.cancelled.lock().expect("the log").push(id);
                    cancel.notify_waiters();
                    let _ = reply.send(true);
                }
                Command::Slots(reply) => drop(reply.send(slots(busy))),
                Command::SaveSlot(_, path, reply) | Command::RestoreSlot(_, path, reply) => {
                    shared.files.lock().expect("the log").push(path);
                    let _ = reply.send(Ok(SlotFile { n_tokens: 84, n_bytes: 4096, ms: 1.5 }));
                }
                Command::EraseSlot(_, reply) => drop(reply.send(Ok(SlotFile { n_tokens: 84, n_bytes: 0, ms: 0.0 }))),
                Command::Prefixes(reply) => drop(reply.send(Vec::new())),
                Command::Trace(reply) => drop(reply.send(Vec::new())),
                Command::Pool(command) => pools(command),
                Command::Stats(reply) => drop(reply.send(stats())),
                Command::Shutdown(_, reply) => {
                    let _ = reply.send(());
                    return;
                }
            }
        }
    });
    (EngineHandle::new(sender, Arc::new(info)), log)
}

/// A server on a free port.
pub(crate) struct TestServer {
    pub(crate) base: String,
    pub(crate) control: ServerControl,
    pub(crate) log: Arc<Log>,
    pub(crate) client: reqwest::Client,
    pub(crate) serving: JoinHandle<std::io::Result<()>>,
}

pub(crate) fn config() -> ServerConfig {
    ServerConfig { listen: Listen::Tcp("127.0.0.1:0".parse().expect("an address")), ..ServerConfig::default() }
}

pub(crate) fn plugins() -> Value {
    json!([
        {"name": "kv-scalar", "version": "1.0.0", "kind": "kv-codec", "state": "loaded"},
        {"name": "gate", "version": "1.1.0", "kind": "admission", "state": "quarantined"},
    ])
}

impl TestServer {
    /// A server that loads.
    pub(crate) async fn loading(config: ServerConfig) -> Self {
        let server = Server::bind(config.clone()).await.expect("a free port");
        let address = server.local_addr().expect("a TCP address");
        let base = format!("http://{address}{}", config.api_prefix);
        let control = server.control();
        let serving = tokio::spawn(server.serve(std::future::pending()));
        TestServer { base, control, log: Arc::default(), client: reqwest::Client::new(), serving }
    }

    /// A server that serves.
    pub(crate) async fn with(config: ServerConfig, script: Script) -> Self {
        let mut server = Self::loading(config).await;
        let (handle, log) = engine(info(), script, false);
        server.control.set_ready(handle, Arc::new(plugins));
        server.log = log;
        server
    }

    /// A server that serves, with the usual configuration.
    pub(crate) async fn new(script: Script) -> Self {
        Self::with(config(), script).await
    }

    pub(crate) async fn get(&self, path: &str) -> reqwest::Response {
        self.client.get(format!("{}{path}", self.base)).send().await.expect("an answer")
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> reqwest::Response {
        self.client.post(format!("{}{path}", self.base)).json(&body).send().await.expect("an answer")
    }

    /// The status and the body of a request.
    pub(crate) async fn ask(&self, path: &str, body: Value) -> (u16, Value) {
        let response = self.post(path, body).await;
        (response.status().as_u16(), response.json().await.expect("a JSON body"))
    }

    /// The body of a request that must succeed.
    pub(crate) async fn ok(&self, path: &str, body: Value) -> Value {
        let (status, answer) = self.ask(path, body).await;
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// The error of a request that must fail so.
    pub(crate) async fn error(&self, path: &str, body: Value, status: u16) -> Value {
        let (found, answer) = self.ask(path, body.clone()).await;
        assert_eq!(found, status, "{path} {body} gave {answer}");
        let error = answer["error"].clone();
        assert_eq!(error["code"], status, "{answer}");
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{answer}");
        assert!(error["type"].is_string() && error.get("param").is_some(), "{answer}");
        error
    }

    /// The events of a stream that must succeed; `[DONE]` is the string.
    pub(crate) async fn events(&self, path: &str, body: Value) -> Vec<Value> {
        let response = self.post(path, body).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        assert_eq!(response.headers()["x-accel-buffering"], "no");
        parse_events(&response.text().await.expect("a whole stream"))
    }

    /// The named events of a stream that must succeed.
    pub(crate) async fn named_events(&self, path: &str, body: Value) -> Vec<Value> {
        let response = self.post(path, body).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        parse_named_events(&response.text().await.expect("a whole stream"))
    }
}

/// Takes a stream apart.
pub(crate) fn parse_events(text: &str) -> Vec<Value> {
    let events = text.split("\n\n").filter(|event| !event.is_empty() && !event.starts_with(':'));
    events
        .map(|event| {
            let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("{event:?} is no data event"));
            if data == "[DONE]" { json!("[DONE]") } else { serde_json::from_str(data).expect("an event is JSON") }
        })
        .collect()
}

/// Takes a stream of named events apart; a name and its data's `type` must be the same.
pub(crate) fn parse_named_events(text: &str) -> Vec<Value> {
    let events = text.split("\n\n").filter(|event| !event.is_empty() && !event.starts_with(':'));
    events
        .map(|event| {
            let (name, data) = event.split_once('\n').unwrap_or_else(|| panic!("{event:?} has one line"));
            let name = name.strip_prefix("event: ").unwrap_or_else(|| panic!("{event:?} has no name"));
            let data = data.strip_prefix("data: ").unwrap_or_else(|| panic!("{event:?} has no data"));
            let data: Value = serde_json::from_str(data).expect("an event is JSON");
            assert_eq!(data["type"], name, "{event}");
            data
        })
        .collect()
}
