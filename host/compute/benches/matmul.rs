//! Matrix products by weight type and batch, on all cores.
//!
//! For one row the rate in bytes is the rate at which weights are read, to be held against the machine's read
//! bandwidth; for many rows the rate in elements is multiplications a second.
//!
//! `cargo bench -p opencoti-compute --bench matmul -- q4_1` runs one type.

use std::hint::black_box;
use std::sync::Mutex;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use opencoti_compute::cpu::matmul::{
    GRAIN, Matrix, Operand, Output, Packed, Precision, Scratch, precision, quantize_activations, quantized_words,
};
use opencoti_compute::cpu::pool::Pool;
use opencoti_compute::cpu::simd::Isa;
use opencoti_compute::quant::WeightType;
use rand::{RngExt, SeedableRng};

const ROWS: usize = 4096;
const COLS: usize = 2048;

fn products(c: &mut Criterion) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut pool = Pool::new(threads).unwrap();
    let scratch: Vec<Mutex<Scratch>> = (0..threads).map(|_| Mutex::default()).collect();
    let isa = Isa::detect();
    for ty in WeightType::all() {
        let mut group = c.benchmark_group(ty.name().to_lowercase());
        group.sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(1);
        // Such bytes make every float an ordinary one: subnormals would cost more than the product.
        let data: Vec<u8> = (0..ty.row_bytes(COLS).unwrap() * ROWS).map(|_| rng.random_range(48..64)).collect();
        let w = Matrix::new(ty, ROWS, COLS, &data).unwrap();
        let packed = Packed::of(isa, &w).unwrap();
        let operand = packed.as_ref().map_or(Operand::Plain(w), Operand::Packed);
        for batch in [1, 8, 64, 512] {
            let floats: Vec<f32> = (0..batch * COLS).map(|_| rng.random_range(-1.0..1.0)).collect();
            let mut codes = vec![0.0; batch * quantized_words(COLS)];
            for (x, row) in floats.chunks(COLS).zip(codes.chunks_mut(quantized_words(COLS))) {
                quantize_activations(isa, x, row);
            }
            let mut y = vec![0.0; batch * ROWS];
            group.throughput(match batch {
                1 => Throughput::Bytes(data.len() as u64),
                _ => Throughput::Elements((batch * ROWS * COLS) as u64),
            });
            group.bench_function(BenchmarkId::from_parameter(batch), |b| {
                b.iter(|| {
                    let out = Output::new(&mut y, ROWS, None);
                    pool.run(|worker| {
                        let mut scratch = scratch[worker.index()].lock().unwrap();
                        let columns = worker.share(ROWS, GRAIN);
                        let x = if precision(ty) == Precision::Float { &floats } else { &codes };
                        // SAFETY: workers' shares are disjoint.
                        unsafe { operand.multiply(isa, x, columns, 0, out, &mut scratch) }
                    })
                    .unwrap();
                    black_box(&y);
                });
            });
        }
    }
}

criterion_group!(benches, products);
criterion_main!(benches);
