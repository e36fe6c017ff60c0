//! Causal depthwise convolutions over the last few rows.
//!
//! Workers share the channels, so each walks all rows of all runs. A plane keeps the last `taps - 1` inputs, the oldest
//! first, a row of channels each.

use super::Planes;
use crate::cpu::pool::Worker;
use crate::cpu::simd::Isa;
use crate::cpu::vecmath;
use crate::plan::StateRun;

/// What a convolution works on: a row a token.
pub struct ShortConv<'a> {
    /// Inputs, `channels` a row.
    pub x: &'a [f32],
    /// Factors, `channels` for each tap; the last tap belongs to the current row.
    pub taps: &'a [f32],
    /// Channels.
    pub channels: usize,
    /// The result, `channels` a row, shared by the workers.
    pub out: *mut f32,
}

/// `out[t] = Σ_j taps[j] ⊙ x[t - (n - 1) + j]` with `n` taps, where rows before a run come from its plane.
///
/// # Safety
/// The planes are valid and named as a checked step names them; `out` has a row for each of `x`, and only the workers of
/// this call touch it and the planes that the runs write.
pub unsafe fn short_conv(isa: Isa, worker: Worker<'_>, runs: &[StateRun], planes: Planes<'_>, conv: &ShortConv<'_>) {
    let channels = conv.channels;
    let mine = worker.share(channels, 16);
    let kept = conv.taps.len() / channels - 1;
    for run in runs {
        let first = run.rows.start as usize;
        // The input `back` rows before the row that follows `seen` rows of the run; nothing before the sequence's start.
        let input = |seen: usize, back: usize| -> Option<&[f32]> {
            if back <= seen {
                let row = (first + seen - back) * channels;
                return Some(&conv.x[row + mine.start..row + mine.end]);
            }
            let row = (kept + seen - back) * channels;
            // SAFETY: `back <= seen + kept`, so the row is one of the plane's; nobody writes planes that runs begin with.
            run.from.map(|plane| unsafe { planes.read(plane, row + mine.start..row + mine.end) })
        };
        for seen in 0..run.rows.len() {
            // SAFETY: this worker alone has these channels of the row.
            let out = unsafe {
                std::slice::from_raw_parts_mut(conv.out.add((first + seen) * channels + mine.start), mine.len())
            };
            out.fill(0.0);
            for (tap, back) in conv.taps.chunks_exact(channels).zip((0..=kept).rev()) {
                if let Some(x) = input(seen, back) {
                    vecmath::add_product(isa, &tap[mine.clone()], x, out);
                }
            }
        }
        for write in &run.to {
            for (row, back) in (0..kept).zip((1..=kept).rev()) {
                // SAFETY: this worker alone has these channels of the planes that are written.
                let to = unsafe { planes.write(write.plane, row * channels + mine.start..row * channels + mine.end) };
                match input(write.after as usize, back) {
                    Some(x) => to.copy_from_slice(x),
                    None => to.fill(0.0),
                }
            }
        }
    }
}
