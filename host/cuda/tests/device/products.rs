//! Products with every weight format and every kernel, against the CPU executor.

use std::sync::Arc;

use opencoti_compute::cpu::attention::Attention;
use opencoti_compute::cpu::executor::{Config as CpuConfig, Executor as CpuExecutor};
use opencoti_compute::graph::{Activation, Graph, GraphBuilder};
use opencoti_compute::plan::Step;
use opencoti_compute::quant::WeightType;
use opencoti_compute::weights::Weight;
use opencoti_cuda::executor::Executor;
use opencoti_cuda::weights::Format;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{config, gpu, relative};

/// Random blocks of a type with scales of about 0.01.
fn random_weight(rng: &mut ChaCha8Rng, ty: WeightType, rows: usize, cols: usize) -> Weight {
    if ty.is_float() {
        let values: Vec<f32> = (0..rows * cols).map(|_| rng.random_range(-0.1f32..0.1)).collect();
        let bytes: Vec<u8> = match ty {
            WeightType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            WeightType::BF16 => values.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| half_bits(*v).to_le_bytes()).collect(),
        };
        return Weight::new(ty, rows, cols, Arc::new(bytes)).unwrap();
    }
    let mut bytes: Vec<u8> = (0..rows * ty.row_bytes(cols).unwrap()).map(|_| rng.random()).collect();
    // Where the halves of a block are.
    let halves: &[usize] = match ty {
        WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => &[0],
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4_K | WeightType::Q5_K => &[0, 2],
        WeightType::Q6_K => &[208],
        _ => panic!("{ty} has no kernels"),
    };
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        for &at in halves {
            block[at..at + 2].copy_from_slice(&half_bits(rng.random_range(0.001f32..0.01)).to_le_bytes());
        }
        centre(ty, block);
    }
    Weight::new(ty, rows, cols, Arc::new(bytes)).unwrap()
}

/// Gives a block with minima such ones that its values lie around 0: else sums cancel, and errors look larger than they are.
fn centre(ty: WeightType, block: &mut [u8]) {
    let scale = opencoti_compute::quant::f16_to_f32(u16::from_le_bytes([block[0], block[1]]));
    let minimum = match ty {
        WeightType::Q4_1 => -7.5 * scale,
        WeightType::Q5_1 => -15.5 * scale,
        WeightType::Q4_K => 7.5 * scale,
        WeightType::Q5_K => 15.5 * scale,
        _ => return,
    };
    block[2..4].copy_from_slice(&half_bits(minimum).to_le_bytes());
    if matches!(ty, WeightType::Q4_K | WeightType::Q5_K) {
        // The six-bit factors of scales and minima are the same.
        for run in 0..4 {
            block[8 + run] = block[4 + run];
            block[12 + run] = block[12 + run] & 15 | block[12 + run] << 4;
        }
    }
}

/// A normal half of a value, truncated.
fn half_bits(v: f32) -> u16 {
    let bits = v.to_bits();
    let exponent = (bits >> 23 & 255).cast_signed() - 127 + 15;
    let sign = (bits >> 16 & 0x8000) as u16;
    if exponent <= 0 { sign } else { sign | (exponent.cast_unsigned() << 10 | bits >> 13 & 1023) as u16 }
}

/// Embeds, and multiplies with two matrices around a gated activation.
fn graph(ty: WeightType, cols: usize, rows: usize, vocabulary: usize) -> (Graph, Vec<Weight>) {
    let rng = &mut ChaCha8Rng::seed_from_u64((cols + rows) as u64);
    let mut b = GraphBuilder::new();
    let table = b.weight("table", cols, vocabulary);
    let (norm, gate, up) = (b.vector("norm", cols), b.weight("gate", cols, rows), b.weight("up", cols, rows));
    let (down, bias) = (b.weight("down", rows, cols), b.vector("bias", cols));
    let x = b.embed(table, 3.0);
    let n = b.rms_norm(x, norm, 1e-5);
    let (g, u) = (b.matmul(n, gate), b.matmul(n, up));
    let act = b.gated_act(g, u, Activation::Silu);
    let y = b.linear(act, down, Some(bias));
    let sum = b.add(x, y);
    let out = b.select_outputs(sum);
    let logits = b.matmul(out, table);
    let weights = vec![
        random_weight(rng, ty, vocabulary, cols),
        random_weight(rng, WeightType::F32, 1, cols),
        random_weight(rng, ty, rows, cols),
        random_weight(rng, ty, rows, cols),
        random_weight(rng, ty, cols, rows),
        random_weight(rng, WeightType::F32, 1, cols),
    ];
    (b.finish(out, logits), weights)
}

fn step(rows: usize, vocabulary: usize) -> Step {
    Step {
        tokens: (0..rows).map(|i| (i * 7 % vocabulary) as u32).collect(),
        positions: (0..rows as u32).collect(),
        outputs: (0..rows as u32).collect(),
        logits: (0..rows as u32).collect(),
        ..Step::default()
    }
}

fn check(ty: WeightType, cols: usize, rows: usize, inputs: &[usize]) {
    let Some(gpu) = gpu() else { return };
    let vocabulary = 75;
    let (graph, weights) = graph(ty, cols, rows, vocabulary);
    let most = inputs.iter().copied().max().unwrap();
    let cpu_config = CpuConfig { threads: 2, max_rows: most, max_outputs: most };
    let attention = Box::new(Attention::new(&graph));
    let mut cpu = CpuExecutor::new(graph.clone(), weights.clone(), attention, cpu_config).unwrap();
    let mut cuda = Executor::new(&gpu, graph, &weights, &[], config(most), &mut |_, _| {}).unwrap();
    for &n in inputs {
        let step = step(n, vocabulary);
        let (expected, found) = (cpu.run(&step).unwrap(), cuda.run(&step).unwrap());
        assert_eq!(found.rows(), n);
        for row in 0..n {
            for (what, found, expected) in [
                ("hidden", found.hidden(row), expected.hidden(row)),
                ("logits", found.logits(row), expected.logits(row)),
            ] {
                let error = relative(found, expected);
                assert!(error < 4e-3, "{ty} {cols}x{rows}, row {row} of {n}: {what} differ by {error}");
            }
        }
    }
}

#[test]
fn every_format_multiplies_as_on_the_cpu_with_any_number_of_rows() {
    for name in Format::names() {
        let ty = WeightType::all().find(|ty| ty.name() == name).unwrap();
        check(ty, 512, 768, &[1, 3, 8, 9, 16, 17, 40, 64, 65, 130, 300]);
    }
}

#[test]
fn rows_that_are_no_whole_tiles_and_no_whole_units_are_zeros_beyond_their_end() {
    check(WeightType::Q8_0, 96, 160, &[1, 20, 70]);
    check(WeightType::Q4_0, 32, 96, &[1, 20, 70]);
    check(WeightType::F16, 40, 104, &[1, 20, 70]);
    check(WeightType::F32, 24, 72, &[1, 20, 70]);
}

#[test]
fn a_weight_type_without_kernels_is_refused_by_the_tensors_name() {
    let Some(gpu) = gpu() else { return };
    let mut b = GraphBuilder::new();
    let table = b.weight("token_embd.weight", 256, 4);
    let x = b.embed(table, 1.0);
    let out = b.select_outputs(x);
    let graph = b.finish(out, out);
    let bytes = vec![0u8; 4 * WeightType::IQ2_XS.row_bytes(256).unwrap()];
    let weight = Weight::new(WeightType::IQ2_XS, 4, 256, Arc::new(bytes)).unwrap();
    let error = Executor::new(&gpu, graph, &[weight], &[], config(4), &mut |_, _| {}).err().unwrap().to_string();
    assert!(error.starts_with("tensor `token_embd.weight` is IQ2_XS") && error.contains("Q4_K"), "{error}");
}
