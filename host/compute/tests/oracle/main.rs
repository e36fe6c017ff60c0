//! Attention over random plans against plain attention in f64 over the same decoded keys and values.
//!
//! Tolerance: results are sums of f32 products, and a score's rounding error grows into the relative error of its
//! weight. Scores here stay below 60, so that weights are good to about 60 * 2^-22 = 1.4e-5; sums of products with
//! `d = 512` add a few 1e-6. 1e-4 of the sum of magnitudes leaves room for neither a missing nor a doubled key. Values
//! stored in a rotated basis share their rounding among the elements of a row, hence 1e-5 of the row's norm beside it.

mod cases;
mod f64_attention;
mod failures;
mod plain_codec;

use std::sync::atomic::Ordering;

use opencoti_compute::cpu::attention::Attention;
use opencoti_compute::cpu::executor::{Attend, AttentionKernels, LayerStep, QueryRows};
use opencoti_compute::cpu::pool::Pool;
use opencoti_compute::cpu::simd::Isa;

use cases::{Case, LAYER};

/// Of an element's magnitude.
const TOLERANCE: f64 = 1e-4;
/// Of the norm of a row's magnitudes.
const ROW_TOLERANCE: f64 = 1e-5;
/// How much more may be off where a codec's kernels round queries and weights to 16 bits: scores that are sums of many
/// large products move by up to some thousandths, and weights by as much of themselves.
const ROUNDED: f64 = 20.0;

/// Runs a case's writes and reads on `workers` threads with the kernels of `isa`.
fn run(case: &Case, attention: &mut Attention, isa: Isa, workers: usize) -> Result<Vec<f32>, String> {
    run_rows(case, QueryRows::all(&case.step), attention, isa, workers)
}

/// The same for some of the rows.
fn run_rows(
    case: &Case,
    rows: QueryRows<'_>,
    attention: &mut Attention,
    isa: Isa,
    workers: usize,
) -> Result<Vec<f32>, String> {
    case.step.check(1).expect("the case is a valid step");
    attention.prepare(&case.step, workers)?;
    let mut pool = Pool::new(workers).unwrap();
    let at = LayerStep { isa, step: &case.step, group: 0, layer: LAYER, geometry: case.geometry };
    let mut out = vec![f32::NAN; rows.count() * case.n_heads * case.geometry.v_head_dim];
    let width = case.n_heads * case.geometry.k_head_dim;
    let q: Vec<f32> = (0..rows.count()).flat_map(|i| &case.q[rows.step_row(i) * width..][..width]).copied().collect();
    let shared = out.as_mut_ptr() as usize;
    let failure = std::sync::Mutex::new(None);
    let attention = &*attention;
    pool.run(|worker| {
        let attend = Attend {
            rows,
            q: &q,
            n_heads: case.n_heads,
            rope: case.rope.as_ref(),
            angles: &case.angles,
            scale: case.scale,
            softcap: case.softcap,
            out: shared as *mut f32,
        };
        // SAFETY: the step was checked, its stores are the case's own, and `out` has a row for each of the step's.
        let (stored, read) = unsafe {
            let stored = attention.append(worker, at, &case.k, &case.v);
            worker.barrier();
            (stored, attention.attend(worker, at, &attend))
        };
        if let Err(message) = stored.and(read) {
            failure.lock().unwrap().get_or_insert(message);
        }
    })
    .unwrap();
    failure.into_inner().unwrap().map_or(Ok(out), Err)
}

fn check(case: &Case, out: &[f32], what: &str) {
    check_rows(case, QueryRows::all(&case.step), out, what);
}

fn check_rows(case: &Case, rows: QueryRows<'_>, out: &[f32], what: &str) {
    let all = f64_attention::attention(case);
    let width = case.n_heads * case.geometry.v_head_dim;
    let exact: Vec<_> = (0..rows.count()).flat_map(|i| &all[rows.step_row(i) * width..][..width]).collect();
    assert_eq!(out.len(), exact.len());
    let width = case.geometry.v_head_dim;
    let tolerance = if case.rounds() { ROUNDED } else { 1.0 };
    for (row, (found, exact)) in out.chunks_exact(width).zip(exact.chunks_exact(width)).enumerate() {
        let norm = exact.iter().map(|e| e.magnitude.powi(2)).sum::<f64>().sqrt();
        for (i, (&found, exact)) in found.iter().zip(exact).enumerate() {
            let error = (f64::from(found) - exact.value).abs();
            assert!(
                error <= tolerance * (TOLERANCE * exact.magnitude + ROW_TOLERANCE * norm),
                "{what}: element {i} of row and head {row} is {found} instead of {} (magnitude {})\n{}",
                exact.value,
                exact.magnitude,
                case.step.groups[0]
            );
        }
    }
}

#[test]
fn two_hundred_random_plans_match_the_oracle() {
    let sets = Isa::available();
    for seed in 0..200 {
        let case = Case::random(seed);
        let (isa, workers) = (sets[seed as usize % sets.len()], 1 + seed as usize % 4);
        let out = run(&case, &mut Attention::new(&case.graph), isa, workers).unwrap();
        case.check_written();
        check(&case, &out, &format!("seed {seed} with {workers} workers on {isa:?}"));
    }
}

#[test]
fn output_rows_alone_match_the_oracle() {
    for seed in 0..60 {
        let mut case = Case::random(seed);
        let n = case.step.positions.len() as u32;
        case.step.outputs = (0..n).filter(|row| (row * 7 + seed as u32).is_multiple_of(3)).collect();
        let rows = QueryRows::outputs(&case.step);
        let out =
            run_rows(&case, rows, &mut Attention::new(&case.graph), Isa::detect(), 1 + seed as usize % 3).unwrap();
        check_rows(&case, rows, &out, &format!("seed {seed}, outputs {:?}", case.step.outputs));
    }
}

fn check_codecs(k: &str, v: &str, rotated: bool) {
    let case = Case::of_codecs(k, v, rotated, 7);
    let out = run(&case, &mut Attention::new(&case.graph), Isa::detect(), 2).unwrap();
    check(&case, &out, &format!("K {k}, V {v}, rotated {rotated}"));
}

#[test]
fn the_codec_matrix_matches_the_oracle() {
    for k in cases::SCALAR {
        for v in cases::SCALAR {
            for rotated in [false, true] {
                check_codecs(k, v, rotated);
            }
        }
    }
    for rotated in cases::ROTATED {
        check_codecs(rotated, rotated, false);
        for other in ["f16", "q4_0", "turbo3"] {
            check_codecs(rotated, other, false);
            check_codecs(other, rotated, true);
        }
    }
}

#[test]
fn records_that_a_step_seals_and_exact_tokens_beside_them_match_the_oracle() {
    for (k, v) in [("kvarn2", "kvarn3"), ("kvarn4", "kvarn8"), ("kvarn5", "q4_0"), ("q8_0", "kvarn6")] {
        for (head_dim, heads, n) in [(64, 1, 1), (64, 4, 9), (96, 3, 2), (128, 7, 7), (256, 4, 8), (512, 8, 28)] {
            let case = Case::sealed(k, v, head_dim, heads, n);
            let out = run(&case, &mut Attention::new(&case.graph), Isa::detect(), 2).unwrap();
            case.check_written();
            check(&case, &out, &format!("K {k}, V {v}, heads of {head_dim}, {heads} share one, {n} rows"));
        }
    }
}

#[test]
fn scratch_of_one_step_serves_a_smaller_and_a_larger_one() {
    let cases = [Case::of_codecs("q8_0", "f16", false, 5), Case::of_codecs("q8_0", "f16", false, 90)];
    let mut attention = Attention::new(&cases[0].graph);
    for case in [&cases[0], &cases[1], &cases[0]] {
        let out = run(case, &mut attention, Isa::detect(), 2).unwrap();
        check(case, &out, "reused");
    }
}

#[test]
fn rows_that_share_a_segment_read_each_tile_once() {
    let case = Case::shared_prefix(8, 3);
    let decoded = &plain_codec::DECODED;
    decoded.store(0, Ordering::SeqCst);
    let out = run(&case, &mut Attention::new(&case.graph), Isa::detect(), 1).unwrap();
    // Three pages of two heads, keys and values.
    assert_eq!(decoded.load(Ordering::SeqCst), 3 * 2 * 2);
    check(&case, &out, "shared prefix");
}

#[test]
fn rows_without_a_key_give_zeros() {
    let mut case = Case::of_codecs("f16", "q4_0", true, 3);
    case.step.groups[0].segments[0].queries = cases::one(1..2);
    let out = run(&case, &mut Attention::new(&case.graph), Isa::detect(), 2).unwrap();
    let width = case.n_heads * case.geometry.v_head_dim;
    assert!(out[..width].iter().chain(&out[2 * width..]).all(|&v| v == 0.0));
    assert!(out[width..2 * width].iter().all(|&v| v != 0.0));
}
