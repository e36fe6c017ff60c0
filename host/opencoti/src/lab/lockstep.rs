//! Running the same tokens through a reference and others, step by step.

use std::time::Instant;

use anyhow::Result;
use opencoti_kv::{BatchItem, Cache, Outputs, SeqId};

use super::compare::{Distribution, Tally};
use crate::measure::cost::{self, Cost};
use crate::measure::rig::Rig;

/// A pair of codecs on its way through the text.
pub struct Track {
    /// Bits of a stored value.
    pub bits: f64,
    /// Bytes of a token's keys and values.
    pub bytes: f64,
    cache: Cache,
    /// What every passage goes on from, if there is such a thing.
    prefix: Option<SeqId>,
    sequences: Vec<SeqId>,
    /// What was found against the first track.
    pub tally: Tally,
    /// Tokens of scored steps.
    pub tokens: usize,
    /// Seconds that these took.
    pub seconds: f64,
}

impl Track {
    /// A track over a cache with room for what is run.
    pub fn new(rig: &Rig, cache: Cache) -> Track {
        let groups = &cache.config().groups;
        Track {
            bits: cost::bits_per_value(groups),
            bytes: Cost::new(&rig.model, groups).token_bytes(),
            cache,
            prefix: None,
            sequences: Vec::new(),
            tally: Tally::default(),
            tokens: 0,
            seconds: 0.0,
        }
    }

    /// Fills what the passages to come go on from, in place of what they went on from before.
    ///
    /// # Errors
    /// No room, or a codec that failed.
    pub fn set_prefix(&mut self, rig: &mut Rig, tokens: &[u32]) -> Result<()> {
        self.prefix.take().map_or(Ok(()), |seq| self.cache.release(seq))?;
        let seq = self.cache.create();
        rig.fill(&mut self.cache, seq, tokens)?;
        self.prefix = Some(seq);
        Ok(())
    }

    fn begin(&mut self) -> Result<SeqId> {
        Ok(match self.prefix {
            Some(prefix) => self.cache.fork(prefix, self.cache.committed(prefix)?)?,
            None => self.cache.create(),
        })
    }

    /// Tokens a second in scored steps.
    pub fn speed(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

/// How passages are run.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Position of the first token whose logits count; those before go through in large steps.
    pub first: usize,
    /// Rows of each passage in a step. One reads the cache as decoding does.
    pub rows: usize,
}

/// Runs passages of one length, all together, through every track, behind its prefix. Each of the scored positions is compared with the first
/// track's, which is compared with itself.
///
/// # Errors
/// No room in a cache, or a codec that failed.
pub fn run(rig: &mut Rig, tracks: &mut [Track], passages: &[Vec<u32>], pace: Pace) -> Result<()> {
    let length = passages.first().map_or(0, Vec::len);
    for track in tracks.iter_mut() {
        track.sequences.clear();
        for passage in passages {
            let seq = track.begin()?;
            rig.fill(&mut track.cache, seq, &passage[..pace.first])?;
            track.sequences.push(seq);
        }
    }
    // The last token's logits tell of a token that is not there.
    for from in (pace.first..length - 1).step_by(pace.rows) {
        let to = (from + pace.rows).min(length - 1);
        let mut reference: Vec<Distribution> = Vec::new();
        for track in tracks.iter_mut() {
            let found = step(rig, track, passages, from, to)?;
            if reference.is_empty() {
                for (found, token) in found.iter().zip(targets(passages, from, to)) {
                    track.tally.add(found.compare(found), found, token);
                }
                reference = found;
                continue;
            }
            for ((expected, found), token) in reference.iter().zip(&found).zip(targets(passages, from, to)) {
                track.tally.add(expected.compare(found), found, token);
            }
        }
    }
    for track in tracks {
        track.sequences.drain(..).try_for_each(|seq| track.cache.release(seq))?;
    }
    Ok(())
}

/// The distributions after each of the positions `from..to`, passage by passage.
fn step(rig: &mut Rig, track: &mut Track, passages: &[Vec<u32>], from: usize, to: usize) -> Result<Vec<Distribution>> {
    let item = |(passage, &seq)| {
        let passage: &Vec<u32> = passage;
        BatchItem { seq, tokens: &passage[from..to], outputs: Outputs::All }
    };
    let batch: Vec<BatchItem> = passages.iter().zip(&track.sequences).map(item).collect();
    let start = Instant::now();
    let results = rig.step(&mut track.cache, &batch)?;
    track.seconds += start.elapsed().as_secs_f64();
    track.tokens += results.rows();
    Ok((0..results.rows()).map(|row| Distribution::of(results.logits(row))).collect())
}

/// The tokens that follow each of the positions `from..to`, passage by passage.
fn targets(passages: &[Vec<u32>], from: usize, to: usize) -> impl Iterator<Item = u32> + '_ {
    passages.iter().flat_map(move |passage| passage[from + 1..to + 1].iter().copied())
}
