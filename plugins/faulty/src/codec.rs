//! A codec that stores f32 rows, forwards or backwards.

use opencoti_plugin_api::cpu_tiles::{CpuTiles, CpuTilesOf, CpuTilesVtbl, Scores, ScoresMut};
use opencoti_plugin_api::kv_codec::{Facts, KvCodec, OpenParams, Rows, RowsMut};
use opencoti_plugin_api::{Error, PAGE_TOKENS};

use crate::fault::Faults;

pub(crate) struct F32Codec {
    head_dim: usize,
    reversed: bool,
    faults: Faults,
}

impl F32Codec {
    pub(crate) fn open(params: &OpenParams, faults: Faults) -> Result<Self, Error> {
        let reversed = match params.codec.as_str() {
            "f32" => false,
            "f32-reversed" => true,
            other => {
                return Err(Error::unsupported(format!("faulty has no codec `{other}`; it has f32 and f32-reversed")));
            }
        };
        if params.options.as_object().is_none_or(|o| !o.is_empty()) {
            return Err(Error::unsupported(format!("codec options are {}, expected none", params.options)));
        }
        if params.head_dim == 0 || params.head_dim > 4096 {
            return Err(Error::unsupported(format!("head size {} is beyond 1..=4096", params.head_dim)));
        }
        Ok(F32Codec { head_dim: params.head_dim, reversed, faults })
    }

    /// Bytes of slot `slot` in a tile.
    fn slot(&self, slot: usize) -> std::ops::Range<usize> {
        slot * self.head_dim * 4..(slot + 1) * self.head_dim * 4
    }

    fn read<'a>(&self, tile: &'a [u8], slot: usize) -> impl Iterator<Item = f32> + 'a {
        tile[self.slot(slot)].as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b))
    }

    fn transform(&self, mut rows: RowsMut) {
        if self.reversed {
            (0..rows.len()).for_each(|i| rows.row(i).reverse());
        }
    }
}

impl Drop for F32Codec {
    fn drop(&mut self) {
        self.faults.enter_infallible("close");
    }
}

impl KvCodec for F32Codec {
    fn facts(&self) -> Facts {
        self.faults.enter_infallible("layout");
        Facts {
            head_dim: self.head_dim,
            tile_bytes: PAGE_TOKENS * self.head_dim * 4,
            bits_per_value: 32.0,
            rotated: self.reversed,
            stage_tokens: 0,
        }
    }

    fn append(&self, tile: &mut [u8], first_slot: usize, rows: Rows) -> Result<(), Error> {
        self.faults.enter("append")?;
        self.write(tile, first_slot, rows);
        Ok(())
    }

    fn encode_page(&self, tile: &mut [u8], rows: Rows) -> Result<(), Error> {
        self.faults.enter("encode_page")?;
        self.write(tile, 0, rows);
        Ok(())
    }

    fn decode_page(&self, tile: &[u8], first_slot: usize, mut rows: RowsMut) -> Result<(), Error> {
        self.faults.enter("decode_page")?;
        for i in 0..rows.len() {
            rows.row(i).iter_mut().zip(self.read(tile, first_slot + i)).for_each(|(to, x)| *to = x);
        }
        Ok(())
    }

    fn transform_query(&self, rows: RowsMut) -> Result<(), Error> {
        self.faults.enter("transform_query")?;
        self.transform(rows);
        Ok(())
    }

    fn transform_output(&self, rows: RowsMut) -> Result<(), Error> {
        self.faults.enter("transform_output")?;
        self.transform(rows);
        Ok(())
    }

    fn cpu_tiles() -> Option<CpuTilesOf<Self>> {
        Some(CpuTilesVtbl::of::<Self>())
    }
}

impl F32Codec {
    fn write(&self, tile: &mut [u8], first_slot: usize, rows: Rows) {
        for (i, row) in rows.iter().enumerate() {
            let (to, _) = tile[self.slot(first_slot + i)].as_chunks_mut::<4>();
            match self.reversed {
                true => to.iter_mut().zip(row.iter().rev()).for_each(|(b, x)| *b = x.to_ne_bytes()),
                false => to.iter_mut().zip(row).for_each(|(b, x)| *b = x.to_ne_bytes()),
            }
        }
    }
}

impl CpuTiles for F32Codec {
    fn query_bytes(&self) -> usize {
        self.faults.enter_infallible("query_bytes");
        (self.head_dim * 4).next_multiple_of(64)
    }

    fn prepare_query(&self, rows: Rows, prepared: &mut [u8]) -> Result<(), Error> {
        self.faults.enter("prepare_query")?;
        for (row, to) in rows.iter().zip(prepared.chunks_exact_mut((self.head_dim * 4).next_multiple_of(64))) {
            let (to, _) = to.as_chunks_mut::<4>();
            match self.reversed {
                true => to.iter_mut().zip(row.iter().rev()).for_each(|(b, x)| *b = x.to_ne_bytes()),
                false => to.iter_mut().zip(row).for_each(|(b, x)| *b = x.to_ne_bytes()),
            }
        }
        Ok(())
    }

    fn score(&self, prepared: &[u8], tile: &[u8], first_slot: usize, mut scores: ScoresMut) -> Result<(), Error> {
        self.faults.enter("score")?;
        let stride = (self.head_dim * 4).next_multiple_of(64);
        for r in 0..scores.len() {
            let query = &prepared[r * stride..][..self.head_dim * 4];
            let query: Vec<f32> = query.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect();
            for (t, score) in scores.row(r).iter_mut().enumerate() {
                *score = query.iter().zip(self.read(tile, first_slot + t)).map(|(q, k)| q * k).sum();
            }
        }
        Ok(())
    }

    fn accumulate(&self, weights: Scores, tile: &[u8], first_slot: usize, mut acc: RowsMut) -> Result<(), Error> {
        self.faults.enter("accumulate")?;
        for r in 0..acc.len() {
            for (t, w) in weights.row(r).iter().enumerate() {
                acc.row(r).iter_mut().zip(self.read(tile, first_slot + t)).for_each(|(a, v)| *a += w * v);
            }
        }
        Ok(())
    }
}
