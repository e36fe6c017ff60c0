//! Recurrent layers against published numbers, and against a recurrence in f64.

use std::ops::Range;
use std::ptr::NonNull;

use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::cpu::pool::Pool;
use crate::cpu::simd::Isa;
use crate::cpu::vecmath;
use crate::graph::HeadMap;
use crate::plan::{StateRun, StateWrite};

/// Planes of one layer, with a guard of foreign words before and after the layer's.
struct Store {
    words: usize,
    memory: Vec<f32>,
}

const GUARD: usize = 3;
const FOREIGN: f32 = 1234.5;

impl Store {
    fn new(words: usize, planes: usize) -> Store {
        Store { words, memory: vec![FOREIGN; planes * (words + 2 * GUARD)] }
    }

    fn view(&mut self) -> StateView {
        let plane_words = self.words + 2 * GUARD;
        let base = NonNull::new(self.memory.as_mut_ptr()).expect("memory");
        StateView { base, plane_words, n_planes: self.memory.len() / plane_words }
    }

    fn plane(&self, plane: usize) -> &[f32] {
        let at = plane * (self.words + 2 * GUARD);
        assert!(self.memory[at..at + GUARD].iter().all(|v| *v == FOREIGN), "words before the layer's are untouched");
        &self.memory[at + GUARD..at + GUARD + self.words]
    }
}

fn run(rows: Range<u32>, from: Option<u32>, to: &[(u32, u32)]) -> StateRun {
    StateRun { rows, from, to: to.iter().map(|&(after, plane)| StateWrite { after, plane }).collect() }
}

/// Inputs of a delta net, a row after the other.
struct Inputs {
    shape: DeltaShape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    decay: Vec<f32>,
    beta: Vec<f32>,
}

const SCALE: f32 = 0.5;

impl Inputs {
    /// Rows with keys and queries of length one.
    fn random(shape: DeltaShape, rows: usize, seed: u64) -> Inputs {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut uniform =
            |n: usize, low: f32, high: f32| (0..n).map(|_| rng.random_range(low..high)).collect::<Vec<f32>>();
        let mut heads = || {
            let x = uniform(rows * shape.k_heads * shape.k_dim, -1.0, 1.0);
            let mut unit = vec![0.0; x.len()];
            for (x, unit) in x.chunks(shape.k_dim).zip(unit.chunks_mut(shape.k_dim)) {
                vecmath::l2_norm(Isa::detect(), x, 1e-6, unit);
            }
            unit
        };
        let (q, k) = (heads(), heads());
        Inputs {
            q,
            k,
            v: uniform(rows * shape.v_heads * shape.v_dim, -1.0, 1.0),
            decay: uniform(rows * shape.v_heads, -0.7, 0.0).iter().map(|g| g * g * 3.0).map(|g| -g).collect(),
            beta: uniform(rows * shape.v_heads, 0.0, 1.0),
            shape,
        }
    }

    fn rows(&self) -> usize {
        self.beta.len() / self.shape.v_heads
    }

    fn state_words(&self) -> usize {
        self.shape.v_heads * self.shape.k_dim * self.shape.v_dim
    }

    /// The rows `rows` by themselves.
    fn part(&self, rows: Range<usize>) -> Inputs {
        let n = self.rows();
        let cut = |x: &[f32]| x[rows.start * (x.len() / n)..rows.end * (x.len() / n)].to_vec();
        Inputs {
            shape: self.shape,
            q: cut(&self.q),
            k: cut(&self.k),
            v: cut(&self.v),
            decay: cut(&self.decay),
            beta: cut(&self.beta),
        }
    }

    fn run(&self, isa: Isa, threads: usize, runs: &[StateRun], store: &mut Store) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.v.len()];
        let view = store.view();
        let net = DeltaNet {
            shape: self.shape,
            q: &self.q,
            k: &self.k,
            v: &self.v,
            decay: &self.decay,
            beta: &self.beta,
            scale: SCALE,
            out: out.as_mut_ptr(),
        };
        let net = Shared(net);
        let work = |worker: crate::cpu::pool::Worker<'_>| {
            let (net, planes) = (&net, Planes::new(&view, GUARD, self.state_words()));
            // SAFETY: the view's memory outlives the run, the runs name planes that are there, `out` has all rows.
            unsafe { delta_net(isa, worker, runs, planes, &net.0, &mut Scratch::default()) };
        };
        Pool::new(threads).expect("threads").run(work).expect("no panic");
        out
    }

    /// Results and final state by the recurrence in f64, from a state of zeros.
    fn oracle(&self) -> (Vec<f64>, Vec<f64>) {
        let DeltaShape { k_heads, v_heads, k_dim, v_dim, map } = self.shape;
        let mut state = vec![0.0; self.state_words()];
        let mut out = Vec::new();
        for row in 0..self.rows() {
            for h in 0..v_heads {
                let key_head = if map == HeadMap::Grouped { h / (v_heads / k_heads) } else { h % k_heads };
                let key = |x: &[f32], i: usize| f64::from(x[(row * k_heads + key_head) * k_dim + i]);
                let (fade, beta) = (f64::from(self.decay[row * v_heads + h]).exp(), self.beta[row * v_heads + h]);
                let s = &mut state[h * k_dim * v_dim..(h + 1) * k_dim * v_dim];
                s.iter_mut().for_each(|s| *s *= fade);
                for j in 0..v_dim {
                    let known: f64 = (0..k_dim).map(|i| s[i * v_dim + j] * key(&self.k, i)).sum();
                    let delta = f64::from(beta) * (f64::from(self.v[(row * v_heads + h) * v_dim + j]) - known);
                    (0..k_dim).for_each(|i| s[i * v_dim + j] += key(&self.k, i) * delta);
                    let answer: f64 = (0..k_dim).map(|i| s[i * v_dim + j] * key(&self.q, i)).sum();
                    out.push(f64::from(SCALE) * answer);
                }
            }
        }
        (out, state)
    }
}

/// Lets workers share a pointer to the result.
struct Shared<'a>(DeltaNet<'a>);

// SAFETY: workers write different columns.
unsafe impl Sync for Shared<'_> {}

fn assert_close(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(*f) - e).abs() <= tolerance, "{what}, element {i}: {f} is not {e}");
    }
}

#[test]
fn a_convolution_with_silu_matches_the_golden_vector() {
    for isa in Isa::available() {
        let mut out = [0.0; 5];
        conv_in_runs(isa, 1, &[1.0, 2.0, 3.0, 4.0, 5.0], &[0.1, 0.2, 0.3, 0.4], 1, &[5], &mut out);
        let mut activated = [0.0; 5];
        vecmath::activate(isa, crate::graph::Activation::Silu, &out, &mut activated);
        assert_close("conv", &activated, &[0.239475, 0.825286, 1.761594, 2.857722, 3.928055], 1e-6);
    }
}

/// A convolution in runs of these lengths, each with a plane after every row.
fn conv_in_runs(
    isa: Isa,
    threads: usize,
    x: &[f32],
    taps: &[f32],
    channels: usize,
    lengths: &[usize],
    out: &mut [f32],
) -> Store {
    let rows = x.len() / channels;
    let mut store = Store::new((taps.len() / channels - 1) * channels, rows);
    let mut start = 0;
    for &length in lengths {
        let view = store.view();
        let to: Vec<(u32, u32)> = (1..=length).map(|n| (n as u32, (start + n - 1) as u32)).collect();
        let runs = [run(0..length as u32, (start > 0).then(|| start as u32 - 1), &to)];
        let x = &x[start * channels..(start + length) * channels];
        let out = SharedConv(ShortConv { x, taps, channels, out: out[start * channels..].as_mut_ptr() });
        let work = |worker: crate::cpu::pool::Worker<'_>| {
            let (out, planes) = (&out, Planes::new(&view, GUARD, taps.len() - channels));
            // SAFETY: the view's memory outlives the run, the runs name planes that are there, `out` has all rows.
            unsafe { short_conv(isa, worker, &runs, planes, &out.0) };
        };
        Pool::new(threads).expect("threads").run(work).expect("no panic");
        start += length;
    }
    store
}

struct SharedConv<'a>(ShortConv<'a>);

// SAFETY: workers write different channels.
unsafe impl Sync for SharedConv<'_> {}

#[test]
fn a_convolution_is_the_same_however_its_rows_are_cut() {
    let (channels, rows) = (37, 9);
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for taps in [2, 3, 4] {
        let x: Vec<f32> = (0..rows * channels).map(|_| rng.random_range(-1.0..1.0)).collect();
        let w: Vec<f32> = (0..taps * channels).map(|_| rng.random_range(-1.0..1.0)).collect();
        let expected: Vec<f64> = (0..rows * channels)
            .map(|i| {
                let (row, channel) = (i / channels, i % channels);
                let tap = |j: usize| Some(f64::from(x[(row + j + 1).checked_sub(taps)? * channels + channel]));
                (0..taps).map(|j| f64::from(w[j * channels + channel]) * tap(j).unwrap_or(0.0)).sum()
            })
            .collect();
        for (isa, lengths) in
            Isa::available().into_iter().flat_map(|isa| [&[9][..], &[1; 9], &[2, 1, 6]].map(|l| (isa, l)))
        {
            let mut out = vec![f32::NAN; rows * channels];
            let store = conv_in_runs(isa, 2, &x, &w, channels, lengths, &mut out);
            assert_close("conv", &out, &expected, 1e-6);
            for row in 0..rows {
                let kept: Vec<f32> = (0..(taps - 1) * channels)
                    .map(|i| (row + 2 + i / channels).checked_sub(taps).map_or(0.0, |r| x[r * channels + i % channels]))
                    .collect();
                assert_eq!(store.plane(row), kept, "after row {row} in runs of {lengths:?}");
            }
        }
    }
}

#[test]
fn a_delta_net_matches_the_golden_vector() {
    let shape = DeltaShape { k_heads: 1, v_heads: 1, k_dim: 2, v_dim: 2, map: HeadMap::Grouped };
    let inputs = Inputs {
        shape,
        // The vector's queries over √2, and the factor of the tests taken out.
        q: [1.0, 0.0, 0.6, 0.8, 0.0, 1.0].map(|q| q / 2f32.sqrt() / SCALE).to_vec(),
        k: vec![0.6, 0.8, 1.0, 0.0, 0.8, -0.6],
        v: vec![1.0, 2.0, -1.0, 0.5, 0.25, 1.0],
        decay: vec![-0.1, -0.7, -0.2],
        beta: vec![0.5, 0.9, 0.3],
    };
    for isa in Isa::available() {
        let mut store = Store::new(4, 1);
        let out = inputs.run(isa, 1, &[run(0..3, None, &[(3, 0)])], &mut store);
        assert_close("results", &out, &[0.212132, 0.424264, -0.263153, 0.428289, -0.003031, 0.117871], 1e-6);
        assert_close("state", store.plane(0), &[-0.502107, 0.604238, -0.004287, 0.166695], 1e-6);
    }
}

fn shapes() -> impl Strategy<Value = DeltaShape> {
    let map = prop_oneof![Just(HeadMap::Grouped), Just(HeadMap::Tiled)];
    (1usize..4, 1usize..4, 1usize..40, 1usize..70, map).prop_map(|(k_heads, r, k_dim, v_dim, map)| DeltaShape {
        k_heads,
        v_heads: k_heads * r,
        k_dim,
        v_dim,
        map,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_cut_into_runs_is_the_recurrence(
        shape in shapes(),
        lengths in prop::collection::vec(prop_oneof![1usize..9, 10usize..150], 1..5),
        threads in 1usize..5,
        seed: u64,
    ) {
        let rows: usize = lengths.iter().sum();
        let inputs = Inputs::random(shape, rows, seed);
        let (expected, last) = inputs.oracle();
        for isa in Isa::available() {
            let mut store = Store::new(inputs.state_words(), lengths.len());
            let mut out = Vec::new();
            let mut start = 0;
            for (i, &n) in lengths.iter().enumerate() {
                let runs = [run(0..n as u32, (i > 0).then(|| i as u32 - 1), &[(n as u32, i as u32)])];
                out.extend(inputs.part(start..start + n).run(isa, threads, &runs, &mut store));
                start += n;
            }
            assert_close("results", &out, &expected, 1e-5);
            assert_close("state", store.plane(lengths.len() - 1), &last, 1e-5);
        }
    }

    #[test]
    fn a_plane_after_any_row_is_that_of_a_run_that_ends_there(
        shape in shapes(),
        rows in 1usize..100,
        kept in prop::collection::btree_set(1usize..100, 1..6),
        seed: u64,
    ) {
        let inputs = Inputs::random(shape, rows, seed);
        let kept: Vec<usize> = kept.into_iter().filter(|n| *n <= rows).collect();
        let to: Vec<(u32, u32)> = kept.iter().enumerate().map(|(plane, n)| (*n as u32, plane as u32)).collect();
        let mut store = Store::new(inputs.state_words(), kept.len());
        let out = inputs.run(Isa::detect(), 2, &[run(0..rows as u32, None, &to)], &mut store);
        assert_close("results", &out, &inputs.oracle().0, 1e-5);
        for (plane, &n) in kept.iter().enumerate() {
            let (_, state) = inputs.part(0..n).oracle();
            assert_close(&format!("plane after {n}"), store.plane(plane), &state, 1e-5);
        }
    }
}

#[test]
fn sequences_of_a_step_do_not_touch_one_another_whatever_the_threads() {
    let shape = DeltaShape { k_heads: 2, v_heads: 6, k_dim: 16, v_dim: 48, map: HeadMap::Tiled };
    let inputs = Inputs::random(shape, 91, 11);
    let alone = |rows: Range<usize>| {
        let (part, n) = (inputs.part(rows.clone()), rows.len() as u32);
        let mut store = Store::new(part.state_words(), 1);
        let out = part.run(Isa::detect(), 1, &[run(0..n, None, &[(n, 0)])], &mut store);
        (out, store.plane(0).to_vec())
    };
    let parts = [0..3, 3..70, 70..71, 71..91];
    let runs: Vec<StateRun> = parts
        .iter()
        .enumerate()
        .map(|(i, r)| run(r.start as u32..r.end as u32, None, &[((r.end - r.start) as u32, i as u32)]))
        .collect();
    for threads in [1, 2, 3, 7] {
        let mut store = Store::new(inputs.state_words(), 4);
        let out = inputs.run(Isa::detect(), threads, &runs, &mut store);
        for (i, rows) in parts.iter().enumerate() {
            let (expected, state) = alone(rows.clone());
            let width = shape.v_heads * shape.v_dim;
            assert_eq!(out[rows.start * width..rows.end * width], expected, "run {i} with {threads} threads");
            assert_eq!(store.plane(i), state, "plane {i} with {threads} threads");
        }
    }
}
