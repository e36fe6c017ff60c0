//! Codec plugins and opened codecs.

use core::ffi::c_void;
use core::mem::{MaybeUninit, offset_of, size_of};
use std::sync::Arc;

use super::{ErrorSpace, Instance, copy_table, outcome, read_table};
use crate::DEVICE_SOURCE_ID;
use crate::cpu_tiles::{CPU_TILES_ID, CpuTilesVtbl};
use crate::device_source::{DeviceSource, DeviceSourceVtbl};
use crate::error::{Error, Status};
use crate::kv_codec::{CodecInfo, CodecLayout, CodecParams, DOMAIN_PLAIN, DOMAIN_ROTATED, KvCodecVtbl, Side};
use crate::root::{Kind, PluginRoot};
use crate::text::{Str, TextBuf};

/// Tiles beyond this are a plugin's mistake: 128 slots of 4096 f32 values are 2 MiB.
const MAX_TILE_BYTES: usize = 1 << 30;
/// A prepared query row beyond this is a plugin's mistake.
const MAX_QUERY_BYTES: usize = 1 << 24;
/// A plugin that claims more codecs has answered garbage.
const MAX_CODECS: u32 = 1024;

/// Copies the root's table of codec functions.
///
/// The functions up to `decode_page` make a codec; a table that ends before a later one has its default.
///
/// # Safety
/// As [`super::check_interface`].
pub(super) unsafe fn read(root: &PluginRoot) -> Result<KvCodecVtbl, String> {
    let mut table = MaybeUninit::<KvCodecVtbl>::uninit();
    let to = table.as_mut_ptr();
    // SAFETY: the fields that may be missing are written here, the others by `copy_table`.
    unsafe {
        (&raw mut (*to).transform_query).write(no_transform);
        (&raw mut (*to).transform_output).write(no_transform);
        (&raw mut (*to).extension).write(no_extension);
        copy_table(root.interface.cast(), to, offset_of!(KvCodecVtbl, transform_query))?;
        Ok(table.assume_init())
    }
}

unsafe extern "C" fn no_transform(_: *mut c_void, _: *mut f32, _: u32, _: usize, error: *mut TextBuf) -> Status {
    // SAFETY: the host passes a buffer of its own.
    unsafe { (*error).write("the codec stores in a basis of its own and has no function to bring rows there") };
    Status::UNSUPPORTED
}

unsafe extern "C" fn no_extension(_: *mut c_void, _: Str, out: *mut *const c_void, _: *mut TextBuf) -> Status {
    // SAFETY: the host passes a variable of its own.
    unsafe { *out = core::ptr::null() };
    Status::OK
}

/// A codec plugin.
#[derive(Clone)]
pub struct CodecPlugin {
    instance: Arc<Instance>,
    table: Arc<KvCodecVtbl>,
}

/// A codec's name and summary, as the host shows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodecEntry {
    /// Name by which a config selects it.
    pub name: String,
    /// One line for people.
    pub summary: String,
}

impl CodecPlugin {
    /// The codec face of an instance; an error when it is of another kind.
    pub fn new(instance: Arc<Instance>) -> Result<Self, Error> {
        let table = Arc::new(instance.table(Kind::KvCodec, read)?);
        Ok(CodecPlugin { instance, table })
    }

    /// The plugin.
    pub fn instance(&self) -> &Arc<Instance> {
        &self.instance
    }

    /// The codecs it offers.
    pub fn codecs(&self) -> Result<Vec<CodecEntry>, Error> {
        let mut n = 0;
        // SAFETY: the instance is alive; `n` lives through the call.
        self.instance.control(|plugin, text| unsafe { (self.table.count)(plugin, &mut n, text) })?;
        if n > MAX_CODECS {
            return Err(Error::new(format!(
                "plugin `{}` claims {n} codecs, expected at most {MAX_CODECS}",
                self.instance.name
            )));
        }
        (0..n).map(|i| self.codec(i)).collect()
    }

    fn codec(&self, index: u32) -> Result<CodecEntry, Error> {
        let mut info = CodecInfo { size: size_of::<CodecInfo>(), name: Str::EMPTY, summary: Str::EMPTY };
        // SAFETY: pointers live through the call.
        self.instance.control(|plugin, text| unsafe { (self.table.info)(plugin, index, &mut info, text) })?;
        // SAFETY: static text by the contract of `CodecInfo`.
        Ok(unsafe { CodecEntry { name: info.name.to_string_lossy(), summary: info.summary.to_string_lossy() } })
    }

    /// Opens a codec for one side and head size. `options` is a JSON object.
    ///
    /// # Errors
    /// The plugin's own, [`Status::UNSUPPORTED`] when it can't serve this side, head size or option; or a sentence
    /// about an answer that can't be right.
    pub fn open(&self, codec: &str, options: &str, side: Side, head_dim: usize) -> Result<Codec, Error> {
        let params = CodecParams {
            size: size_of::<CodecParams>(),
            codec: Str::new(codec),
            options: Str::new(options),
            side: side.code(),
            head_dim: u32::try_from(head_dim).map_err(|_| Error::unsupported("the head size is beyond 32 bits"))?,
        };
        let mut object = core::ptr::null_mut();
        // SAFETY: pointers live through the call.
        self.instance.control(|plugin, text| unsafe { (self.table.open)(plugin, &params, &mut object, text) })?;
        let mut opened = OpenCodec {
            plugin: self.clone(),
            object,
            layout: CodecLayout {
                size: size_of::<CodecLayout>(),
                tile_bytes: 0,
                bits_per_value: 0.0,
                domain: DOMAIN_PLAIN,
                stage_tokens: 0,
            },
            tiles: None,
            name: codec.to_owned(),
            options: options.to_owned(),
            side,
            head_dim,
        };
        opened.read_layout()?;
        opened.find_tiles()?;
        Ok(Codec(Arc::new(opened)))
    }
}

/// The codec's kernels and what they need of the host.
#[derive(Clone, Copy)]
struct Tiles {
    table: CpuTilesVtbl,
    query_bytes: usize,
}

struct OpenCodec {
    plugin: CodecPlugin,
    object: *mut c_void,
    layout: CodecLayout,
    tiles: Option<Tiles>,
    name: String,
    options: String,
    side: Side,
    head_dim: usize,
}

// SAFETY: an opened codec is immutable and its functions are [worker, re-entrant].
unsafe impl Send for OpenCodec {}
// SAFETY: as above.
unsafe impl Sync for OpenCodec {}

impl OpenCodec {
    fn read_layout(&mut self) -> Result<(), Error> {
        let (instance, object, layout) = (&self.plugin.instance, self.object, &mut self.layout);
        // SAFETY: the codec is open; pointers live through the call.
        instance.control(|_, text| unsafe { (self.plugin.table.layout)(object, layout, text) })?;
        let tile_bytes = layout.tile_bytes;
        if tile_bytes == 0 || !tile_bytes.is_multiple_of(2) || tile_bytes > MAX_TILE_BYTES {
            return Err(self.wrong(format!("tiles of {tile_bytes} bytes, expected an even number up to 2^30")));
        }
        if layout.domain != DOMAIN_PLAIN && layout.domain != DOMAIN_ROTATED {
            let domain = layout.domain;
            return Err(self.wrong(format!("domain {domain}, expected 0 (plain) or 1 (rotated)")));
        }
        Ok(())
    }

    fn find_tiles(&mut self) -> Result<(), Error> {
        let id = Str::from_static(CPU_TILES_ID);
        let mut found = core::ptr::null();
        let table = &self.plugin.table;
        // SAFETY: as above.
        self.plugin.instance.control(|_, text| unsafe { (table.extension)(self.object, id, &mut found, text) })?;
        if found.is_null() {
            return Ok(());
        }
        let found = found.cast::<CpuTilesVtbl>();
        // SAFETY: an extension is a static struct of its id's frozen type. It is copied only if it is whole.
        let table = unsafe { read_tiles(found) }.map_err(|e| self.wrong(e))?;
        let query_bytes = match self.side {
            // SAFETY: the codec is open.
            Side::K => unsafe { (table.query_bytes)(self.object) },
            Side::V => 0,
        };
        if self.side == Side::K
            && (query_bytes == 0 || !query_bytes.is_multiple_of(64) || query_bytes > MAX_QUERY_BYTES)
        {
            return Err(self.wrong(format!("prepared rows of {query_bytes} bytes, expected a multiple of 64")));
        }
        self.tiles = Some(Tiles { table, query_bytes });
        Ok(())
    }

    fn wrong(&self, what: String) -> Error {
        Error::new(format!("codec `{}` of plugin `{}` answers {what}", self.name, self.plugin.instance.name))
    }
}

/// # Safety
/// `table` points to a table that starts with its size and is readable that far.
unsafe fn read_tiles(table: *const CpuTilesVtbl) -> Result<CpuTilesVtbl, String> {
    // SAFETY: promised by the caller.
    unsafe { read_table(table) }.map_err(|e| format!("extension `{CPU_TILES_ID}` wrongly: {e}"))
}

impl Drop for OpenCodec {
    fn drop(&mut self) {
        // After a panic the object may be half changed: `control` refuses and it is leaked.
        // SAFETY: opened by this table and closed once.
        let _ = self.plugin.instance.control(|_, text| unsafe { (self.plugin.table.close)(self.object, text) });
    }
}

/// An opened codec. Cheap to clone. Calls check the quarantine and their status only: pointers are the
/// caller's promise.
#[derive(Clone)]
pub struct Codec(Arc<OpenCodec>);

impl Codec {
    /// Name of the codec.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Options it was opened with, JSON.
    pub fn options(&self) -> &str {
        &self.0.options
    }

    /// Side it was opened for.
    pub fn side(&self) -> Side {
        self.0.side
    }

    /// Values in a row.
    pub fn head_dim(&self) -> usize {
        self.0.head_dim
    }

    /// The plugin it comes from.
    pub fn plugin(&self) -> &Arc<Instance> {
        &self.0.plugin.instance
    }

    /// Sizes and domain.
    pub fn layout(&self) -> &CodecLayout {
        &self.0.layout
    }

    /// Whether decoded rows are in the codec's own basis.
    pub fn is_rotated(&self) -> bool {
        self.0.layout.domain != DOMAIN_PLAIN
    }

    /// The codec's own CPU kernels, when it has some.
    pub fn cpu_tiles(&self) -> Option<CpuTilesRef<'_>> {
        self.0.tiles.as_ref().map(|tiles| CpuTilesRef { tiles, codec: self })
    }

    fn call(&self, f: impl FnOnce(&KvCodecVtbl, *mut c_void, &mut TextBuf) -> Status) -> Result<(), Error> {
        let mut space = ErrorSpace::new();
        let mut text = space.buf();
        let instance = &self.0.plugin.instance;
        instance.check_health()?;
        let status = f(&self.0.plugin.table, self.0.object, &mut text);
        outcome(status, &text, &instance.health)
    }

    /// Encodes `n` rows of `head_dim` values, `stride` apart, into slots `first_slot ..`.
    ///
    /// # Safety
    /// `tile` points to a tile that only this call writes; `rows` to the rows.
    pub unsafe fn append(
        &self,
        tile: *mut u8,
        first_slot: usize,
        n: usize,
        rows: *const f32,
        stride: usize,
    ) -> Result<(), Error> {
        // SAFETY: passed on.
        self.call(|t, c, e| unsafe { (t.append)(c, tile, first_slot as u32, n as u32, rows, stride, e) })
    }

    /// Encodes a whole tile.
    ///
    /// # Safety
    /// As [`Codec::append`], with [`crate::PAGE_TOKENS`] rows.
    pub unsafe fn encode_page(&self, tile: *mut u8, rows: *const f32, stride: usize) -> Result<(), Error> {
        // SAFETY: passed on.
        self.call(|t, c, e| unsafe { (t.encode_page)(c, tile, rows, stride, e) })
    }

    /// Decodes `n` slots into rows, in the codec's domain.
    ///
    /// # Safety
    /// `tile` points to a tile whose slots were written; `rows` to space for the rows.
    pub unsafe fn decode_page(
        &self,
        tile: *const u8,
        first_slot: usize,
        n: usize,
        rows: *mut f32,
        stride: usize,
    ) -> Result<(), Error> {
        // SAFETY: passed on.
        self.call(|t, c, e| unsafe { (t.decode_page)(c, tile, first_slot as u32, n as u32, rows, stride, e) })
    }

    /// Brings `n` query rows into the codec's domain; does nothing in the plain domain.
    ///
    /// # Safety
    /// `rows` points to the rows, which only this call touches.
    pub unsafe fn transform_query(&self, rows: *mut f32, n: usize, stride: usize) -> Result<(), Error> {
        if !self.is_rotated() {
            return Ok(());
        }
        // SAFETY: passed on.
        self.call(|t, c, e| unsafe { (t.transform_query)(c, rows, n as u32, stride, e) })
    }

    /// Brings `n` output rows back to the plain basis; does nothing in the plain domain.
    ///
    /// # Safety
    /// As [`Codec::transform_query`].
    pub unsafe fn transform_output(&self, rows: *mut f32, n: usize, stride: usize) -> Result<(), Error> {
        if !self.is_rotated() {
            return Ok(());
        }
        // SAFETY: passed on.
        self.call(|t, c, e| unsafe { (t.transform_output)(c, rows, n as u32, stride, e) })
    }
}

/// A codec's device source, copied from the plugin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OwnedSource {
    /// Source text.
    pub text: String,
    /// The type in it that the codec is.
    pub name: String,
}

impl Codec {
    /// The codec's source for GPUs in `language`, if it has one.
    ///
    /// # Errors
    /// The plugin's own, or a sentence about an answer that can't be right.
    pub fn device_source(&self, language: &str) -> Result<Option<OwnedSource>, Error> {
        let (instance, table) = (&self.0.plugin.instance, &self.0.plugin.table);
        let id = Str::from_static(DEVICE_SOURCE_ID);
        let mut found = core::ptr::null();
        // SAFETY: the codec is open; pointers live through the call.
        instance.control(|_, text| unsafe { (table.extension)(self.0.object, id, &mut found, text) })?;
        if found.is_null() {
            return Ok(None);
        }
        // SAFETY: an extension is a static struct of its id's frozen type. It is copied only if it is whole.
        let table = unsafe { read_table(found.cast::<DeviceSourceVtbl>()) }
            .map_err(|e| self.0.wrong(format!("extension `{DEVICE_SOURCE_ID}` wrongly: {e}")))?;
        let mut source = DeviceSource { text: Str::EMPTY, name: Str::EMPTY };
        let asked = Str::new(language);
        // SAFETY: as above.
        instance.control(|_, text| unsafe { (table.source)(self.0.object, asked, &mut source, text) })?;
        // SAFETY: the texts live as long as the codec, and are copied.
        let (text, name) = unsafe { (source.text.to_string_lossy(), source.name.to_string_lossy()) };
        match (text.is_empty(), name.is_empty()) {
            (true, true) => Ok(None),
            (false, false) => Ok(Some(OwnedSource { text, name })),
            _ => Err(self.0.wrong("a device source without a text or without a name".to_owned())),
        }
    }
}

/// A codec's CPU kernels.
#[derive(Clone, Copy)]
pub struct CpuTilesRef<'a> {
    tiles: &'a Tiles,
    codec: &'a Codec,
}

impl CpuTilesRef<'_> {
    /// Bytes of one prepared query row; 0 for a codec opened for values.
    pub fn query_bytes(&self) -> usize {
        self.tiles.query_bytes
    }

    /// Prepares query rows; see [`CpuTilesVtbl::prepare_query`].
    ///
    /// # Safety
    /// `rows` holds the rows and `prepared`, 64-byte aligned, `n * query_bytes()` bytes.
    pub unsafe fn prepare_query(
        &self,
        rows: *const f32,
        n: usize,
        stride: usize,
        prepared: *mut u8,
    ) -> Result<(), Error> {
        // SAFETY: passed on.
        self.codec.call(|_, c, e| unsafe { (self.tiles.table.prepare_query)(c, rows, n as u32, stride, prepared, e) })
    }

    /// Scores slots; see [`CpuTilesVtbl::score`].
    ///
    /// # Safety
    /// All pointers hold what the ABI function documents.
    pub unsafe fn score(
        &self,
        prepared: *const u8,
        n_rows: usize,
        tile: *const u8,
        first_slot: usize,
        n_tokens: usize,
        scores: *mut f32,
        scores_stride: usize,
    ) -> Result<(), Error> {
        // SAFETY: passed on.
        self.codec.call(|_, c, e| unsafe {
            (self.tiles.table.score)(
                c,
                prepared,
                n_rows as u32,
                tile,
                first_slot as u32,
                n_tokens as u32,
                scores,
                scores_stride,
                e,
            )
        })
    }

    /// Accumulates values; see [`CpuTilesVtbl::accumulate`].
    ///
    /// # Safety
    /// All pointers hold what the ABI function documents.
    pub unsafe fn accumulate(
        &self,
        weights: *const f32,
        weights_stride: usize,
        n_rows: usize,
        tile: *const u8,
        first_slot: usize,
        n_tokens: usize,
        acc: *mut f32,
        acc_stride: usize,
    ) -> Result<(), Error> {
        // SAFETY: passed on.
        self.codec.call(|_, c, e| unsafe {
            (self.tiles.table.accumulate)(
                c,
                weights,
                weights_stride,
                n_rows as u32,
                tile,
                first_slot as u32,
                n_tokens as u32,
                acc,
                acc_stride,
                e,
            )
        })
    }
}
