//! Which stored blocks run, and in what order.
//!
//! Repeating a run of middle blocks deepens a model without new weights. A repeated block is a pass of its own: it has its own
//! keys, values and states, and shares weights and everything else that is a matter of the stored block.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Share of the blocks at either end of a model whose repetition rarely does good.
const BOUNDARY: f32 = 0.15;

/// One run of a stored block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// The block whose weights it uses.
    pub block: usize,
    /// Whether nothing runs after it.
    pub last: bool,
}

/// Blocks to be run twice: half-open ranges, ascending and disjoint. Nothing is repeated by default.
///
/// As text, ranges `A-B` or `A,B` with `;` between them: with 6 blocks, `2-4` runs 0 1 2 3 2 3 4 5.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RepeatLayers(Vec<Range<usize>>);

/// Why a text is no plan, or a plan does not fit a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RepeatLayersError {
    /// A range that can't be read.
    #[error("{found:?} is no range of blocks; expected `A-B` or `A,B` with A < B, and `;` between ranges")]
    Range {
        /// The part of the text.
        found: String,
    },
    /// Ranges that overlap or are not ascending.
    #[error("the ranges {first} and {second} overlap or are out of order; write them ascending")]
    Order {
        /// A range.
        first: String,
        /// The one after it.
        second: String,
    },
    /// A range that ends beyond the model.
    #[error("the range {range} ends beyond the model, which has {blocks} blocks")]
    Beyond {
        /// The range.
        range: String,
        /// Blocks of the model.
        blocks: usize,
    },
    /// An architecture that runs its blocks once.
    #[error("the architecture {architecture} can't repeat blocks")]
    Architecture {
        /// Its name.
        architecture: &'static str,
    },
}

impl RepeatLayers {
    /// Whether nothing is repeated.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks the plan against a model of `blocks` blocks.
    ///
    /// # Errors
    /// A range ends beyond them.
    pub fn check(&self, blocks: usize) -> Result<(), RepeatLayersError> {
        match self.0.last() {
            Some(range) if range.end > blocks => Err(RepeatLayersError::Beyond { range: show(range), blocks }),
            _ => Ok(()),
        }
    }

    /// The stored block of each pass over a model of `blocks` blocks.
    pub fn passes(&self, blocks: usize) -> impl Iterator<Item = Pass> + use<> {
        let mut order = Vec::with_capacity(blocks);
        for block in 0..blocks {
            order.push(block);
            if let Some(range) = self.0.iter().find(|range| range.end == block + 1) {
                order.extend(range.clone());
            }
        }
        let n = order.len();
        order.into_iter().enumerate().map(move |(i, block)| Pass { block, last: i + 1 == n })
    }

    /// The ranges that reach into the first or the last blocks of the model, where repetition rarely does good; empty if none.
    pub fn at_the_boundary(&self, blocks: usize) -> String {
        let band = (blocks as f32 * BOUNDARY).ceil() as usize;
        let outer: Vec<String> =
            self.0.iter().filter(|r| r.start < band || r.end > blocks.saturating_sub(band)).map(show).collect();
        outer.join(";")
    }
}

impl FromStr for RepeatLayers {
    type Err = RepeatLayersError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.trim().is_empty() {
            return Ok(RepeatLayers::default());
        }
        let ranges: Vec<Range<usize>> = text.split(';').map(|part| range(part.trim())).collect::<Result<_, _>>()?;
        match ranges.windows(2).find(|pair| pair[0].end > pair[1].start) {
            Some(pair) => Err(RepeatLayersError::Order { first: show(&pair[0]), second: show(&pair[1]) }),
            None => Ok(RepeatLayers(ranges)),
        }
    }
}

impl fmt::Display for RepeatLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.iter().map(show).collect::<Vec<_>>().join(";"))
    }
}

fn range(text: &str) -> Result<Range<usize>, RepeatLayersError> {
    let parsed = text.split_once(['-', ',']).and_then(|(a, b)| Some(a.trim().parse().ok()?..b.trim().parse().ok()?));
    parsed.filter(|range| !range.is_empty()).ok_or_else(|| RepeatLayersError::Range { found: text.to_owned() })
}

fn show(range: &Range<usize>) -> String {
    format!("{}-{}", range.start, range.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(plan: &str, blocks: usize) -> Vec<usize> {
        plan.parse::<RepeatLayers>().expect(plan).passes(blocks).map(|pass| pass.block).collect()
    }

    #[test]
    fn a_range_repeats_as_a_unit_behind_itself() {
        assert_eq!(order("", 3), [0, 1, 2]);
        assert_eq!(order("2-4", 6), [0, 1, 2, 3, 2, 3, 4, 5]);
        assert_eq!(order("1,2", 3), [0, 1, 1, 2]);
        assert_eq!(order("0-1; 2-4", 4), [0, 0, 1, 2, 3, 2, 3]);
        assert_eq!(order("0-2;2-4", 4), [0, 1, 0, 1, 2, 3, 2, 3]);
    }

    #[test]
    fn only_the_last_pass_is_the_last() {
        let plan: RepeatLayers = "2-3".parse().expect("a plan");
        assert_eq!(plan.passes(3).map(|pass| pass.last).collect::<Vec<_>>(), [false, false, false, true]);
    }

    #[test]
    fn what_is_no_plan_is_refused_with_what_was_found() {
        for (text, part) in [
            ("4-2", "\"4-2\""),
            ("3-3", "\"3-3\""),
            ("a-b", "\"a-b\""),
            ("1-2;", "\"\""),
            ("7", "\"7\""),
            ("-1-2", "\"-1-2\""),
            ("1-99999999999999999999", "no range"),
            ("2-5;4-6", "2-5 and 4-6"),
            ("4-6;1-2", "4-6 and 1-2"),
        ] {
            let error = text.parse::<RepeatLayers>().expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        let error = "2-7".parse::<RepeatLayers>().expect("a plan").check(6).expect_err("too far");
        assert_eq!(error.to_string(), "the range 2-7 ends beyond the model, which has 6 blocks");
    }

    #[test]
    fn ranges_in_the_outer_bands_are_named() {
        let plan: RepeatLayers = "1-3;8-10;18-19".parse().expect("a plan");
        assert_eq!(plan.at_the_boundary(20), "1-3;18-19");
        assert_eq!(plan.to_string(), "1-3;8-10;18-19");
    }
}
