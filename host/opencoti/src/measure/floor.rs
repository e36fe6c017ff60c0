//! The floor of a step's time: what reading its bytes takes, at the speed at which as many threads read memory here and now.

use std::time::Instant;

/// Words of the buffer: more than any cache holds.
const WORDS: usize = 64 << 20;

/// Memory to read.
pub struct Floor {
    buffer: Vec<u64>,
    threads: usize,
}

impl Floor {
    /// A buffer of 512 MiB for so many threads.
    pub fn new(threads: usize) -> Floor {
        Floor { buffer: (0..WORDS as u64).collect(), threads: threads.max(1) }
    }

    /// Bytes a second at which all threads together read the buffer once.
    pub fn bandwidth(&self) -> f64 {
        let start = Instant::now();
        let sum: u64 = std::thread::scope(|scope| {
            let parts = self.buffer.chunks(self.buffer.len().div_ceil(self.threads));
            let readers: Vec<_> = parts.map(|part| scope.spawn(move || sum(part))).collect();
            readers.into_iter().map(|reader| reader.join().unwrap_or(0)).fold(0, u64::wrapping_add)
        });
        std::hint::black_box(sum);
        size_of_val(self.buffer.as_slice()) as f64 / start.elapsed().as_secs_f64()
    }
}

fn sum(words: &[u64]) -> u64 {
    words.iter().fold(0, |sum, word| sum.wrapping_add(*word))
}
