//! A long afternoon: requests of all sizes, clients that go away, pools that are made, forked, pinned and released, all at random.
//! The model says when a row sees what it should not, the cache is recounted after each step, and at the end all is free.
//!
//! `OPENCOTI_SOAK_SECONDS` makes it longer.

use std::time::{Duration, Instant};

use opencoti_admission_gate::Gate as Policy;
use opencoti_plugin_api::admission::{AdmissionPolicy, Decision, Request, Snapshot};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::rig::{Rig, Running, Sizes, prompt, request};
use crate::admission::AdmissionDecider;
use crate::api::{Command, EngineError, Event, GenerateRequest};
use crate::pools::{Capture, MakePool, Origin, PoolChange, PoolCommand, PoolId, PoolInfo};

/// Requests without the variable.
const REQUESTS: usize = 500;

/// The gate that the distribution lists.
struct Gate(Policy);

impl AdmissionDecider for Gate {
    fn decide(&mut self, request: &Request, snapshot: &Snapshot) -> Result<Decision, String> {
        self.0.decide(request, snapshot).map_err(|e| e.to_string())
    }
}

struct Soak {
    rig: Rig,
    random: ChaCha8Rng,
    /// Pools that may still be there, with their prefixes.
    pools: Vec<(PoolId, Vec<u32>)>,
    running: Vec<Running>,
    making: Vec<(Running, Vec<u32>)>,
    /// Requests that were answered or refused.
    ended: usize,
    refused: usize,
}

impl Soak {
    fn below(&mut self, n: usize) -> usize {
        self.random.random_range(0..n)
    }

    fn tokens(&mut self, most: usize) -> Vec<u32> {
        let (seed, n) = (self.below(6) as u64, 1 + self.below(most));
        prompt(seed, n)
    }

    /// Some prefix that others have, and something of one's own.
    fn prompt(&mut self) -> (Option<PoolId>, Vec<u32>) {
        let own = self.tokens(120);
        if self.pools.is_empty() || self.below(3) == 0 {
            return (None, own);
        }
        let at = self.below(self.pools.len());
        let (id, head) = self.pools[at].clone();
        (Some(id), [head, own].concat())
    }

    fn ask(&mut self) {
        let (pool, tokens) = self.prompt();
        let n_predict = self.below(40) as u32;
        let mut ask = GenerateRequest { pool, ..request(tokens, n_predict) };
        ask.session_id = (self.below(2) == 0).then(|| format!("session-{}", self.below(12)));
        ask.cache_prompt = self.below(5) > 0;
        ask.n_choices = 1 + (self.below(6) / 5) as u32;
        ask.overcommit = self.below(10) == 0;
        ask.priority = self.below(3) as i32;
        if self.below(4) == 0 {
            ask.n_predict = None;
        }
        ask.deadline = (self.below(8) == 0).then_some(Duration::from_millis(20));
        self.running.push(self.rig.start(ask));
    }

    fn make(&mut self) {
        let (parent, tokens) = self.prompt();
        let parent = parent.map(|id| {
            let len = self.pools.iter().find(|(of, _)| *of == id).map_or(0, |(_, head)| head.len());
            let at = self.below(len + 1);
            (id, (self.below(2) == 0).then_some(at))
        });
        let spec = MakePool { parent, pinned: self.below(4) == 0, ephemeral: self.below(4) == 0 };
        let making = self.rig.start(GenerateRequest { make_pool: Some(spec), ..request(tokens.clone(), 0) });
        self.making.push((making, tokens));
    }

    fn capture(&mut self) {
        let capture = Capture { from: Origin::Slot(self.below(6) as u32), len: None, pinned: false, ephemeral: true };
        let captured = self.rig.ask(|reply| Command::Pool(PoolCommand::Capture(capture, reply)));
        if let Ok(PoolInfo { id, .. }) = captured {
            self.change(id, PoolChange::Release);
        }
    }

    fn change(&mut self, id: PoolId, change: PoolChange) {
        let changed = self.rig.ask(|reply| Command::Pool(PoolCommand::Change(id, change, reply)));
        assert!(matches!(changed, Ok(_) | Err(EngineError::NotFound(_))), "{changed:?}");
    }

    fn kill(&mut self) {
        if self.pools.is_empty() {
            return;
        }
        let at = self.below(self.pools.len());
        let (id, _) = self.pools.swap_remove(at);
        self.change(id, PoolChange::Unpin);
        self.change(id, PoolChange::Release);
    }

    /// Takes what has come, without waiting.
    fn hear(&mut self, wait: bool) {
        for (mut making, tokens) in std::mem::take(&mut self.making) {
            match outcome(&mut making, wait) {
                Some(Ok(Some(id))) => self.pools.push((id, tokens)),
                Some(result) => self.count(result.map(|_| ())),
                None => self.making.push((making, tokens)),
            }
        }
        for mut running in std::mem::take(&mut self.running) {
            match outcome(&mut running, wait) {
                Some(result) => self.count(result.map(|_| ())),
                None => self.running.push(running),
            }
        }
    }

    /// A request may be refused, but never by a fault of ours.
    fn count(&mut self, result: Result<(), EngineError>) {
        self.ended += 1;
        match result {
            Ok(()) | Err(EngineError::TimedOut(_)) => {}
            Err(EngineError::Internal(message)) => panic!("{message}"),
            Err(_) => self.refused += 1,
        }
    }

    fn act(&mut self) {
        match self.below(20) {
            0..=9 => self.ask(),
            10..=12 => self.make(),
            13 => self.capture(),
            14..=15 => self.kill(),
            // A client goes away.
            16..=17 if !self.running.is_empty() => {
                let at = self.below(self.running.len());
                self.running.swap_remove(at);
                self.ended += 1;
            }
            _ => std::thread::sleep(Duration::from_micros(200)),
        }
        self.hear(false);
        while self.running.len() > 40 {
            std::thread::sleep(Duration::from_micros(200));
            self.hear(false);
        }
    }
}

/// How a request ended, if it has: with the pool that it made, with nothing, or with an error.
fn outcome(running: &mut Running, wait: bool) -> Option<Result<Option<PoolId>, EngineError>> {
    loop {
        let event = if wait { running.events.blocking_recv() } else { running.events.try_recv().ok() };
        match event {
            Some(Event::Pool(info)) => return Some(Ok(Some(info.id))),
            Some(Event::Failed(error)) => return Some(Err(error)),
            Some(_) => {}
            None if running.events.is_closed() && running.events.is_empty() => return Some(Ok(None)),
            None => return None,
        }
    }
}

fn soak(sizes: Sizes, seed: u64) {
    let time = std::env::var("OPENCOTI_SOAK_SECONDS").ok().and_then(|s| s.parse().ok()).map(Duration::from_secs);
    let sizes = Sizes {
        n_slots: 6,
        max_pools: 5,
        n_ctx: 512,
        capacity: 2560,
        max_queue: 16,
        admission: Some(Box::new(Gate(Policy::default()))),
        ..sizes
    };
    let random = ChaCha8Rng::seed_from_u64(seed);
    let rig = Rig::new(sizes);
    let mut soak =
        Soak { rig, random, pools: Vec::new(), running: Vec::new(), making: Vec::new(), ended: 0, refused: 0 };
    let began = Instant::now();
    while time.map_or(soak.ended < REQUESTS, |time| began.elapsed() < time) {
        soak.act();
    }
    soak.hear(true);
    while !soak.pools.is_empty() {
        soak.kill();
    }
    assert!(soak.refused < soak.ended, "{} of {} requests were refused", soak.refused, soak.ended);
    // All pages and planes are free.
    soak.rig.close();
}

#[test]
fn a_soak_ends_with_every_page_free() {
    soak(Sizes::default(), 1);
}

#[test]
fn a_soak_with_sliding_windows_ends_with_every_page_free() {
    soak(Sizes { window: Some(100), snapshots: 4, ..Sizes::default() }, 2);
}

#[test]
fn a_soak_with_recurrent_state_ends_with_every_plane_free() {
    soak(Sizes { states: Some(7), snapshots: 4, ..Sizes::default() }, 3);
}
