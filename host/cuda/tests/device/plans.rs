//! Attention over the oracle's random plans, on pages that the host encoded and on those that the card encodes.
//!
//! Queries, keys, values and weights are rounded to f16, so results carry errors of about 2^-11 of a sum's magnitude, more where a
//! single score is large: its error, about 2^-11 of it, is the relative error of its weight. Scores here stay below 60.

use opencoti_compute::graph::{Graph, GraphBuilder, Rope, RopeScaling};
use opencoti_compute::weights::Weight;
use opencoti_cuda::executor::Executor;

use crate::cases::{Case, LAYER, SCALAR};
use crate::{config, f64_attention, gpu};

/// Of an element's magnitude.
const TOLERANCE: f64 = 6e-3;
/// Of the norm of a row's magnitudes.
const ROW_TOLERANCE: f64 = 1e-3;

/// A graph that embeds queries, keys and values by row, and attends on the layer under test.
fn graph(case: &Case) -> (Graph, Vec<Weight>) {
    let g = case.geometry;
    let n = case.step.positions.len();
    let widths = [case.n_heads * g.k_head_dim, g.n_kv_heads * g.k_head_dim, g.n_kv_heads * g.v_head_dim];
    let mut b = GraphBuilder::new();
    let tables = ["q", "k", "v"].into_iter().zip(widths).map(|(name, width)| b.weight(name, width, n));
    let tables: Vec<_> = tables.collect();
    let values: Vec<_> = tables.iter().map(|t| b.embed(*t, 1.0)).collect();
    let layers = [b.kv_layer(g), b.kv_layer(g)];
    b.append(layers[LAYER], values[1], values[2]);
    let rope = case.rope.as_ref().map(|rope| {
        b.rope(Rope {
            pairing: case.pairing,
            n_rot: rope.n_rot(),
            base: 1e4,
            scaling: RopeScaling::None,
            freq_divisors: None,
        })
    });
    let out = b.attend(values[0], layers[LAYER], rope, case.scale, case.softcap);
    let out = b.select_outputs(out);
    let weights = [&case.q, &case.k, &case.v].into_iter().zip(widths);
    let weights = weights.map(|(values, width)| Weight::from_f32(n, width, values).unwrap()).collect();
    (b.finish(out, out), weights)
}

/// To the nearest f16, as the card's tables are.
fn rounded(values: &mut [f32]) {
    for v in values {
        // Adds what pushes the bits beyond eleven off the end; all values here are normal halves or nearly zero.
        let shift = v.abs() * 8192.0;
        *v = if v.abs() < 6.2e-5 { 0.0 } else { (v.abs() + shift - shift).copysign(*v) };
    }
}

fn check(case: &mut Case, what: &str) {
    let Some(gpu) = gpu() else { return };
    let n = case.step.positions.len() as u32;
    case.step.tokens = (0..n).collect();
    case.step.outputs = (0..n).collect();
    for values in [&mut case.q, &mut case.k, &mut case.v] {
        rounded(values);
    }
    let (graph, weights) = graph(case);
    let mut executor = Executor::new(&gpu, graph, &weights, &[], config(n as usize), &mut |_, _| {}).unwrap();
    for view in &case.step.stores {
        for page in 0..view.n_pages as u32 {
            // SAFETY: the case owns its stores, and nothing else runs.
            unsafe { executor.page_to_card(view, page) }.unwrap();
        }
    }
    // The second time from a recording.
    for _ in 0..2 {
        executor.run(&case.step).unwrap_or_else(|e| panic!("{what}: {e}"));
    }
    let out: Vec<f32> = {
        let outputs = executor.run(&case.step).unwrap();
        (0..outputs.rows()).flat_map(|i| outputs.hidden(i).to_vec()).collect()
    };
    for view in &case.step.stores {
        for page in 0..view.n_pages as u32 {
            // SAFETY: as above.
            unsafe { executor.page_to_host(view, page) }.unwrap();
        }
    }
    case.check_written();
    let width = case.geometry.v_head_dim;
    let exact = f64_attention::attention(case);
    assert_eq!(out.len(), exact.len());
    for (row, (found, exact)) in out.chunks_exact(width).zip(exact.chunks_exact(width)).enumerate() {
        let norm = exact.iter().map(|e| e.magnitude.powi(2)).sum::<f64>().sqrt();
        for (i, (&found, exact)) in found.iter().zip(exact).enumerate() {
            let error = (f64::from(found) - exact.value).abs();
            let limit = TOLERANCE * exact.magnitude + ROW_TOLERANCE * norm;
            assert!(
                error <= limit,
                "{what}: element {i} of row and head {row} is {found} instead of {} (magnitude {}, limit {limit})\n{}",
                exact.value,
                exact.magnitude,
                case.step.groups[0]
            );
        }
    }
}

fn has_device_source(case: &Case) -> bool {
    let sides = case.step.stores.iter().flat_map(|s| [&s.layers[0].k, &s.layers[0].v]);
    case.step.groups[0].seals.is_empty() && { sides }.all(|side| SCALAR.contains(&side.codec.name()))
}

#[test]
fn random_plans_match_the_oracle() {
    let cases =
        (0..4000).filter_map(|seed| Some((seed, Case::random(seed))).filter(|(_, case)| has_device_source(case)));
    let mut seen = 0;
    for (seed, mut case) in cases.take(60) {
        check(&mut case, &format!("seed {seed}"));
        seen += 1;
    }
    assert_eq!(seen, 60);
}

#[test]
fn every_codec_for_keys_and_values_matches_the_oracle() {
    for (i, k) in SCALAR.into_iter().enumerate() {
        for rotated in [false, true] {
            for rows in [1, 7, 40] {
                let v = SCALAR[(i + 3) % SCALAR.len()];
                check(
                    &mut Case::of_codecs(k, v, rotated, rows),
                    &format!("K {k}, V {v}, rotated {rotated}, {rows} rows"),
                );
            }
        }
    }
}
