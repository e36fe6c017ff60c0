//! KV codecs: how a token's keys and values are stored.
//!
//! A plugin offers one or more named codecs. The host opens one for each side (K or V), head size and set of options;
//! the opened codec is immutable and used by many threads. It works on *tiles*: one KV head's [`crate::PAGE_TOKENS`]
//! token slots of one layer and side, `tile_bytes` long, in a layout that is the codec's own business.
//!
//! Rows cross as f32. Keys arrive after rope. A codec that stores in another basis (a rotation) sets the domain to
//! *rotated*: decoded rows are then in that basis, and the host brings queries and outputs over with
//! `transform_query` and `transform_output`.

use core::ffi::c_void;

use opencoti_plugin_api_derive::AbiLayout;

use crate::error::{Error, Status};
use crate::text::{Str, TextBuf};

/// Side code of keys.
pub const SIDE_K: u32 = 0;
/// Side code of values.
pub const SIDE_V: u32 = 1;

/// Decoded rows are what was stored.
pub const DOMAIN_PLAIN: u32 = 0;
/// Decoded rows are in the codec's own orthonormal basis.
pub const DOMAIN_ROTATED: u32 = 1;

/// A codec's name and what it is for. Static text.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
#[abi(growing)]
pub struct CodecInfo {
    /// Bytes of this struct as its writer was built.
    pub size: usize,
    /// Name by which a config selects it, for example `q8_0`.
    pub name: Str,
    /// One line for people.
    pub summary: Str,
}

/// What a codec is opened for. Valid until `open` returns.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
#[abi(growing)]
pub struct CodecParams {
    /// Bytes of this struct as its writer was built.
    pub size: usize,
    /// Which of the plugin's codecs.
    pub codec: Str,
    /// Options as a JSON object, for example `{"rotation":"hadamard"}`.
    pub options: Str,
    /// [`SIDE_K`] or [`SIDE_V`].
    pub side: u32,
    /// Values in a row.
    pub head_dim: u32,
}

/// What an opened codec needs and gives.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, AbiLayout)]
#[abi(growing)]
pub struct CodecLayout {
    /// Bytes of this struct as its writer was built.
    pub size: usize,
    /// Bytes of a tile of [`crate::PAGE_TOKENS`] slots; a multiple of 2. The host aligns tiles to 64 bytes.
    pub tile_bytes: usize,
    /// Stored bits per value, scales included.
    pub bits_per_value: f32,
    /// [`DOMAIN_PLAIN`] or [`DOMAIN_ROTATED`].
    pub domain: u32,
    /// Newest tokens that must be kept exact before a tile can be encoded; 0 for token-wise codecs.
    pub stage_tokens: u32,
}

/// Functions of a codec plugin. `plugin` is the instance from the root's `create`, `codec` what `open` gave.
///
/// Rows are `n` times `head_dim` f32 values, `stride` values apart. No function allocates in the host's view, and none
/// keeps a pointer after it returned.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
#[abi(growing)]
pub struct KvCodecVtbl {
    /// Bytes of this struct as the plugin was built.
    pub size: usize,
    /// `[main-thread]` Writes the number of codecs to `*out`.
    pub count: unsafe extern "C" fn(plugin: *mut c_void, out: *mut u32, error: *mut TextBuf) -> Status,
    /// `[main-thread]` Describes codec `index`, writing at most `out->size` bytes.
    pub info: unsafe extern "C" fn(plugin: *mut c_void, index: u32, out: *mut CodecInfo, error: *mut TextBuf) -> Status,
    /// `[main-thread]` Opens a codec; given back through `close`. An unsupported head size, side or option is
    /// [`Status::UNSUPPORTED`].
    pub open: unsafe extern "C" fn(
        plugin: *mut c_void,
        params: *const CodecParams,
        out: *mut *mut c_void,
        error: *mut TextBuf,
    ) -> Status,
    /// `[any-thread]` Closes an opened codec that nobody uses any more. Not called once the plugin is in quarantine.
    pub close: unsafe extern "C" fn(codec: *mut c_void, error: *mut TextBuf) -> Status,
    /// `[any-thread]` Describes an opened codec, writing at most `out->size` bytes.
    pub layout: unsafe extern "C" fn(codec: *mut c_void, out: *mut CodecLayout, error: *mut TextBuf) -> Status,
    /// `[worker, re-entrant]` Encodes `n` rows into slots `first_slot ..` of a tile. Slots are written in order; a tile
    /// starts with undefined bytes. When tokens are taken back, writing goes on at an earlier slot: from there on the
    /// tile's slots are undefined again, those before stay as they are.
    pub append: unsafe extern "C" fn(
        codec: *mut c_void,
        tile: *mut u8,
        first_slot: u32,
        n: u32,
        rows: *const f32,
        stride: usize,
        error: *mut TextBuf,
    ) -> Status,
    /// `[worker, re-entrant]` Encodes a whole tile at once from [`crate::PAGE_TOKENS`] rows (sealing).
    pub encode_page: unsafe extern "C" fn(
        codec: *mut c_void,
        tile: *mut u8,
        rows: *const f32,
        stride: usize,
        error: *mut TextBuf,
    ) -> Status,
    /// `[worker, re-entrant]` Decodes slots `first_slot .. first_slot + n` of a tile, in the codec's domain.
    pub decode_page: unsafe extern "C" fn(
        codec: *mut c_void,
        tile: *const u8,
        first_slot: u32,
        n: u32,
        rows: *mut f32,
        stride: usize,
        error: *mut TextBuf,
    ) -> Status,
    /// `[worker, re-entrant]` Brings query rows into the codec's domain, in place. Only called for rotated domains;
    /// `size` may end before this field.
    pub transform_query:
        unsafe extern "C" fn(codec: *mut c_void, rows: *mut f32, n: u32, stride: usize, error: *mut TextBuf) -> Status,
    /// `[worker, re-entrant]` Brings attention outputs back to the plain basis, in place. Only called for rotated domains.
    pub transform_output:
        unsafe extern "C" fn(codec: *mut c_void, rows: *mut f32, n: u32, stride: usize, error: *mut TextBuf) -> Status,
    /// `[any-thread]` Writes to `*out` the extension of that id for an opened codec, a static struct, or null when
    /// it has none.
    pub extension:
        unsafe extern "C" fn(codec: *mut c_void, id: Str, out: *mut *const c_void, error: *mut TextBuf) -> Status,
}

/// Which side a codec serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Side {
    /// Keys.
    K,
    /// Values.
    V,
}

impl Side {
    /// Its code on the wire.
    pub const fn code(self) -> u32 {
        match self {
            Side::K => SIDE_K,
            Side::V => SIDE_V,
        }
    }
}

impl core::fmt::Display for Side {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Side::K => "K",
            Side::V => "V",
        })
    }
}

/// `n` rows of `width` values, `stride` values apart.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    data: &'a [f32],
    n: usize,
    width: usize,
    stride: usize,
}

impl<'a> Rows<'a> {
    /// Rows over `data`.
    ///
    /// # Panics
    /// When `data` ends before the last row does.
    #[inline]
    pub fn new(data: &'a [f32], n: usize, width: usize, stride: usize) -> Self {
        assert!(n == 0 || (stride >= width && data.len() >= (n - 1) * stride + width));
        Rows { data, n, width, stride }
    }

    /// Number of rows.
    #[inline]
    pub fn len(&self) -> usize {
        self.n
    }

    /// Values in a row.
    #[inline]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Whether there is no row.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// Row `i`.
    #[inline]
    pub fn row(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.stride..][..self.width]
    }

    /// The rows in order.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = &'a [f32]> + '_ {
        (0..self.n).map(|i| self.row(i))
    }
}

/// [`Rows`] to write to.
pub struct RowsMut<'a> {
    data: &'a mut [f32],
    n: usize,
    width: usize,
    stride: usize,
}

impl<'a> RowsMut<'a> {
    /// Rows over `data`.
    ///
    /// # Panics
    /// When `data` ends before the last row does.
    #[inline]
    pub fn new(data: &'a mut [f32], n: usize, width: usize, stride: usize) -> Self {
        assert!(n == 0 || (stride >= width && data.len() >= (n - 1) * stride + width));
        RowsMut { data, n, width, stride }
    }

    /// Number of rows.
    #[inline]
    pub fn len(&self) -> usize {
        self.n
    }

    /// Values in a row.
    #[inline]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Whether there is no row.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// Row `i`.
    #[inline]
    pub fn row(&mut self, i: usize) -> &mut [f32] {
        &mut self.data[i * self.stride..][..self.width]
    }
}

/// A codec's name and summary, for authors.
#[derive(Clone, Copy, Debug)]
pub struct CodecName {
    /// Name by which a config selects it.
    pub name: &'static str,
    /// One line for people.
    pub summary: &'static str,
}

/// What the host asks `open` for.
#[derive(Clone, Debug)]
pub struct OpenParams {
    /// Name of the codec.
    pub codec: String,
    /// Options as JSON; an empty object when there are none.
    pub options: serde_json::Value,
    /// Side.
    pub side: Side,
    /// Values in a row.
    pub head_dim: usize,
}

/// A plugin of codecs, as an author writes it.
pub trait KvCodecs: Send + Sync + 'static {
    /// An opened codec.
    type Codec: KvCodec;

    /// The codecs it offers.
    fn codecs(&self) -> &'static [CodecName];

    /// Opens one. An unsupported head size, side or option is [`Error::unsupported`].
    fn open(&self, params: &OpenParams) -> Result<Self::Codec, Error>;
}

/// Facts of an opened codec, for authors. Units as in [`CodecLayout`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Facts {
    /// Values in a row, as opened.
    pub head_dim: usize,
    /// Bytes of a tile.
    pub tile_bytes: usize,
    /// Stored bits per value.
    pub bits_per_value: f32,
    /// Whether decoded rows are in the codec's own basis.
    pub rotated: bool,
    /// Exact tokens needed before sealing.
    pub stage_tokens: u32,
}

/// An opened codec, as an author writes it. All methods may run on many threads at once, on different tiles.
pub trait KvCodec: Send + Sync + 'static {
    /// Sizes and domain. Asked once, when the codec is opened.
    fn facts(&self) -> Facts;

    /// Encodes rows into slots `first_slot ..`. `tile` may hold bytes that were never written.
    fn append(&self, tile: &mut [u8], first_slot: usize, rows: Rows) -> Result<(), Error>;

    /// Encodes a whole tile at once.
    fn encode_page(&self, tile: &mut [u8], rows: Rows) -> Result<(), Error> {
        self.append(tile, 0, rows)
    }

    /// Decodes slots `first_slot ..` into `rows`, in the codec's domain.
    fn decode_page(&self, tile: &[u8], first_slot: usize, rows: RowsMut) -> Result<(), Error>;

    /// Brings queries into the codec's domain.
    fn transform_query(&self, _rows: RowsMut) -> Result<(), Error> {
        Ok(())
    }

    /// Brings outputs back to the plain basis.
    fn transform_output(&self, _rows: RowsMut) -> Result<(), Error> {
        Ok(())
    }

    /// The table of [`crate::cpu_tiles`] when the codec has kernels of its own: `Some(CpuTilesVtbl::of::<Self>())`.
    fn cpu_tiles() -> Option<crate::cpu_tiles::CpuTilesOf<Self>>
    where
        Self: Sized,
    {
        None
    }

    /// The table of [`crate::device_source`] when the codec has source for GPUs: `Some(DeviceSourceVtbl::of::<Self>())`.
    fn device_sources() -> Option<crate::device_source::DeviceSourceOf<Self>>
    where
        Self: Sized,
    {
        None
    }
}
