//! Random blocks of each type, in pools that are written over and over from varying starts.

use std::io::Write;

use opencoti_compute::quant::WeightType;

use super::Tensor;

/// Bytes of a pool: small against a large model, large against what a cache holds.
const POOL_BYTES: usize = 8 << 20;
/// Blocks by which the start moves from one tensor to the next; a prime.
const STRIDE: usize = 7919;

/// Steele and others' SplitMix64.
#[derive(Clone)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// Evenly distributed with this standard deviation.
    fn uniform(&mut self, deviation: f32) -> f32 {
        let unit = (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        unit * 3f32.sqrt() * deviation
    }
}

/// One pool for each type and deviation.
pub(super) struct Pools {
    seed: u64,
    pools: Vec<(WeightType, u32, Vec<u8>)>,
}

impl Pools {
    pub(super) fn new(seed: u64) -> Pools {
        Pools { seed, pools: Vec::new() }
    }

    /// Writes tensor number `index`, a random one of this standard deviation.
    pub(super) fn write(
        &mut self,
        out: &mut impl Write,
        tensor: &Tensor,
        deviation: f32,
        index: usize,
    ) -> std::io::Result<()> {
        let ty = tensor.ty.weight_type().unwrap_or(WeightType::F32);
        let pool = self.pool(ty, deviation);
        let block = ty.block_bytes();
        let (mut start, mut rest) = (index * STRIDE % (pool.len() / block) * block, tensor.bytes());
        while rest > 0 {
            let n = rest.min(pool.len() - start);
            out.write_all(&pool[start..start + n])?;
            (start, rest) = (0, rest - n);
        }
        Ok(())
    }

    fn pool(&mut self, ty: WeightType, deviation: f32) -> &[u8] {
        let key = |p: &(WeightType, u32, Vec<u8>)| (p.0, p.1) == (ty, deviation.to_bits());
        let at = self.pools.iter().position(key).unwrap_or_else(|| {
            let random = Random(self.seed ^ u64::from(ty.ggml_id()) << 32 ^ u64::from(deviation.to_bits()));
            self.pools.push((ty, deviation.to_bits(), pool(ty, deviation, random)));
            self.pools.len() - 1
        });
        &self.pools[at].2
    }
}

fn pool(ty: WeightType, deviation: f32, mut random: Random) -> Vec<u8> {
    let blocks = POOL_BYTES / ty.block_bytes();
    match ty {
        WeightType::F32 => (0..blocks).flat_map(|_| random.uniform(deviation).to_le_bytes()).collect(),
        WeightType::F16 => {
            (0..blocks).flat_map(|_| half::f16::from_f32(random.uniform(deviation)).to_le_bytes()).collect()
        }
        WeightType::BF16 => {
            (0..blocks).flat_map(|_| half::bf16::from_f32(random.uniform(deviation)).to_le_bytes()).collect()
        }
        _ => {
            let mut bytes: Vec<u8> = (0..POOL_BYTES / 8).flat_map(|_| random.next().to_le_bytes()).collect();
            bytes.truncate(blocks * ty.block_bytes());
            bytes.chunks_exact_mut(ty.block_bytes()).for_each(|block| scale(ty, deviation, block));
            bytes
        }
    }
}

/// Sets the scales of a block of random codes so that its values have mean 0 and this standard deviation: the divisors are
/// the deviations of a block whose own scales are random and whose outer scale is 1.
fn scale(ty: WeightType, deviation: f32, block: &mut [u8]) {
    let mut put = |at: usize, value: f32| block[at..at + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
    match ty {
        WeightType::Q4_0 => put(0, deviation / 4.637),
        WeightType::Q5_0 => put(0, deviation / 9.247),
        WeightType::Q8_0 => put(0, deviation / 73.9),
        WeightType::Q4_K => {
            let d = deviation / 258.3;
            put(0, d);
            put(2, 7.5 * d);
        }
        WeightType::Q6_K => put(208, deviation / 1366.0),
        other => unreachable!("no mix holds {other}"),
    }
}
