//! The engine over real arithmetic: tiny models, the CPU executor, the paged cache with f16 codecs, the admission gate.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::Duration;

use opencoti_compute::cpu::attention::Attention;
use opencoti_compute::cpu::executor::{Config, Executor};
use opencoti_engine::StepBudget;
use opencoti_engine::api::{
    EmbedRequest, EngineError, EngineHandle, EngineInfo, Event, Finish, GenerateRequest, Pooling, Ranking, TokenProbs,
};
use opencoti_engine::engine::{Elastic, EngineConfig, EngineParts, ModelKind, spawn};
use opencoti_engine::pools::{MakePool, PoolChange, PoolId};
use opencoti_engine::sampling::SamplingParams;
use opencoti_engine::vocab::Vocab;
use opencoti_kv::{Cache, CacheConfig, GroupConfig, ModelFingerprint, StateConfig};
use opencoti_model::Model;
use opencoti_model::chat::ChatTemplate;
use opencoti_plugin_api::Error;
use opencoti_plugin_api::conformance::reference::PlainRows;
use opencoti_plugin_api::export::{About, Plugin, kv_codec_root};
use opencoti_plugin_api::host::{AdmissionPlugin, CodecPlugin, Host, Instance, NoSink};
use opencoti_plugin_api::kv_codec::{CodecName, Facts, KvCodec, KvCodecs, OpenParams, Rows, RowsMut, Side};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const MODELS: [&str; 2] = ["llama-head-96", "gemma3"];
const N_SLOTS: usize = 8;
const N_POOLS: usize = 2;
const N_CTX: usize = 256;
const N_BATCH: usize = 64;

fn fixture(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(file)
}

/// A codec that panics at the token after so many.
struct Fragile(AtomicI64);

impl Plugin for Fragile {
    const ABOUT: About = About {
        name: "fragile",
        version: "1.0.0",
        license: "MIT",
        summary: "stores rows until it panics",
        capabilities: "",
        config_schema: "",
    };

    fn create(_: Host, config: &serde_json::Value) -> Result<Self, Error> {
        Ok(Fragile(AtomicI64::new(config["tokens"].as_i64().unwrap_or(i64::MAX))))
    }
}

/// What is left of its patience is each codec's own, so that threads do not matter.
struct FragileCodec {
    rows: PlainRows,
    left: AtomicI64,
}

impl KvCodecs for Fragile {
    type Codec = FragileCodec;

    fn codecs(&self) -> &'static [CodecName] {
        &[CodecName { name: "f16", summary: "rows as they are" }]
    }

    fn open(&self, params: &OpenParams) -> Result<FragileCodec, Error> {
        let left = AtomicI64::new(self.0.load(Ordering::Relaxed));
        Ok(FragileCodec { rows: PlainRows::new(params.head_dim)?, left })
    }
}

impl KvCodec for FragileCodec {
    fn facts(&self) -> Facts {
        self.rows.facts()
    }

    fn append(&self, tile: &mut [u8], first_slot: usize, rows: Rows) -> Result<(), Error> {
        let left = self.left.fetch_sub(rows.len() as i64, Ordering::Relaxed);
        assert!(left >= 0, "out of patience");
        self.rows.append(tile, first_slot, rows)
    }

    fn decode_page(&self, tile: &[u8], first_slot: usize, rows: RowsMut) -> Result<(), Error> {
        self.rows.decode_page(tile, first_slot, rows)
    }
}

fn scalar() -> CodecPlugin {
    CodecPlugin::new(Instance::create(opencoti_kv_scalar::root(), "{}", Arc::new(NoSink)).unwrap()).unwrap()
}

fn fragile(tokens: i64) -> CodecPlugin {
    let config = format!(r#"{{"tokens": {tokens}}}"#);
    CodecPlugin::new(Instance::create(kv_codec_root::<Fragile>(), &config, Arc::new(NoSink)).unwrap()).unwrap()
}

fn groups(model: &Model, codecs: &CodecPlugin) -> Vec<GroupConfig> {
    let group = |g: opencoti_compute::graph::CacheGroup| GroupConfig {
        name: if g.geometry.window.is_some() { "swa" } else { "kv" }.to_owned(),
        k: codecs.open("f16", "{}", Side::K, g.geometry.k_head_dim).unwrap(),
        v: codecs.open("f16", "{}", Side::V, g.geometry.v_head_dim).unwrap(),
        geometry: g.geometry,
        n_layers: g.layers.len(),
        stage: None,
    };
    model.graph.cache_groups().into_iter().map(group).collect()
}

fn info(model: &Model) -> EngineInfo {
    EngineInfo {
        model_alias: "tiny".to_owned(),
        model_path: String::new(),
        architecture: model.architecture.to_owned(),
        file_type: model.sizes.file_type.to_string(),
        n_params: model.sizes.parameters,
        model_bytes: model.sizes.tensor_bytes,
        n_embd: model.graph.width(model.graph.hidden.unwrap()) as u32,
        n_ctx_train: N_CTX as u32,
        n_ctx: N_CTX as u32,
        n_slots: N_SLOTS as u32,
        kv_codecs: ("f16".to_owned(), "f16".to_owned()),
        repeat_layers: None,
        residency_policy: None,
        tokenizer: Arc::clone(&model.tokenizer),
        template: Arc::new(ChatTemplate::new("{{ messages[0].content }}", "", "").unwrap()),
        template_source: "test".to_owned(),
        default_sampling: SamplingParams::default(),
        default_n_predict: None,
        max_queue: 100,
        max_pools: 0,
        kv_unified: true,
        pooling: Pooling::Mean,
        generates: true,
        ranking: Ranking::None,
    }
}

/// An engine with room for `capacity` tokens.
fn engine(name: &str, capacity: usize) -> (EngineHandle, JoinHandle<()>) {
    engine_with(name, capacity, &scalar())
}

fn engine_with(name: &str, capacity: usize, codecs: &CodecPlugin) -> (EngineHandle, JoinHandle<()>) {
    let model = Model::load(&fixture(&format!("{name}.gguf"))).unwrap();
    let cache = Cache::new(CacheConfig {
        groups: groups(&model, codecs),
        capacity_tokens: capacity,
        slots: N_SLOTS + 1 + N_POOLS,
        window_sequences: None,
        recent_sequences: 4,
        step_tokens: N_BATCH,
        rollback_tokens: 1,
        whole_texts: false,
        snapshots: 0,
        states: StateConfig { idle_planes: 8, ..StateConfig::of(&model.graph) },
    });
    let config = Config { threads: 2, max_rows: N_BATCH, max_outputs: N_BATCH };
    let attention = Box::new(Attention::new(&model.graph));
    let executor = Executor::new(model.graph.clone(), model.weights.clone(), attention, config).unwrap();
    let gate = Instance::create(opencoti_admission_gate::root(), "{}", Arc::new(NoSink)).unwrap();
    let parts = EngineParts {
        config: EngineConfig {
            n_slots: N_SLOTS,
            open_slots: N_SLOTS,
            elastic: Elastic::default(),
            reserve_context: false,
            n_ctx: N_CTX,
            max_queue: 100,
            max_pools: N_POOLS,
            budget: StepBudget { n_batch: N_BATCH, prefill_chunk: 32, max_outputs: N_BATCH },
            pooling: Pooling::Mean,
            model: ModelKind::Generator,
        },
        cache: cache.unwrap(),
        runner: Box::new(executor),
        vocab: Arc::new(Vocab::from(&*model.tokenizer)),
        model: ModelFingerprint { name: name.to_owned(), digest: [0; 32] },
        admission: Some(Box::new(AdmissionPlugin::new(gate).unwrap())),
    };
    spawn(parts, Arc::new(info(&model))).unwrap()
}

fn prompt(seed: u32, n: usize) -> Vec<u32> {
    (0..n as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(9_700_417)) >> 8) % 150)
        .collect()
}

fn request(prompt: Vec<u32>, n_predict: u32) -> GenerateRequest {
    GenerateRequest {
        prompt,
        sampling: SamplingParams { temperature: 1.0, seed: 3, ignore_eos: true, ..SamplingParams::default() },
        n_predict: Some(n_predict),
        n_choices: 1,
        stop: Vec::new(),
        constraint: None,
        constraint_field: String::new(),
        id_slot: None,
        cache_prompt: true,
        session_id: None,
        pool: None,
        shared_slot: None,
        make_pool: None,
        priority: 0,
        overcommit: false,
        n_indent: 0,
        t_max_predict: None,
        return_progress: false,
        render_special: false,
        prompt_logprobs: None,
        deadline: None,
    }
}

struct Answer {
    tokens: Vec<u32>,
    probs: Vec<TokenProbs>,
    prompt: Vec<Option<TokenProbs>>,
    finish: Finish,
}

async fn answer(engine: &EngineHandle, request: GenerateRequest) -> Result<Answer, EngineError> {
    let mut running = engine.generate(request)?;
    let (mut tokens, mut probs, mut prompt) = (Vec::new(), Vec::new(), Vec::new());
    while let Some(event) = running.events.recv().await {
        match event {
            Event::Token { tokens: t, probs: p, .. } => {
                tokens.extend(t);
                probs.extend(p);
            }
            Event::PromptLogprobs { probs, .. } => prompt = probs,
            Event::Done(finish) => return Ok(Answer { tokens, probs, prompt, finish }),
            Event::Failed(error) => return Err(error),
            Event::Started { .. } | Event::Progress { .. } | Event::Pool(_) => {}
        }
    }
    panic!("the events ended without an end");
}

fn run(test: impl AsyncFn(&str)) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for model in MODELS {
        runtime.block_on(test(model));
    }
}

/// Runs all at once, and gives their results in order.
async fn all<T>(futures: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut pending: Vec<Pin<Box<_>>> = futures.map(Box::pin).collect();
    let mut results: Vec<Option<T>> = pending.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, result) in pending.iter_mut().zip(&mut results).filter(|(_, result)| result.is_none()) {
            if let Poll::Ready(value) = future.as_mut().poll(context) {
                *result = Some(value);
            }
        }
        if results.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    results.into_iter().flatten().collect()
}

async fn stop(engine: EngineHandle, thread: JoinHandle<()>) {
    engine.shutdown(Duration::from_secs(5)).await.unwrap();
    thread.join().unwrap();
}

#[test]
fn prompt_logprobs_are_those_of_the_reference() {
    run(async |name| {
        let tokens = std::fs::read(fixture(&format!("{name}.json"))).unwrap();
        let tokens: serde_json::Value = serde_json::from_slice(&tokens).unwrap();
        let tokens: Vec<u32> =
            tokens["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
        let logits = std::fs::read(fixture(&format!("{name}.logits"))).unwrap();
        let logits: Vec<f32> = logits.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let n_vocab = logits.len() / tokens.len();
        let (engine, thread) = engine(name, 1024);
        let mut ask = request(tokens.clone(), 1);
        ask.prompt_logprobs = Some(1);
        let found = answer(&engine, ask).await.unwrap().prompt;
        assert_eq!(found.len(), tokens.len());
        for (i, row) in logits.chunks_exact(n_vocab).enumerate().take(tokens.len() - 1) {
            let log_sum = row.iter().map(|l| f64::from(*l).exp()).sum::<f64>().ln() as f32;
            let expected = row[tokens[i + 1] as usize] - log_sum;
            let found = found[i + 1].as_ref().unwrap().token.value;
            assert!((found - expected).abs() < 5e-3, "{name} {i}: {found}, expected {expected}");
        }
        stop(engine, thread).await;
    });
}

#[test]
fn the_same_seed_gives_the_same_tokens_and_a_cached_prompt_the_same_probabilities() {
    run(async |name| {
        let (engine, thread) = engine(name, 1024);
        let mut ask = request(prompt(1, 150), 20);
        ask.cache_prompt = false;
        ask.sampling.n_probs = 1;
        let first = answer(&engine, ask.clone()).await.unwrap();
        let second = answer(&engine, ask.clone()).await.unwrap();
        assert_eq!(first.tokens, second.tokens);
        ask.cache_prompt = true;
        ask.n_predict = Some(1);
        answer(&engine, ask.clone()).await.unwrap();
        let cached = answer(&engine, ask).await.unwrap();
        assert_eq!((cached.finish.timings.cache_n, cached.finish.timings.prompt_n), (149, 1), "{name}");
        let difference = first.probs[0].top[0].value - cached.probs[0].top[0].value;
        assert!(difference.abs() < 1e-3, "{difference}");
        stop(engine, thread).await;
    });
}

/// A tree of prompts: a root, a branch off it at some token, and leaves on both.
fn tree(random: &mut ChaCha8Rng) -> (Vec<u32>, Vec<u32>, Vec<Vec<u32>>) {
    let mut some = |least: usize, most: usize| {
        let (seed, n) = (random.random_range(0..u32::MAX), random.random_range(least..most));
        prompt(seed, n)
    };
    let root = some(20, 120);
    let grown = some(5, 40);
    let leaves: Vec<Vec<u32>> = (0..4).map(|_| some(2, 30)).collect();
    let at = random.random_range(1..=root.len());
    let branch = [&root[..at], &grown].concat();
    let whole = |(i, own): (usize, &Vec<u32>)| [if i < 2 { &root[..] } else { &branch }, own].concat();
    let leaves = leaves.iter().enumerate().map(whole).collect();
    (root, branch, leaves)
}

/// Pools of a tree's inner nodes.
async fn pools(engine: &EngineHandle, root: &[u32], branch: &[u32]) -> Vec<PoolId> {
    let make = |tokens: &[u32], parent| {
        let make_pool = Some(MakePool { parent, ..MakePool::default() });
        engine.make_pool(GenerateRequest { make_pool, ..request(tokens.to_vec(), 0) })
    };
    let at = root.iter().zip(branch).take_while(|(a, b)| a == b).count();
    let root = make(root, None).await.unwrap().id;
    vec![root, make(branch, Some((root, Some(at)))).await.unwrap().id]
}

#[test]
fn random_trees_have_the_same_probabilities_shared_forked_and_alone() {
    let mut random = ChaCha8Rng::seed_from_u64(9);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for name in ["llama-head-96", "gemma3", "qwen35", "lfm2"] {
        runtime.block_on(async {
            // Some of these models have heads too small for the scalar codecs.
            let (engine, thread) = engine_with(name, 2048, &fragile(i64::MAX));
            for tree_at in 0..50 {
                let (root, branch, leaves) = tree(&mut random);
                let ids = pools(&engine, &root, &branch).await;
                let ask = |(i, leaf): (usize, &Vec<u32>)| {
                    let mut ask = request(leaf.clone(), 2);
                    ask.sampling.temperature = 0.0;
                    ask.sampling.n_probs = 10;
                    ask.pool = Some(ids[i / 2]);
                    ask
                };
                let asks: Vec<GenerateRequest> = leaves.iter().enumerate().map(ask).collect();
                let shared = all(asks.iter().cloned().map(|ask| answer(&engine, ask))).await;
                let alone = |ask: GenerateRequest| GenerateRequest { cache_prompt: false, pool: None, ..ask };
                let alone = all(asks.into_iter().map(|ask| answer(&engine, alone(ask)))).await;
                for (i, (shared, alone)) in shared.into_iter().zip(alone).enumerate() {
                    let (shared, alone) = (shared.unwrap(), alone.unwrap());
                    let held = [root.len(), branch.len()][i / 2];
                    assert!(shared.finish.timings.cache_n as usize >= held, "{name} tree {tree_at} leaf {i}");
                    assert_eq!(alone.finish.timings.cache_n, 0);
                    let worst = difference(&shared.probs[0], &alone.probs[0]);
                    assert!(worst < 5e-3, "{name} tree {tree_at} leaf {i}: {worst}");
                }
                for id in ids.into_iter().rev() {
                    engine.change_pool(id, PoolChange::Release).await.unwrap();
                }
                assert!(engine.pools().await.unwrap().pools.is_empty());
            }
            stop(engine, thread).await;
        });
    }
}

/// Largest difference between the log-probabilities of the ten most likely tokens. One that is the eleventh in the other list
/// is as likely as its tenth, or nearly so.
fn difference(a: &TokenProbs, b: &TokenProbs) -> f32 {
    let least = b.top.last().map_or(0.0, |t| t.value);
    let other = |id: u32| b.top.iter().find(|t| t.id == id).map_or(least, |t| t.value);
    a.top.iter().map(|t| (t.value - other(t.id)).abs()).fold(0.0, f32::max)
}

#[test]
fn identical_prompts_are_computed_once() {
    run(async |name| {
        let (engine, thread) = engine(name, 2048);
        let answers = all((0..N_SLOTS).map(|_| answer(&engine, request(prompt(1, 200), 8)))).await;
        let computed: u32 = answers.into_iter().map(|a| a.unwrap().finish.timings.prompt_n).sum();
        assert!(computed <= 200 + N_SLOTS as u32, "{computed}");
        stop(engine, thread).await;
    });
}

#[test]
fn sixty_four_requests_over_a_small_cache_end_and_every_page_is_free() {
    run(async |name| {
        let (engine, thread) = engine(name, 1024);
        let asks = (0..64u32).map(|i| {
            let mut ask = request(prompt(i % 9, 20 + (i as usize * 31) % 200), 5 + i % 30);
            ask.sampling.seed = i.into();
            answer(&engine, ask)
        });
        let mut done = 0;
        for result in all(asks).await {
            match result {
                Ok(answer) => {
                    assert!(!answer.finish.truncated && !answer.tokens.is_empty());
                    done += 1;
                }
                Err(error) => assert!(matches!(error, EngineError::Rejected { reason: "kv", .. }), "{error}"),
            }
        }
        // Four of the longest fit at once.
        assert!(done >= 4, "{done}");
        for store in engine.stats().await.unwrap().stores {
            assert_eq!(store.cells_used, store.cells_reclaimable, "{}", store.name);
        }
        stop(engine, thread).await;
    });
}

#[test]
fn a_client_that_goes_away_frees_its_slot() {
    run(async |name| {
        let (engine, thread) = engine(name, 8192);
        let start = |i| engine.generate(request(prompt(i, 100), 150)).unwrap();
        let mut gone: Vec<_> = (0..N_SLOTS as u32 + 4).map(start).collect();
        // One of them is generating, some compute their prompts, some wait.
        while !matches!(gone[0].events.recv().await, Some(Event::Token { .. }) | None) {}
        drop(gone);
        assert_eq!(answer(&engine, request(prompt(99, 20), 5)).await.unwrap().tokens.len(), 5);
        let stats = engine.stats().await.unwrap();
        assert_eq!((stats.processing, stats.deferred), (0, 0));
        stop(engine, thread).await;
    });
}

#[test]
fn embeddings_have_the_models_width() {
    run(async |name| {
        let (engine, thread) = engine(name, 1024);
        let embed = |pooling| engine.embed(EmbedRequest { tokens: prompt(1, 100), pooling, second: None });
        let rows = embed(Some(Pooling::None)).await.unwrap().vectors;
        let mean = embed(None).await.unwrap().vectors;
        assert_eq!((rows.len(), mean.len()), (100, 1));
        assert_eq!(mean[0].len(), engine.info().n_embd as usize);
        for (i, found) in mean[0].iter().enumerate() {
            let expected = rows.iter().map(|v| v[i]).sum::<f32>() / 100.0;
            assert!((found - expected).abs() < 1e-4, "{found}, expected {expected}");
        }
        stop(engine, thread).await;
    });
}

#[test]
fn an_embeddings_input_may_be_as_long_as_the_context_beside_running_answers() {
    run(async |name| {
        let (engine, thread) = engine(name, 2048);
        let running = engine.generate(request(prompt(2, 50), 150)).unwrap();
        let embed = |n, pooling| engine.embed(EmbedRequest { tokens: prompt(1, n), pooling, second: None });
        let rows = embed(N_CTX, Some(Pooling::None)).await.unwrap().vectors;
        assert_eq!(rows.len(), N_CTX);
        let mean = embed(N_CTX, Some(Pooling::Mean)).await.unwrap().vectors.remove(0);
        for (i, found) in mean.iter().enumerate() {
            let expected = rows.iter().map(|v| v[i]).sum::<f32>() / N_CTX as f32;
            assert!((found - expected).abs() < 1e-4, "{found}, expected {expected}");
        }
        // Steps of another composition, so not the same rounding.
        for (pooling, row) in [(Pooling::Last, &rows[N_CTX - 1]), (Pooling::Cls, &rows[0])] {
            let found = embed(N_CTX, Some(pooling)).await.unwrap().vectors.remove(0);
            let difference = found.iter().zip(row).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(difference < 1e-3, "{pooling:?}: {difference}");
        }
        let error = embed(N_CTX + 1, None).await.unwrap_err();
        assert_eq!(error, EngineError::ExceedsContext { n_prompt_tokens: N_CTX as u32 + 1, n_ctx: N_CTX as u32 });
        drop(running);
        stop(engine, thread).await;
    });
}

#[test]
fn an_input_that_the_whole_cache_cannot_hold_is_told_so() {
    run(async |name| {
        let (engine, thread) = engine(name, 128);
        let error =
            engine.embed(EmbedRequest { tokens: prompt(1, 129), pooling: None, second: None }).await.unwrap_err();
        assert_eq!(error, EngineError::ExceedsContext { n_prompt_tokens: 129, n_ctx: 128 });
        stop(engine, thread).await;
    });
}

#[test]
fn a_codec_that_panics_fails_its_step_and_later_requests_are_refused_before_prefill() {
    run(async |name| {
        let codecs = fragile(3000);
        let (engine, thread) = engine_with(name, 4096, &codecs);
        answer(&engine, request(prompt(1, 40), 3)).await.unwrap();
        let results = all((0..N_SLOTS as u32 + 4).map(|i| answer(&engine, request(prompt(i, 200), 50)))).await;
        let mut failed = 0;
        for result in results {
            match result {
                Ok(_) => {}
                Err(EngineError::Internal(message)) => {
                    assert!(message.contains("plugin `fragile`") && message.contains("out of patience"), "{message}");
                    failed += 1;
                }
                Err(EngineError::Unavailable(message)) => assert!(message.contains("plugin `fragile`"), "{message}"),
                Err(error) => panic!("{error}"),
            }
        }
        assert!(failed > 0);
        let refused = |error: EngineError| {
            let EngineError::Unavailable(message) = error else { panic!("{error}") };
            for part in ["plugin `fragile`", "codec `f16`", "quarantine", "out of patience", "restart"] {
                assert!(message.contains(part), "{part}: {message}");
            }
        };
        for _ in 0..2 {
            refused(answer(&engine, request(prompt(1, 40), 3)).await.err().unwrap());
            refused(
                engine.embed(EmbedRequest { tokens: prompt(1, 5), pooling: None, second: None }).await.unwrap_err(),
            );
        }
        let stats = engine.stats().await.unwrap();
        assert_eq!((stats.processing, stats.deferred), (0, 0));
        for store in stats.stores {
            assert_eq!(store.cells_used, store.cells_reclaimable, "{}", store.name);
        }
        stop(engine, thread).await;
    });
}
