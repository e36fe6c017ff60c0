//! Random sequences of operations against a model of what each sequence must hold.

use std::io::Cursor;

use opencoti_compute::plan::{Mask, Step};
use opencoti_kv::{Cache, KvError, ModelFingerprint, Prefix, SeqId, StateError, StepId};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::fold;
use crate::support::{config, group, plan, staged_group};

#[derive(Clone, Debug)]
enum Op {
    Create,
    Admit { prompt: Vec<u32>, declared: usize },
    Fork { donor: Index, n: Index },
    Step { batch: Vec<(Index, usize)>, commit: bool, release: Option<Index> },
    Truncate { seq: Index, n: Index },
    Release(Index),
    Retain(Index),
    Reserve { seq: Index, n: usize },
    Wish { seq: Index, ahead: Vec<usize> },
    Reload(Index),
    Evict,
    Seal { commit: bool },
}

fn op() -> impl Strategy<Value = Op> {
    let batch = prop::collection::vec((any::<Index>(), 1usize..150), 1..4);
    // Prompts of few different tokens, so that they have prefixes in common.
    let prompt = (0u32..2, 1usize..300).prop_map(|(kind, n)| (0..n as u32).map(|i| i / 100 * kind).collect());
    prop_oneof![
        2 => Just(Op::Create),
        4 => (prompt, 0usize..200).prop_map(|(prompt, declared)| Op::Admit { prompt, declared }),
        4 => (any::<Index>(), any::<Index>()).prop_map(|(donor, n)| Op::Fork { donor, n }),
        12 => (batch, prop::bool::weighted(0.8), prop::option::weighted(0.1, any::<Index>()))
            .prop_map(|(batch, commit, release)| Op::Step { batch, commit, release }),
        2 => (any::<Index>(), any::<Index>()).prop_map(|(seq, n)| Op::Truncate { seq, n }),
        2 => any::<Index>().prop_map(Op::Release),
        3 => any::<Index>().prop_map(Op::Retain),
        2 => (any::<Index>(), 0usize..400).prop_map(|(seq, n)| Op::Reserve { seq, n }),
        3 => (any::<Index>(), prop::collection::vec(0usize..300, 1..5)).prop_map(|(seq, ahead)| Op::Wish { seq, ahead }),
        1 => any::<Index>().prop_map(Op::Reload),
        1 => Just(Op::Evict),
        4 => prop::bool::weighted(0.9).prop_map(|commit| Op::Seal { commit }),
    ]
}

fn model() -> ModelFingerprint {
    ModelFingerprint { name: "model".to_owned(), digest: [1; 32] }
}

/// The cache, and what must be in it: the tokens of each running sequence, and how many more it may still take for sure.
struct World {
    cache: Cache,
    live: Vec<(SeqId, Vec<u32>, usize)>,
}

/// Where a slot's first key is.
fn slot(step: &Step, store: u32, page: u32, slot: u32) -> *mut [u32; 2] {
    let view = &step.stores[store as usize];
    let side = &view.layers[0].k;
    // SAFETY: plans are checked; a slot of the plain codec has four floats.
    unsafe { view.tile(side, page, 0).add(slot as usize * 16).cast() }
}

impl World {
    fn new(
        windows: &[Option<usize>],
        stage: Option<(usize, usize)>,
        rollback: Option<usize>,
        snapshots: usize,
    ) -> Self {
        let make = |(i, &window): (usize, &Option<usize>)| match stage {
            Some((tokens, sink)) => staged_group(&format!("g{i}"), window, tokens, sink),
            None => group(&format!("g{i}"), 1, window),
        };
        let groups = windows.iter().enumerate().map(make).collect();
        let mut config = config(groups);
        config.capacity_tokens = 1536;
        config.step_tokens = 450;
        config.snapshots = snapshots;
        config.states = rollback.map(|rollback| fold::states(rollback, 5)).unwrap_or_default();
        World { cache: Cache::new(config).unwrap(), live: Vec::new() }
    }

    fn pick(&self, index: &Index) -> Option<usize> {
        (!self.live.is_empty()).then(|| index.index(self.live.len()))
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Create => {
                let seq = self.cache.create();
                self.live.push((seq, Vec::new(), 0));
            }
            Op::Admit { prompt, declared } => self.admit(prompt, *declared),
            Op::Fork { donor, n } => {
                let Some(i) = self.pick(donor) else { return };
                let (donor, tokens, _) = &self.live[i];
                let n = n.index(tokens.len() + 1);
                match self.cache.fork(*donor, n) {
                    Ok(seq) => {
                        let tokens = tokens[..n].to_vec();
                        self.live.push((seq, tokens, 0));
                    }
                    Err(KvError::Full(_) | KvError::CannotShare { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            Op::Step { batch, commit, release } => self.step(batch, *commit, release.as_ref()),
            Op::Truncate { seq, n } => {
                let Some(i) = self.pick(seq) else { return };
                let (seq, tokens, sure) = &mut self.live[i];
                let n = n.index(tokens.len() + 1);
                let exact = self.cache.planes(*seq).unwrap().iter().any(|&(at, _)| at == n);
                let kept = self.cache.truncate(*seq, n).unwrap();
                assert!(kept == n || kept < n && !exact, "truncated to {kept} of {n}");
                tokens.truncate(kept);
                *sure = 0;
            }
            Op::Release(seq) => {
                let Some(i) = self.pick(seq) else { return };
                self.cache.release(self.live.swap_remove(i).0).unwrap();
            }
            Op::Retain(seq) => {
                let Some(i) = self.pick(seq) else { return };
                self.cache.retain(self.live.swap_remove(i).0).unwrap();
            }
            Op::Reserve { seq, n } => {
                let Some(i) = self.pick(seq) else { return };
                let (seq, _, sure) = &mut self.live[i];
                match self.cache.reserve(*seq, *n) {
                    Ok(()) => *sure = *n,
                    Err(KvError::Full(_)) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            Op::Wish { seq, ahead } => {
                let Some(i) = self.pick(seq) else { return };
                let (seq, tokens, _) = &self.live[i];
                let positions: Vec<usize> = ahead.iter().map(|n| tokens.len() + n).collect();
                self.cache.keep_snapshots(*seq, &positions).unwrap();
            }
            Op::Reload(seq) => {
                let Some(i) = self.pick(seq) else { return };
                let (seq, tokens, _) = &self.live[i];
                let tokens = tokens.clone();
                let mut file = Vec::new();
                self.cache.save(*seq, &mut file, &model()).unwrap();
                match self.cache.restore(&mut Cursor::new(file), &model()) {
                    Ok(copy) => self.live.push((copy, tokens, 0)),
                    Err(StateError::Cache(KvError::Full(_))) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            Op::Evict => {
                self.cache.evict_lru();
            }
            Op::Seal { commit } => {
                let Some(planned) = self.cache.plan_seals() else { return };
                self.cache.check().unwrap();
                self.write(&planned.step);
                self.end(planned.id, *commit, &[]);
            }
        }
    }

    /// What a server does with a request: find a prefix, price the rest, feed it.
    fn admit(&mut self, prompt: &[u32], declared: usize) {
        let prefix = self.cache.longest_prefix(&prompt[..prompt.len() - 1]);
        let shared = prefix.map_or(0, |p: Prefix| p.tokens);
        if let Some(prefix) = prefix {
            assert_eq!(self.cache.tokens(prefix.donor).unwrap()[..shared], prompt[..shared]);
        }
        let sure = prompt.len() - shared + declared;
        match self.cache.admit(prefix, sure) {
            Ok(seq) => {
                // Less than the prefix when its pages leave no room for the rest.
                let shared = self.cache.committed(seq).unwrap();
                assert_eq!(self.cache.tokens(seq).unwrap(), &prompt[..shared]);
                self.live.push((seq, prompt[..shared].to_vec(), sure));
                let i = self.live.len() - 1;
                let step = plan(&mut self.cache, &[(seq, &prompt[shared..])]).expect("promised pages");
                self.write(&step.step);
                self.end(step.id, true, &[(i, prompt[shared..].to_vec())]);
            }
            Err(KvError::Full(_)) => {}
            Err(other) => panic!("{other}"),
        }
    }

    fn step(&mut self, batch: &[(Index, usize)], commit: bool, release: Option<&Index>) {
        let mut items: Vec<(usize, Vec<u32>)> = Vec::new();
        for (seq, n) in batch {
            let Some(i) = self.pick(seq) else { return };
            if items.iter().all(|(other, _)| *other != i) {
                let seed = self.live[i].1.len() as u32 * 31 + i as u32;
                items.push((i, (0..*n as u32).map(|k| seed + k).collect()));
            }
        }
        let all_sure = items.iter().all(|(i, tokens)| tokens.len() <= self.live[*i].2);
        let batch: Vec<(SeqId, &[u32])> = items.iter().map(|(i, t)| (self.live[*i].0, &t[..])).collect();
        let planned = match plan(&mut self.cache, &batch) {
            Ok(planned) => planned,
            Err(KvError::Full(full)) => return assert!(!all_sure, "a promise was broken: {full}"),
            Err(other) => panic!("{other}"),
        };
        self.write(&planned.step);
        self.read(&items, &planned.step);
        self.end(planned.id, commit, &items);
        if let Some(i) = release.and_then(|r| self.pick(r)) {
            self.cache.release(self.live.swap_remove(i).0).unwrap();
        }
    }

    fn end(&mut self, id: StepId, commit: bool, items: &[(usize, Vec<u32>)]) {
        if commit {
            self.cache.commit(id).unwrap();
            for (i, tokens) in items {
                let (_, known, sure) = &mut self.live[*i];
                known.extend(tokens);
                *sure = sure.saturating_sub(tokens.len());
            }
        } else {
            self.cache.abort(id).unwrap();
        }
    }

    /// Does what an executor would: writes tokens and positions to their slots, seals pages, and folds tokens into planes.
    fn write(&self, step: &Step) {
        fold::run(step);
        for run in step.groups.iter().flat_map(|plan| &plan.appends) {
            for row in run.rows.clone() {
                let at = slot(step, run.store, run.page, run.first_slot + row - run.rows.start);
                // SAFETY: nobody else uses the cache's memory.
                unsafe { at.write_unaligned([step.tokens[row as usize], step.positions[row as usize]]) };
            }
        }
        for run in step.groups.iter().flat_map(|plan| &plan.seals) {
            for i in 0..128 {
                let from = slot(step, run.from_store, run.from_page, i.min(run.filled - 1));
                // SAFETY: as above.
                unsafe { slot(step, run.store, run.page, i).write_unaligned(from.read_unaligned()) };
            }
        }
    }

    /// Every row must meet each position that its mask lets it see exactly once, with the token that stands there.
    fn read(&self, items: &[(usize, Vec<u32>)], step: &Step) {
        let mut row = 0u32;
        for (i, new) in items {
            let mut tokens = self.live[*i].1.clone();
            tokens.extend(new);
            for _ in new {
                let position = step.positions[row as usize];
                for plan in &step.groups {
                    let mut seen: Vec<u32> = Vec::new();
                    let mut window = None;
                    for segment in plan.segments.iter().filter(|s| s.queries.iter().any(|q| q.contains(&row))) {
                        let visible = segment.mask.visible(position);
                        window = if let Mask::Window(w) = segment.mask { Some(w) } else { None };
                        for span in segment.pages.head(0) {
                            for i in 0..span.len {
                                let p = span.start_pos + i;
                                if visible.contains(&p) {
                                    // SAFETY: nobody else uses the cache's memory.
                                    let found = unsafe { slot(step, segment.store, span.page, i).read_unaligned() };
                                    assert_eq!(found, [tokens[p as usize], p], "row {row} at {p}");
                                    seen.push(p);
                                }
                            }
                        }
                    }
                    seen.sort_unstable();
                    let first = window.map_or(0, |w| (position + 1).saturating_sub(w));
                    assert!(seen.iter().copied().eq(first..=position), "row {row} sees {seen:?}");
                }
                row += 1;
            }
        }
    }

    fn check(&self) {
        self.cache.check().unwrap();
        for (seq, tokens, _) in &self.live {
            assert_eq!(self.cache.tokens(*seq).unwrap(), tokens);
            assert_eq!(self.cache.committed(*seq).unwrap(), tokens.len());
            fold::check(&self.cache, *seq);
        }
    }

    fn end_all(mut self) {
        for (seq, ..) in std::mem::take(&mut self.live) {
            self.cache.release(seq).unwrap();
        }
        while self.cache.evict_lru().is_some() {}
        self.check();
        for store in self.cache.stats() {
            assert_eq!((store.free, store.promised), (store.total, 0), "{}", store.name);
            assert!(store.stage.is_none_or(|s| (s.free, s.promised) == (s.total, 0)), "{}", store.name);
        }
        if let Some(states) = self.cache.state_stats() {
            assert_eq!((states.free, states.promised), (states.total, 0));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_operation_keeps_the_rules(
        windows in prop::sample::select(vec![
            vec![None],
            vec![None, Some(100)],
            vec![Some(1)],
            vec![Some(300), None, Some(17)],
        ]),
        stage in prop::option::of((prop::sample::select(vec![0, 128, 300]), prop::sample::select(vec![0, 100]))),
        rollback in prop::option::of(0usize..4),
        snapshots in 0usize..4,
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let mut world = World::new(&windows, stage, rollback, snapshots);
        for op in &ops {
            world.run(op);
            world.check();
        }
        world.end_all();
    }
}
