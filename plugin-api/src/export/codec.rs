//! Glue of codec plugins: the tables and the functions behind them.

use core::ffi::c_void;
use core::marker::PhantomData;
use core::mem::size_of;

use super::{Glue, Plugin, object, parse_json};
use crate::cpu_tiles::{CPU_TILES_ID, CpuTiles, CpuTilesOf, CpuTilesVtbl};
use crate::device_source::{DeviceSource, DeviceSourceOf, DeviceSourceVtbl, HasDeviceSource};
use crate::error::{Error, Status};
use crate::guard::guard;
use crate::kv_codec::{
    CodecInfo, CodecLayout, CodecParams, DOMAIN_PLAIN, DOMAIN_ROTATED, Facts, KvCodec, KvCodecVtbl, KvCodecs,
    OpenParams, Rows, RowsMut, SIDE_K, SIDE_V, Side,
};
use crate::root::{Kind, PluginRoot};
use crate::text::{Str, TextBuf};
use crate::{DEVICE_SOURCE_ID, PAGE_TOKENS};

impl CpuTilesVtbl {
    /// The table of a codec that implements [`CpuTiles`].
    pub fn of<C: CpuTiles>() -> CpuTilesOf<C> {
        CpuTilesOf { table: <TileGlue<C>>::VTBL, query_bytes: C::query_bytes }
    }
}

impl DeviceSourceVtbl {
    /// The table of a codec that implements [`HasDeviceSource`].
    pub fn of<C: HasDeviceSource>() -> DeviceSourceOf<C> {
        DeviceSourceOf { table: <SourceGlue<C>>::VTBL, codec: PhantomData }
    }
}

struct TileGlue<C>(PhantomData<C>);

struct SourceGlue<C>(PhantomData<C>);

impl<C: HasDeviceSource> SourceGlue<C> {
    const VTBL: &'static DeviceSourceVtbl =
        &DeviceSourceVtbl { size: size_of::<DeviceSourceVtbl>(), source: codec_device_source::<C> };
}

impl<P: Plugin + KvCodecs> Glue<P> {
    pub(super) const KV_CODEC_ROOT: &'static PluginRoot =
        &Self::root(&Self::manifest(Kind::KvCodec), core::ptr::from_ref::<KvCodecVtbl>(Self::KV_CODEC_VTBL).cast());
    const KV_CODEC_VTBL: &'static KvCodecVtbl = &KvCodecVtbl {
        size: size_of::<KvCodecVtbl>(),
        count: codec_count::<P>,
        info: codec_info::<P>,
        open: codec_open::<P>,
        close: codec_close::<P::Codec>,
        layout: codec_layout::<P::Codec>,
        append: codec_append::<P::Codec>,
        encode_page: codec_encode_page::<P::Codec>,
        decode_page: codec_decode_page::<P::Codec>,
        transform_query: codec_transform_query::<P::Codec>,
        transform_output: codec_transform_output::<P::Codec>,
        extension: codec_extension::<P::Codec>,
    };
}

impl<C: CpuTiles> TileGlue<C> {
    const VTBL: &'static CpuTilesVtbl = &CpuTilesVtbl {
        size: size_of::<CpuTilesVtbl>(),
        query_bytes: tiles_query_bytes::<C>,
        prepare_query: tiles_prepare_query::<C>,
        score: tiles_score::<C>,
        accumulate: tiles_accumulate::<C>,
    };
}

/// What `open` hands out. Sizes are asked of the author's code once, so that no later answer of it can make the glue
/// build a slice of another length than the host allocated.
struct Opened<C> {
    codec: C,
    facts: Facts,
    query_bytes: usize,
}

impl<C: KvCodec> Opened<C> {
    fn new(codec: C, params: &OpenParams) -> Result<Self, Error> {
        let facts = codec.facts();
        if facts.head_dim != params.head_dim {
            return Err(Error::new(format!(
                "codec `{}` was opened for a head size of {} and reports {}",
                params.codec, params.head_dim, facts.head_dim
            )));
        }
        let query_bytes = match C::cpu_tiles() {
            Some(tiles) if params.side == Side::K => (tiles.query_bytes)(&codec),
            _ => 0,
        };
        Ok(Opened { codec, facts, query_bytes })
    }
}

/// Writes as much of `value` as the host's struct has room for; the size field stays the host's.
///
/// # Safety
/// `out` points to a growing struct that starts with its size as the host was built.
unsafe fn write_growing<T>(out: *mut T, value: T) {
    // SAFETY: promised by the caller; no more than its size is written.
    unsafe {
        let size = *out.cast::<usize>();
        core::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), out.cast(), size.min(size_of::<T>()));
        *out.cast::<usize>() = size;
    }
}

unsafe fn rows<'a>(data: *const f32, n: u32, width: usize, stride: usize) -> Rows<'a> {
    let n = n as usize;
    let len = if n == 0 { 0 } else { (n - 1) * stride + width };
    // SAFETY: the host passes `n` rows of `width` values, `stride` apart, alive during the call.
    Rows::new(if len == 0 { &[] } else { unsafe { core::slice::from_raw_parts(data, len) } }, n, width, stride)
}

unsafe fn rows_mut<'a>(data: *mut f32, n: u32, width: usize, stride: usize) -> RowsMut<'a> {
    let n = n as usize;
    let len = if n == 0 { 0 } else { (n - 1) * stride + width };
    // SAFETY: as in `rows`, and nobody else touches them during the call.
    let data = if len == 0 { &mut [] } else { unsafe { core::slice::from_raw_parts_mut(data, len) } };
    RowsMut::new(data, n, width, stride)
}

/// A tile, with the range of slots checked so that an author may index with it.
///
/// # Safety
/// `data` is a whole tile of `len` bytes that was initialised at allocation and that nobody writes during the call.
unsafe fn tile<'a>(data: *const u8, len: usize, first: u32, n: u32) -> Result<&'a [u8], Error> {
    check_slots(first, n)?;
    // SAFETY: promised by the caller.
    Ok(unsafe { core::slice::from_raw_parts(data, len) })
}

/// # Safety
/// As [`tile`], and nobody else touches it during the call: a page has one writer.
unsafe fn tile_mut<'a>(data: *mut u8, len: usize, first: u32, n: u32) -> Result<&'a mut [u8], Error> {
    check_slots(first, n)?;
    // SAFETY: promised by the caller.
    Ok(unsafe { core::slice::from_raw_parts_mut(data, len) })
}

fn check_slots(first: u32, n: u32) -> Result<(), Error> {
    let end = u64::from(first) + u64::from(n);
    if end > PAGE_TOKENS as u64 {
        return Err(Error::new(format!("slots {first}..{end} reach beyond a page of {PAGE_TOKENS}")));
    }
    Ok(())
}

unsafe extern "C" fn codec_count<P: KvCodecs>(plugin: *mut c_void, out: *mut u32, error: *mut TextBuf) -> Status {
    // SAFETY: see `object`; `out` is valid during the call.
    unsafe {
        guard(error, || {
            *out = object::<P>(plugin).codecs().len() as u32;
            Ok(())
        })
    }
}

unsafe extern "C" fn codec_info<P: KvCodecs>(
    plugin: *mut c_void,
    index: u32,
    out: *mut CodecInfo,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: see `object`; `out` starts with its size.
    unsafe {
        guard(error, || {
            let codecs = object::<P>(plugin).codecs();
            let name = codecs
                .get(index as usize)
                .ok_or_else(|| Error::new(format!("codec {index} was asked for, there are {}", codecs.len())))?;
            let (name, summary) = (Str::from_static(name.name), Str::from_static(name.summary));
            write_growing(out, CodecInfo { size: 0, name, summary });
            Ok(())
        })
    }
}

unsafe extern "C" fn codec_open<P: KvCodecs>(
    plugin: *mut c_void,
    params: *const CodecParams,
    out: *mut *mut c_void,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: pointers are valid during the call.
    unsafe {
        guard(error, || {
            let p = &*params;
            let side = match p.side {
                SIDE_K => Side::K,
                SIDE_V => Side::V,
                other => {
                    return Err(Error::unsupported(format!("side {other} is unknown; 0 is K and 1 is V")));
                }
            };
            let params = OpenParams {
                codec: p.codec.to_string_lossy(),
                options: parse_json(&p.options.to_string_lossy(), "codec's options")?,
                side,
                head_dim: p.head_dim as usize,
            };
            let opened = Opened::new(object::<P>(plugin).open(&params)?, &params)?;
            *out = Box::into_raw(Box::new(opened)).cast();
            Ok(())
        })
    }
}

unsafe extern "C" fn codec_close<C: KvCodec>(codec: *mut c_void, error: *mut TextBuf) -> Status {
    // SAFETY: made by `open` of this plugin and closed once.
    unsafe {
        guard(error, || {
            drop(Box::from_raw(codec.cast::<Opened<C>>()));
            Ok(())
        })
    }
}

unsafe extern "C" fn codec_layout<C: KvCodec>(
    codec: *mut c_void,
    out: *mut CodecLayout,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: see `object`; `out` starts with its size.
    unsafe {
        guard(error, || {
            let f = &object::<Opened<C>>(codec).facts;
            write_growing(
                out,
                CodecLayout {
                    size: 0,
                    tile_bytes: f.tile_bytes,
                    bits_per_value: f.bits_per_value,
                    domain: if f.rotated { DOMAIN_ROTATED } else { DOMAIN_PLAIN },
                    stage_tokens: f.stage_tokens,
                },
            );
            Ok(())
        })
    }
}

unsafe extern "C" fn codec_append<C: KvCodec>(
    codec: *mut c_void,
    data: *mut u8,
    first_slot: u32,
    n: u32,
    values: *const f32,
    stride: usize,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: see `object`, `tile_mut` and `rows`.
    unsafe {
        guard(error, || {
            let Opened { codec, facts, .. } = object::<Opened<C>>(codec);
            let tile = tile_mut(data, facts.tile_bytes, first_slot, n)?;
            codec.append(tile, first_slot as usize, rows(values, n, facts.head_dim, stride))
        })
    }
}

unsafe extern "C" fn codec_encode_page<C: KvCodec>(
    codec: *mut c_void,
    data: *mut u8,
    values: *const f32,
    stride: usize,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: see `object`, `tile_mut` and `rows`.
    unsafe {
        guard(error, || {
            let Opened { codec, facts, .. } = object::<Opened<C>>(codec);
            let tile = tile_mut(data, facts.tile_bytes, 0, PAGE_TOKENS as u32)?;
            codec.encode_page(tile, rows(values, PAGE_TOKENS as u32, facts.head_dim, stride))
        })
    }
}

unsafe extern "C" fn codec_decode_page<C: KvCodec>(
    codec: *mut c_void,
    data: *const u8,
    first_slot: u32,
    n: u32,
    values: *mut f32,
    stride: usize,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: see `object`, `tile` and `rows_mut`.
    unsafe {
        guard(error, || {
            let Opened { codec, facts, .. } = object::<Opened<C>>(codec);
            let tile = tile(data, facts.tile_bytes, first_slot, n)?;
            codec.decode_page(tile, first_slot as usize, rows_mut(values, n, facts.head_dim, stride))
        })
    }
}

unsafe extern "C" fn codec_transform_query<C: KvCodec>(
    codec: *mut c_void,
    values: *mut f32,
    n: u32,
    stride: usize,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: see `object` and `rows_mut`.
    unsafe {
        guard(error, || {
            let Opened { codec, facts, .. } = object::<Opened<C>>(codec);
            codec.transform_query(rows_mut(values, n, facts.head_dim, stride))
        })
    }
}

unsafe extern "C" fn codec_transform_output<C: KvCodec>(
    codec: *mut c_void,
    values: *mut f32,
    n: u32,
    stride: usize,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: see `object` and `rows_mut`.
    unsafe {
        guard(error, || {
            let Opened { codec, facts, .. } = object::<Opened<C>>(codec);
            codec.transform_output(rows_mut(values, n, facts.head_dim, stride))
        })
    }
}

unsafe extern "C" fn codec_extension<C: KvCodec>(
    _codec: *mut c_void,
    id: Str,
    out: *mut *const c_void,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: `id` and `out` are valid during the call.
    unsafe {
        guard(error, || {
            *out = match id.to_string_lossy().as_str() {
                CPU_TILES_ID => C::cpu_tiles().map_or(core::ptr::null(), |t| core::ptr::from_ref(t.table).cast()),
                DEVICE_SOURCE_ID => {
                    C::device_sources().map_or(core::ptr::null(), |t| core::ptr::from_ref(t.table).cast())
                }
                _ => core::ptr::null(),
            };
            Ok(())
        })
    }
}

unsafe extern "C" fn codec_device_source<C: HasDeviceSource>(
    codec: *mut c_void,
    language: Str,
    out: *mut DeviceSource,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: see `object`; `language` and `out` are valid during the call. The texts belong to the opened codec.
    unsafe {
        guard(error, || {
            let source = object::<Opened<C>>(codec).codec.device_source(&language.to_string_lossy());
            *out = source.map_or(DeviceSource { text: Str::EMPTY, name: Str::EMPTY }, |s| DeviceSource {
                text: Str::new(s.text),
                name: Str::new(s.name),
            });
            Ok(())
        })
    }
}

unsafe extern "C" fn tiles_query_bytes<C: CpuTiles>(codec: *mut c_void) -> usize {
    // SAFETY: see `object`.
    unsafe { object::<Opened<C>>(codec) }.query_bytes
}

unsafe extern "C" fn tiles_prepare_query<C: CpuTiles>(
    codec: *mut c_void,
    values: *const f32,
    n: u32,
    stride: usize,
    prepared: *mut u8,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: see `object` and `rows`; `prepared` holds `n` rows of `query_bytes`.
    unsafe {
        guard(error, || {
            let Opened { codec, facts, query_bytes } = object::<Opened<C>>(codec);
            let prepared = core::slice::from_raw_parts_mut(prepared, n as usize * query_bytes);
            codec.prepare_query(rows(values, n, facts.head_dim, stride), prepared)
        })
    }
}

unsafe extern "C" fn tiles_score<C: CpuTiles>(
    codec: *mut c_void,
    prepared: *const u8,
    n_rows: u32,
    data: *const u8,
    first_slot: u32,
    n_tokens: u32,
    scores: *mut f32,
    scores_stride: usize,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: see `object`, `tile` and `rows_mut`.
    unsafe {
        guard(error, || {
            let Opened { codec, facts, query_bytes } = object::<Opened<C>>(codec);
            let prepared = core::slice::from_raw_parts(prepared, n_rows as usize * query_bytes);
            let tile = tile(data, facts.tile_bytes, first_slot, n_tokens)?;
            let scores = rows_mut(scores, n_rows, n_tokens as usize, scores_stride);
            codec.score(prepared, tile, first_slot as usize, scores)
        })
    }
}

unsafe extern "C" fn tiles_accumulate<C: CpuTiles>(
    codec: *mut c_void,
    weights: *const f32,
    weights_stride: usize,
    n_rows: u32,
    data: *const u8,
    first_slot: u32,
    n_tokens: u32,
    acc: *mut f32,
    acc_stride: usize,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: see `object`, `tile`, `rows` and `rows_mut`.
    unsafe {
        guard(error, || {
            let Opened { codec, facts, .. } = object::<Opened<C>>(codec);
            let tile = tile(data, facts.tile_bytes, first_slot, n_tokens)?;
            let weights = rows(weights, n_rows, n_tokens as usize, weights_stride);
            let acc = rows_mut(acc, n_rows, facts.head_dim, acc_stride);
            codec.accumulate(weights, tile, first_slot as usize, acc)
        })
    }
}
