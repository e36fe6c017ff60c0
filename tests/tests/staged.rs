//! Exact tokens beside encoded pages, over real arithmetic: tiny models, the CPU executor, the paged cache, and codecs of
//! every kind. However sequences are cut, shared, forked and taken back, a row's logits are those of its own tokens.

use std::path::PathBuf;
use std::sync::Arc;

use opencoti_compute::cpu::attention::Attention;
use opencoti_compute::cpu::executor::{Config, Executor};
use opencoti_compute::graph::CacheGroup;
use opencoti_kv::{BatchItem, Cache, CacheConfig, GroupConfig, Outputs, SeqId, StageConfig, StateConfig};
use opencoti_model::Model;
use opencoti_plugin_api::host::{Codec, CodecPlugin, Instance, NoSink};
use opencoti_plugin_api::kv_codec::Side;

const MAX_ROWS: usize = 256;
/// Between results of steps that were cut in different ways: products sum in other orders, and a key beside a boundary
/// may get another code.
const TOLERANCE: f32 = 0.05;

/// Codecs of keys and values, and whether a stage is there.
#[derive(Clone, Copy, Debug)]
struct Choice {
    k: &'static str,
    v: &'static str,
    /// Exact tokens at the end and at the beginning.
    stage: Option<(usize, usize)>,
}

const F16: Choice = Choice { k: "f16", v: "f16", stage: None };
const STAGED: [Choice; 6] = [
    Choice { k: "kvarn2", v: "kvarn2", stage: Some((0, 0)) },
    Choice { k: "kvarn4", v: "kvarn3", stage: Some((128, 0)) },
    Choice { k: "kvarn5", v: "kvarn8", stage: Some((0, 128)) },
    Choice { k: "kvarn6", v: "f16", stage: Some((100, 1)) },
    Choice { k: "q4_0", v: "kvarn2", stage: Some((0, 0)) },
    Choice { k: "q4_0", v: "q5_1", stage: Some((128, 128)) },
];

struct Runner {
    executor: Executor,
    cache: Cache,
}

fn open(name: &str, side: Side, head_dim: usize) -> Codec {
    let (root, options) = match name {
        _ if name.starts_with("kvarn") => (opencoti_kv_kvarn::root(), "{}"),
        "f16" => (opencoti_kv_scalar::root(), "{}"),
        _ => (opencoti_kv_scalar::root(), r#"{"rotation":"hadamard"}"#),
    };
    let plugin = CodecPlugin::new(Instance::create(root, "{}", Arc::new(NoSink)).unwrap()).unwrap();
    plugin.open(name, options, side, head_dim).unwrap()
}

impl Runner {
    fn new(model: &Model, choice: Choice) -> Runner {
        let config = Config { threads: 2, max_rows: MAX_ROWS, max_outputs: MAX_ROWS };
        let attention = Box::new(Attention::new(&model.graph));
        let executor = Executor::new(model.graph.clone(), model.weights.clone(), attention, config).unwrap();
        let group = |(i, group): (usize, CacheGroup)| {
            let (dk, dv) = (group.geometry.k_head_dim, group.geometry.v_head_dim);
            GroupConfig {
                name: format!("group {i}"),
                geometry: group.geometry,
                n_layers: group.layers.len(),
                k: open(choice.k, Side::K, dk),
                v: open(choice.v, Side::V, dv),
                stage: choice.stage.map(|(tokens, sink)| StageConfig {
                    tokens,
                    sink,
                    k: open("f16", Side::K, dk),
                    v: open("f16", Side::V, dv),
                }),
            }
        };
        let cache = Cache::new(CacheConfig {
            groups: model.graph.cache_groups().into_iter().enumerate().map(group).collect(),
            capacity_tokens: 8192,
            slots: 4,
            window_sequences: None,
            recent_sequences: 4,
            step_tokens: MAX_ROWS,
            rollback_tokens: 16,
            whole_texts: false,
            snapshots: 0,
            states: StateConfig::of(&model.graph),
        });
        Runner { executor, cache: cache.unwrap() }
    }

    /// One step; the logits of every row of each sequence.
    fn step(&mut self, batch: &[(SeqId, &[u32])]) -> Vec<Vec<Vec<f32>>> {
        let items: Vec<_> =
            batch.iter().map(|&(seq, tokens)| BatchItem { seq, tokens, outputs: Outputs::All }).collect();
        let planned = self.cache.plan(&items).unwrap();
        let outputs = self.executor.run(&planned.step).unwrap();
        let of = |rows: &std::ops::Range<u32>| rows.clone().map(|r| outputs.logits(r as usize).to_vec()).collect();
        let logits = planned.rows.iter().map(of).collect();
        self.cache.commit(planned.id).unwrap();
        self.cache.check().unwrap();
        logits
    }

    /// Pages that are sealed between steps.
    fn seal(&mut self) {
        while let Some(planned) = self.cache.plan_seals() {
            self.executor.seal(&planned.step).unwrap();
            self.cache.commit(planned.id).unwrap();
        }
    }

    /// Logits of all rows of a sequence that goes on in steps of these sizes, in turn.
    fn feed(&mut self, seq: SeqId, tokens: &[u32], sizes: &[usize]) -> Vec<Vec<f32>> {
        let (mut rest, mut logits) = (tokens, Vec::new());
        for size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at((*size).min(rest.len()));
            logits.extend(self.step(&[(seq, now)]).remove(0));
            rest = later;
            if size % 2 == 1 {
                self.seal();
            }
        }
        logits
    }
}

fn model(name: &str) -> Model {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../host/model/tests/fixtures");
    Model::load(&folder.join(format!("{name}.gguf"))).unwrap()
}

fn tokens(seed: u32, n: usize) -> Vec<u32> {
    (0..n as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(9_700_417)) >> 8) % 150)
        .collect()
}

/// The largest difference of two rows of logits over the spread of the first.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    let (low, high) = a.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), &x| (l.min(x), h.max(x)));
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / (high - low)
}

fn worst(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| distance(a, b)).fold(0.0, f32::max)
}

#[test]
fn results_do_not_depend_on_how_a_prompt_is_cut_into_steps() {
    for (name, choices) in [("llama-head-96", &STAGED[..]), ("gemma3", &STAGED[1..2])] {
        let model = model(name);
        let prompt = tokens(1, 450);
        let exact = {
            let mut runner = Runner::new(&model, F16);
            let seq = runner.cache.create();
            runner.feed(seq, &prompt, &[256])
        };
        for &choice in choices {
            let run = |sizes: &[usize]| {
                let mut runner = Runner::new(&model, choice);
                let seq = runner.cache.create();
                runner.feed(seq, &prompt, sizes)
            };
            let reference = run(&[27, 100]);
            let lost = worst(&exact, &reference);
            // What is read from records is not what was written: without this, nothing below would mean anything.
            assert!(lost > 3e-4, "{name} {choice:?} loses {lost}");
            for sizes in [&[256][..], &[37, 201]] {
                let found = worst(&reference, &run(sizes));
                assert!(
                    found < TOLERANCE.min(lost / 2.0),
                    "{name} {choice:?} in steps of {sizes:?}: {found} of {lost}"
                );
            }
            assert!(worst(&exact[..128], &reference[..128]) < 1e-3, "{name} {choice:?}: the first page is exact");
        }
    }
}

#[test]
fn sharers_forks_and_what_is_taken_back_compute_what_a_sequence_of_their_own_would() {
    let model = model("llama-head-96");
    for choice in STAGED {
        let mut runner = Runner::new(&model, choice);
        let prompt = tokens(2, 500);
        let a = runner.cache.create();
        runner.feed(a, &prompt, &[256]);
        // Two that share all of it and go on together, one that is forked inside a sealed page.
        let (b, c) = (runner.cache.fork(a, 500).unwrap(), runner.cache.fork(a, 500).unwrap());
        let d = runner.cache.fork(a, 200).unwrap();
        let tails = [tokens(3, 80), tokens(4, 80), tokens(5, 40)];
        let together = runner.step(&[(b, &tails[0]), (c, &tails[1]), (d, &tails[2])]);
        for (tail, found) in tails[..2].iter().zip(&together) {
            let mut alone = Runner::new(&model, choice);
            let seq = alone.cache.create();
            let all = [&prompt[..], tail].concat();
            let expected = alone.feed(seq, &all, &[64]);
            let found = worst(&expected[500..], found);
            assert!(found < TOLERANCE, "{choice:?}: a sharer is off by {found}");
        }
        // The records of what `d` shares do not change while it goes on.
        let again = runner.cache.fork(a, 200).unwrap();
        let repeated = runner.feed(again, &tails[2], &[40]);
        assert!(worst(&together[2], &repeated) < 1e-4, "{choice:?}: a fork inside a sealed page");
        // What is taken back within `rollback_tokens` leaves no trace.
        let all = [&prompt[..], &tails[0], &tokens(6, 16)].concat();
        runner.step(&[(b, &tokens(7, 16))]);
        assert_eq!(runner.cache.truncate(b, 580).unwrap(), 580);
        let found = runner.step(&[(b, &tokens(6, 16))]).remove(0);
        let mut alone = Runner::new(&model, choice);
        let seq = alone.cache.create();
        let expected = alone.feed(seq, &all, &[64]);
        let found = worst(&expected[580..], &found);
        assert!(found < TOLERANCE, "{choice:?}: after going back it is off by {found}");
    }
}
