//! A recurrent layer that can be checked: its state is a fold over the tokens it has seen.

use opencoti_compute::graph::StateGeometry;
use opencoti_compute::plan::{StateView, Step};
use opencoti_kv::{Cache, CacheConfig, SeqId, StateConfig};

use crate::support::{config, group, plan};

/// Words of a plane: a hash in two of them, and the number of tokens.
const WORDS: usize = 3;

/// The state after some tokens.
type State = [u32; WORDS];

/// Two layers, so that a plane is more than one of them.
pub(crate) fn states(rollback: usize, idle_planes: usize) -> StateConfig {
    let layers = vec![StateGeometry { conv: 0, recurrent: 1 }, StateGeometry { conv: 1, recurrent: 1 }];
    StateConfig { layers, rollback, idle_planes }
}

/// Sizes for one full group and recurrent layers beside it.
pub(crate) fn hybrid(rollback: usize, snapshots: usize) -> CacheConfig {
    let states = states(rollback, snapshots + 4);
    CacheConfig { snapshots, states, ..config(vec![group("kv", 1, None)]) }
}

fn next(state: State, token: u32) -> State {
    let hash = u64::from(state[0]) | u64::from(state[1]) << 32;
    let hash = (hash ^ u64::from(token) ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
    [hash as u32, (hash >> 32) as u32, state[2] + 1]
}

/// The state after `tokens`, from nothing.
pub(crate) fn fold(tokens: &[u32]) -> State {
    tokens.iter().fold([0; WORDS], |state, &token| next(state, token))
}

fn word(view: &StateView, plane: u32, i: usize) -> *mut u32 {
    assert!((plane as usize) < view.n_planes && view.plane_words == WORDS);
    // SAFETY: inside the store.
    unsafe { view.base.as_ptr().add(plane as usize * WORDS + i).cast() }
}

fn read(view: &StateView, plane: u32) -> State {
    // SAFETY: nobody else uses the cache's memory.
    [0, 1, 2].map(|i| unsafe { word(view, plane, i).read() })
}

/// What an executor does with the state of a step.
pub(crate) fn run(step: &Step) {
    let Some(view) = &step.states else { return assert!(step.state_runs.is_empty()) };
    // The planes read must stand while others are written.
    let begin: Vec<State> = step.state_runs.iter().map(|r| r.from.map_or([0; WORDS], |p| read(view, p))).collect();
    for (run, mut state) in step.state_runs.iter().zip(begin) {
        assert!(run.to.windows(2).all(|w| w[0].after < w[1].after), "{run:?}");
        assert_eq!(run.to.last().map(|w| w.after), Some(run.rows.end - run.rows.start), "{run:?}");
        for (i, row) in run.rows.clone().enumerate() {
            state = next(state, step.tokens[row as usize]);
            for write in run.to.iter().filter(|w| w.after as usize == i + 1) {
                assert_ne!(Some(write.plane), run.from, "a plane that is read is never written");
                // SAFETY: nobody else uses the cache's memory.
                (0..WORDS).for_each(|i| unsafe { word(view, write.plane, i).write(state[i]) });
            }
        }
    }
}

/// Appends tokens in one step.
pub(crate) fn step(cache: &mut Cache, batch: &[(SeqId, &[u32])]) {
    let planned = plan(cache, batch).unwrap();
    run(&planned.step);
    cache.commit(planned.id).unwrap();
    cache.check().unwrap();
    batch.iter().for_each(|(seq, _)| check(cache, *seq));
}

/// Every plane of a sequence is the fold over as many of its tokens.
pub(crate) fn check(cache: &Cache, seq: SeqId) {
    let Some(view) = cache.state_view() else { return };
    let tokens = &cache.tokens(seq).unwrap()[..cache.committed(seq).unwrap()];
    let planes = cache.planes(seq).unwrap();
    assert_eq!(planes.last().map_or(0, |p| p.0), tokens.len(), "{planes:?}");
    for (at, plane) in planes {
        assert_eq!(read(&view, plane), fold(&tokens[..at]), "the plane of sequence {seq} after {at} tokens");
    }
}
