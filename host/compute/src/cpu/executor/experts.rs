//! Products with chosen experts.
//!
//! A routing's rows are sorted by expert ([`Dispatch`]), so that what one expert multiplies lies together and each expert
//! is read once a step, if at all. Products, activations and quantised copies between them keep that order; the weighted
//! sum brings the rows back to their tokens, for each in the order of its own choices: what a token gets does not depend
//! on the tokens that come with it.
//!
//! The dispatch is a matter of microseconds, so every worker makes its own instead of waiting for one that does. Work is
//! cut across all experts at once, by what their rows cost: a single token's experts as evenly as a full batch's.

use std::ops::Range;

use super::compile::{Rows, Schedule};
use super::run::{Local, Run};
use crate::cpu::matmul::{GRAIN, Output, Precision, precision, quantized_words};
use crate::cpu::pool::Worker;
use crate::cpu::vecmath;
use crate::graph::{Experts, Graph, Op, Value};
use crate::weights::Weight;

/// Rows of tokens that are brought together for a product at a time; they shall stay in a usual L2 cache.
const GATHERED_ROWS: usize = 64;
/// What reading a weight row costs, in products with an activation row.
const READING: usize = 1;

/// The rows of one expert.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Batch {
    expert: usize,
    /// Their places in the order of experts.
    places: Range<usize>,
}

impl Batch {
    /// Relative time of one column of a product.
    fn cost(&self) -> usize {
        self.places.len() + READING
    }
}

/// A routing's rows in the order of their experts.
#[derive(Debug, Default)]
pub(super) struct Dispatch {
    batches: Vec<Batch>,
    /// The routed row at each place.
    row_at: Vec<u32>,
    /// The place of each row's each choice.
    place_of: Vec<u32>,
    /// While the rows are sorted: rows of each expert, then its next free place.
    next: Vec<usize>,
}

impl Dispatch {
    /// Room for so many choices among so many experts.
    fn new(choices: usize, experts: usize) -> Dispatch {
        Dispatch {
            batches: Vec::with_capacity(choices.min(experts)),
            row_at: vec![0; choices],
            place_of: vec![0; choices],
            next: vec![0; experts],
        }
    }

    /// Sorts the rows of a routing by `k` choices each.
    pub(super) fn sort(&mut self, routing: &[f32], k: usize) {
        let rows = || routing.chunks_exact(2 * k).map(|row| row[..k].iter().map(|id| *id as usize));
        self.next.fill(0);
        for expert in rows().flatten() {
            self.next[expert] += 1;
        }
        self.batches.clear();
        let mut place = 0;
        for (expert, next) in self.next.iter_mut().enumerate() {
            let count = std::mem::replace(next, place);
            if count > 0 {
                self.batches.push(Batch { expert, places: place..place + count });
                place += count;
            }
        }
        let mut places = self.place_of.iter_mut();
        for (row, choices) in rows().enumerate() {
            for (expert, place_of) in choices.zip(&mut places) {
                let place = &mut self.next[expert];
                self.row_at[*place] = row as u32;
                *place_of = *place as u32;
                *place += 1;
            }
        }
    }

    /// One worker's part of products with `columns` columns: which ones of each batch.
    fn share(&self, worker: Worker<'_>, columns: usize) -> impl Iterator<Item = (&Batch, Range<usize>)> {
        let grains = columns.div_ceil(GRAIN);
        let total: usize = self.batches.iter().map(|b| b.cost() * grains).sum();
        let bound = |i: usize| total * i / worker.count();
        let (start, end) = (bound(worker.index()), bound(worker.index() + 1));
        let mut before = 0;
        self.batches.iter().filter_map(move |batch| {
            let first = |at: usize| at.saturating_sub(before).div_ceil(batch.cost()).min(grains) * GRAIN;
            let share = first(start)..first(end).min(columns);
            before += batch.cost() * grains;
            (!share.is_empty()).then_some((batch, share))
        })
    }
}

/// Room of one worker for the products of a graph's experts.
#[derive(Debug, Default)]
pub(super) struct ExpertScratch {
    pub(super) dispatch: Dispatch,
    /// Rows of one expert that lay apart.
    gathered: Vec<f32>,
}

impl ExpertScratch {
    /// Room for every routing of `graph` in steps of `tokens` rows, and for the rows that its experts read.
    pub(super) fn new(graph: &Graph, schedule: &Schedule, weights: &[Weight], tokens: usize, outputs: usize) -> Self {
        let (mut choices, mut experts, mut words) = (0, 0, 0);
        for op in &graph.ops {
            match *op {
                Op::Route { out, logits, .. } => {
                    let rows = schedule.rows_of[out.0 as usize].count(tokens, outputs, outputs);
                    choices = choices.max(rows * graph.width(out) / 2);
                    experts = experts.max(graph.width(logits));
                }
                Op::ExpertMatMul { x, experts: Experts { stack, .. }, .. } => {
                    let width = graph.width(x);
                    words = words.max(match precision(weights[stack.0 as usize].ty()) {
                        Precision::Float => width,
                        Precision::Q16 => quantized_words(width),
                    });
                }
                _ => {}
            }
        }
        let gathered = vec![0.0; words * GATHERED_ROWS.min(tokens)];
        ExpertScratch { dispatch: Dispatch::new(choices, experts), gathered }
    }
}

/// Chooses the experts of one row: their numbers in the order of their logits, then their weights.
fn choose(logits: &[f32], renorm: bool, out: &mut [f32]) {
    let (chosen, weights) = out.split_at_mut(out.len() / 2);
    let k = chosen.len();
    for (expert, &logit) in logits.iter().enumerate() {
        if expert >= k && !matches!(logit.partial_cmp(&weights[k - 1]), Some(std::cmp::Ordering::Greater)) {
            continue;
        }
        let mut at = expert.min(k - 1);
        while at > 0 && logit > weights[at - 1] {
            (chosen[at], weights[at]) = (chosen[at - 1], weights[at - 1]);
            at -= 1;
        }
        (chosen[at], weights[at]) = (expert as f32, logit);
    }
    let peak = weights[0];
    let all = if renorm { &*weights } else { logits };
    // With `renorm`, this is the softmax over the chosen ones, which is the same.
    let sum: f32 = all.iter().map(|logit| vecmath::exp(logit - peak)).sum();
    weights.iter_mut().for_each(|weight| *weight = vecmath::exp(*weight - peak) / sum);
}

// On safety, see the note in `run`: a product's columns are its worker's for every row of the batch.
impl Run<'_> {
    pub(super) fn route(&self, worker: Worker<'_>, out: Value, logits: Value, renorm: bool) {
        for row in self.share(worker, out) {
            let one = row..row + 1;
            // SAFETY: this worker's rows, see above.
            let (logits, out) = unsafe { (self.rows(logits, &one), self.rows_mut(out, &one)) };
            choose(logits, renorm, out);
        }
    }

    pub(super) fn dispatch(&self, route: Value, dispatch: &mut Dispatch) {
        // SAFETY: nobody writes the routing, see above.
        let routing = unsafe { self.rows(route, &(0..self.count(route))) };
        dispatch.sort(routing, self.graph.width(route) / 2);
    }

    pub(super) fn expert_matmul(&self, worker: Worker<'_>, out: Value, x: Value, experts: Experts, local: &mut Local) {
        let (id, Experts { first, rows, .. }) = (experts.stack.0 as usize, experts);
        let stack = self.operand(experts.stack);
        let rows_each = self.weights[id].rows() / self.graph.weights[id].experts;
        let (source, words) = match precision(self.weights[id].ty()) {
            Precision::Float => (self.buffer(x), self.graph.width(x)),
            Precision::Q16 => self.copy(x),
        };
        let sorted = matches!(self.rows_of(x), Rows::TokenExperts(_) | Rows::OutputExperts(_));
        let Local { scratch, experts: ExpertScratch { dispatch, gathered }, .. } = local;
        for (batch, columns) in dispatch.share(worker, rows) {
            let origin = batch.expert * rows_each + first;
            let of_stack = origin + columns.start..origin + columns.end;
            let places = batch.places.clone();
            let at_once = if sorted { places.len() } else { GATHERED_ROWS };
            for start in places.clone().step_by(at_once) {
                let end = places.end.min(start + at_once);
                // SAFETY: nobody writes `x` or its copy; this worker alone touches its columns of these rows, see above.
                unsafe {
                    let input = match sorted {
                        true => self.buffers.range(source, start * words..end * words),
                        false => self.gather(source, words, &dispatch.row_at[start..end], gathered),
                    };
                    let out = Output::shared(self.pointer(out).add(start * rows), end - start, rows, None);
                    stack.multiply(self.isa, input, of_stack.clone(), origin, out, scratch);
                }
            }
            if let Some(scale) = experts.scale {
                let factor = self.vectors[scale.0 as usize][batch.expert];
                // SAFETY: as above.
                unsafe { self.scale_columns(out, places, columns, factor) };
            }
        }
    }

    /// The given rows of a buffer, one after the other: a single one where it is, several in `gathered`.
    ///
    /// # Safety
    /// Nobody writes the rows.
    unsafe fn gather<'g>(&'g self, source: usize, words: usize, rows: &[u32], gathered: &'g mut [f32]) -> &'g [f32] {
        // SAFETY: the caller's promise.
        let row = |row: u32| unsafe { self.buffers.range(source, row as usize * words..(row as usize + 1) * words) };
        if let [one] = *rows {
            return row(one);
        }
        let gathered = &mut gathered[..rows.len() * words];
        for (to, from) in gathered.chunks_exact_mut(words).zip(rows) {
            to.copy_from_slice(row(*from));
        }
        gathered
    }

    /// # Safety
    /// Nobody else touches these columns of these rows.
    unsafe fn scale_columns(&self, value: Value, rows: Range<usize>, columns: Range<usize>, factor: f32) {
        let width = self.graph.width(value);
        for row in rows {
            let part = row * width + columns.start..row * width + columns.end;
            // SAFETY: the caller's promise.
            unsafe { self.buffers.range_mut(self.buffer(value), part) }.iter_mut().for_each(|v| *v *= factor);
        }
    }

    pub(super) fn combine(&self, worker: Worker<'_>, out: Value, x: Value, route: Value, dispatch: &Dispatch) {
        let k = self.graph.width(route) / 2;
        for row in self.share(worker, out) {
            let one = row..row + 1;
            // SAFETY: this worker's rows of `out`; nobody writes the others, see above.
            let (routing, out) = unsafe { (self.rows(route, &one), self.rows_mut(out, &one)) };
            out.fill(0.0);
            for (weight, place) in routing[k..].iter().zip(&dispatch.place_of[row * k..]) {
                let place = *place as usize;
                // SAFETY: as above.
                let x = unsafe { self.rows(x, &(place..place + 1)) };
                vecmath::add_scaled(self.isa, x, *weight, out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::pool::Pool;
    use std::sync::Mutex;

    fn chosen(logits: &[f32], k: usize, renorm: bool) -> (Vec<usize>, Vec<f32>) {
        let mut out = vec![f32::NAN; 2 * k];
        choose(logits, renorm, &mut out);
        (out[..k].iter().map(|id| *id as usize).collect(), out[k..].to_vec())
    }

    #[test]
    fn the_largest_logits_are_chosen_and_of_equal_ones_the_first() {
        let logits = [0.5, 2.0, -1.0, 2.0, 0.5, 3.0];
        assert_eq!(chosen(&logits, 1, true), (vec![5], vec![1.0]));
        assert_eq!(chosen(&logits, 4, true).0, [5, 1, 3, 0]);
        assert_eq!(chosen(&logits, 6, true).0, [5, 1, 3, 0, 4, 2]);
        assert_eq!(chosen(&[0.0; 5], 3, true), (vec![0, 1, 2], vec![1.0 / 3.0; 3]));
    }

    #[test]
    fn weights_are_shares_of_the_softmax_over_all_or_sum_to_one() {
        let logits = [0.5f32, 2.0, -1.0, 3.0];
        let exp = logits.map(|l| f64::from(l).exp());
        let close = |found: &[f32], expected: [f64; 2]| {
            found.iter().zip(expected).for_each(|(f, e)| assert!((f64::from(*f) - e).abs() < 1e-6, "{f} {e}"));
        };
        let (all, two) = (exp.iter().sum::<f64>(), exp[1] + exp[3]);
        close(&chosen(&logits, 2, false).1, [exp[3] / all, exp[1] / all]);
        close(&chosen(&logits, 2, true).1, [exp[3] / two, exp[1] / two]);
    }

    #[test]
    fn logits_that_are_no_numbers_still_choose_different_experts() {
        for logits in [[f32::NAN; 5], [1.0, f32::NAN, 2.0, f32::NAN, f32::INFINITY], [f32::NEG_INFINITY; 5]] {
            let (mut ids, _) = chosen(&logits, 3, true);
            ids.sort_unstable();
            ids.dedup();
            assert!(ids.len() == 3 && ids.iter().all(|id| *id < 5), "{logits:?}: {ids:?}");
        }
    }

    fn dispatched(routing: &[[usize; 2]], experts: usize) -> Dispatch {
        let rows: Vec<f32> = routing.iter().flat_map(|r| [r[0] as f32, r[1] as f32, 0.5, 0.5]).collect();
        let mut dispatch = Dispatch::new(2 * routing.len() + 6, experts);
        dispatch.sort(&rows, 2);
        dispatch
    }

    #[test]
    fn a_dispatch_sorts_rows_by_expert_and_knows_the_way_back() {
        let dispatch = dispatched(&[[3, 0], [1, 3], [3, 1]], 5);
        let batch = |expert, places| Batch { expert, places };
        assert_eq!(dispatch.batches, [batch(0, 0..1), batch(1, 1..3), batch(3, 3..6)]);
        assert_eq!(dispatch.row_at[..6], [0, 1, 2, 0, 1, 2]);
        assert_eq!(dispatch.place_of[..6], [3, 0, 1, 4, 5, 2]);
    }

    #[test]
    fn shares_of_all_workers_cover_every_column_of_every_batch_once() {
        let dispatch = dispatched(&[[3, 0], [1, 3], [3, 1], [3, 4]], 5);
        for (workers, columns) in [(1, 32), (2, 30), (3, 7), (7, 64), (5, 3)] {
            let seen = Mutex::new(vec![vec![0; columns]; 5]);
            let take = |worker: Worker<'_>| {
                for (batch, share) in dispatch.share(worker, columns) {
                    seen.lock().unwrap()[batch.expert][share].iter_mut().for_each(|n| *n += 1);
                }
            };
            Pool::new(workers).unwrap().run(take).unwrap();
            let seen = seen.into_inner().unwrap();
            for (expert, columns) in seen.iter().enumerate() {
                assert!(columns.iter().all(|n| *n == u32::from(expert != 2)), "{workers} workers: {seen:?}");
            }
        }
    }
}
