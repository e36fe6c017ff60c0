//! Gated delta nets of Qwen3.5-35B-A3B's shape: a row of decode, a short run, which is walked row by row, and a long one, which
//! is taken in chunks. Time is per row.

use std::ptr::NonNull;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use opencoti_compute::cpu::pool::{Pool, Worker};
use opencoti_compute::cpu::recurrent::{DeltaNet, DeltaShape, Planes, Scratch, delta_net};
use opencoti_compute::cpu::simd::Isa;
use opencoti_compute::graph::HeadMap;
use opencoti_compute::plan::{StateRun, StateView, StateWrite};

const SHAPE: DeltaShape = DeltaShape { k_heads: 16, v_heads: 32, k_dim: 128, v_dim: 128, map: HeadMap::Tiled };
const WORDS: usize = SHAPE.v_heads * SHAPE.k_dim * SHAPE.v_dim;

/// Numbers between -1 and 1 that look random.
fn noise(n: usize) -> Vec<f32> {
    (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// The one worker writes the result.
struct Shared<'a>(DeltaNet<'a>);

// SAFETY: the pool has one worker.
unsafe impl Sync for Shared<'_> {}

fn run(c: &mut Criterion) {
    let mut group = c.benchmark_group("delta net");
    let mut pool = Pool::new(1).expect("a pool");
    let mut planes = noise(2 * WORDS);
    let view = StateView { base: NonNull::new(planes.as_mut_ptr()).expect("memory"), plane_words: WORDS, n_planes: 2 };
    for rows in [1, 15, 512] {
        // Keys of length one, as a model has them.
        let keys: Vec<f32> = noise(rows * SHAPE.k_heads * SHAPE.k_dim).iter().map(|x| x * 0.15).collect();
        let values = noise(rows * SHAPE.v_heads * SHAPE.v_dim);
        let gates: Vec<f32> = noise(rows * SHAPE.v_heads).iter().map(|x| x.abs()).collect();
        let decay: Vec<f32> = gates.iter().map(|x| -0.1 * x).collect();
        let mut out = vec![0.0; values.len()];
        let runs =
            [StateRun { rows: 0..rows as u32, from: Some(0), to: vec![StateWrite { after: rows as u32, plane: 1 }] }];
        let net = Shared(DeltaNet {
            shape: SHAPE,
            q: &keys,
            k: &keys,
            v: &values,
            decay: &decay,
            beta: &gates,
            scale: 0.1,
            out: out.as_mut_ptr(),
        });
        let scratch = std::sync::Mutex::new(Scratch::default());
        let work = |worker: Worker<'_>| {
            let (net, scratch) = (&net, &mut *scratch.lock().expect("one worker"));
            // SAFETY: planes, inputs and result live through the run and have the sizes that the runs name.
            unsafe { delta_net(Isa::detect(), worker, &runs, Planes::new(&view, 0, WORDS), &net.0, scratch) };
        };
        group.throughput(Throughput::Elements(rows as u64));
        group.bench_function(BenchmarkId::from_parameter(rows), |b| b.iter(|| pool.run(work).expect("no panic")));
    }
    group.finish();
}

criterion_group!(benches, run);
criterion_main!(benches);
