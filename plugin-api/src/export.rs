//! The plugin's side: makes the C structs from an author's traits.
//!
//! ```ignore
//! struct MyCodecs;
//! impl Plugin for MyCodecs { /* ABOUT, create */ }
//! impl KvCodecs for MyCodecs { /* codecs, open */ }
//! opencoti_plugin_api::export_plugin!(kv_codec: MyCodecs);
//! ```
//! Keep the logic in a library crate and the export in a crate of its own with `crate-type = ["cdylib"]`: two plugins
//! that export the root cannot be linked into one binary.

use core::ffi::c_void;
use core::marker::PhantomData;
use core::mem::size_of;

use crate::PAGE_TOKENS;
use crate::admission::{self, AdmissionDecision, AdmissionPolicy, AdmissionPolicyVtbl};
use crate::admission::{AdmissionRequest, AdmissionSnapshot};
use crate::cpu_tiles::{CPU_TILES_ID, CpuTiles, CpuTilesVtbl};
use crate::error::{Error, Status};
use crate::guard::{guard, guard_silent};
use crate::host::{Host, HostServices};
use crate::kv_codec::{
    CodecInfo, CodecLayout, CodecParams, DOMAIN_PLAIN, DOMAIN_ROTATED, KvCodec, KvCodecVtbl, KvCodecs, OpenParams,
    Rows, RowsMut, SIDE_K, SIDE_V, Side,
};
use crate::residency::{self, ResidencyDecision, ResidencyPolicy, ResidencyPolicyVtbl, ResidencySnapshot};
use crate::root::{API_VERSION, Kind, Manifest, PluginRoot, ROOT_MAGIC};
use crate::text::{Str, TextBuf};

/// What an author says of a plugin.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// Name by which a config selects it.
    pub name: &'static str,
    /// Semantic version, usually `env!("CARGO_PKG_VERSION")`.
    pub version: &'static str,
    /// SPDX expression.
    pub license: &'static str,
    /// One line for people.
    pub summary: &'static str,
    /// What it needs beyond the ABI; empty for nothing.
    pub capabilities: &'static str,
    /// JSON schema of its config; empty for none.
    pub config_schema: &'static str,
}

/// A plugin of any kind.
pub trait Plugin: Sized + Send + Sync + 'static {
    /// Who it is.
    const ABOUT: About;

    /// Makes an instance. `config` is the `config` table of its `[[plugin]]` entry as JSON, `{}` when absent.
    fn create(host: Host, config: &serde_json::Value) -> Result<Self, Error>;
}

/// Exports a plugin: the root and the layout table.
#[macro_export]
macro_rules! export_plugin {
    (kv_codec: $plugin:ty) => {
        $crate::export_plugin!(@root $crate::export::kv_codec_root::<$plugin>());
    };
    (residency_policy: $plugin:ty) => {
        $crate::export_plugin!(@root $crate::export::residency_policy_root::<$plugin>());
    };
    (admission_policy: $plugin:ty) => {
        $crate::export_plugin!(@root $crate::export::admission_policy_root::<$plugin>());
    };
    (@root $root:expr) => {
        /// The root of this plugin.
        // SAFETY: the name is the ABI's; a plugin library exports it once.
        #[unsafe(no_mangle)]
        pub extern "C" fn opencoti_plugin_root() -> *const $crate::PluginRoot {
            $root
        }
        /// The layout table of the API this plugin was built with.
        // SAFETY: as above.
        #[unsafe(no_mangle)]
        pub extern "C" fn opencoti_plugin_layout() -> *const $crate::layout::LayoutTable {
            &$crate::layout::LAYOUT_TABLE
        }
    };
}

/// Offset just past a field; used by [`crate::field_or_none!`].
#[doc(hidden)]
pub const fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// The root of a codec plugin.
pub fn kv_codec_root<P: Plugin + KvCodecs>() -> &'static PluginRoot {
    <Glue<P>>::KV_CODEC_ROOT
}

/// The root of a residency policy.
pub fn residency_policy_root<P: Plugin + ResidencyPolicy>() -> &'static PluginRoot {
    <Glue<P>>::RESIDENCY_ROOT
}

/// The root of an admission policy.
pub fn admission_policy_root<P: Plugin + AdmissionPolicy>() -> &'static PluginRoot {
    <Glue<P>>::ADMISSION_ROOT
}

impl CpuTilesVtbl {
    /// The table of a codec that implements [`CpuTiles`].
    pub fn of<C: CpuTiles>() -> &'static CpuTilesVtbl {
        <TileGlue<C>>::VTBL
    }
}

struct Glue<P>(PhantomData<P>);
struct TileGlue<C>(PhantomData<C>);

impl<P: Plugin> Glue<P> {
    const fn manifest(kind: Kind) -> Manifest {
        Manifest {
            size: size_of::<Manifest>(),
            name: Str::from_static(P::ABOUT.name),
            version: Str::from_static(P::ABOUT.version),
            kind: Str::from_static(kind.name()),
            license: Str::from_static(P::ABOUT.license),
            summary: Str::from_static(P::ABOUT.summary),
            capabilities: Str::from_static(P::ABOUT.capabilities),
            config_schema: Str::from_static(P::ABOUT.config_schema),
        }
    }

    const fn root(manifest: *const Manifest, interface: *const c_void) -> PluginRoot {
        PluginRoot {
            magic: ROOT_MAGIC,
            size: size_of::<PluginRoot>(),
            api: API_VERSION,
            manifest,
            interface,
            create: create::<P>,
            destroy: destroy::<P>,
        }
    }
}

impl<P: Plugin + KvCodecs> Glue<P> {
    const KV_CODEC_ROOT: &'static PluginRoot =
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

impl<P: Plugin + ResidencyPolicy> Glue<P> {
    const RESIDENCY_ROOT: &'static PluginRoot = &Self::root(
        &Self::manifest(Kind::ResidencyPolicy),
        core::ptr::from_ref::<ResidencyPolicyVtbl>(&ResidencyPolicyVtbl {
            size: size_of::<ResidencyPolicyVtbl>(),
            plan: residency_plan::<P>,
        })
        .cast(),
    );
}

impl<P: Plugin + AdmissionPolicy> Glue<P> {
    const ADMISSION_ROOT: &'static PluginRoot = &Self::root(
        &Self::manifest(Kind::AdmissionPolicy),
        core::ptr::from_ref::<AdmissionPolicyVtbl>(&AdmissionPolicyVtbl {
            size: size_of::<AdmissionPolicyVtbl>(),
            decide: admission_decide::<P>,
        })
        .cast(),
    );
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

/// An object the host got from this plugin and gives back with a call.
unsafe fn object<'a, T>(ptr: *mut c_void) -> &'a T {
    // SAFETY: the host passes what `create` or `open` of the same plugin returned and has not ended yet.
    unsafe { &*ptr.cast::<T>() }
}

/// Writes as much of `value` as the host's struct has room for; the size field stays the host's.
unsafe fn write_growing<T>(out: *mut T, value: T) {
    // SAFETY: every growing out-struct starts with its size as the host was built.
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
    RowsMut::new(
        if len == 0 { &mut [] } else { unsafe { core::slice::from_raw_parts_mut(data, len) } },
        n,
        width,
        stride,
    )
}

/// A tile, with the range of slots checked so that an author may index with it.
unsafe fn tile<'a>(data: *const u8, len: usize, first: u32, n: u32) -> Result<&'a [u8], Error> {
    check_slots(first, n)?;
    // SAFETY: the host passes a whole tile of the codec's own size, written before or zeroed at allocation.
    Ok(unsafe { core::slice::from_raw_parts(data, len) })
}

unsafe fn tile_mut<'a>(data: *mut u8, len: usize, first: u32, n: u32) -> Result<&'a mut [u8], Error> {
    check_slots(first, n)?;
    // SAFETY: as in `tile`; the page has one writer.
    Ok(unsafe { core::slice::from_raw_parts_mut(data, len) })
}

fn check_slots(first: u32, n: u32) -> Result<(), Error> {
    if first as usize + n as usize > PAGE_TOKENS {
        return Err(Error::new(format!("slots {first}..{} reach beyond a page of {PAGE_TOKENS}", first + n)));
    }
    Ok(())
}

fn parse_json(text: &str, what: &str) -> Result<serde_json::Value, Error> {
    if text.trim().is_empty() {
        return Ok(serde_json::Value::Object(Default::default()));
    }
    serde_json::from_str(text).map_err(|e| Error::new(format!("the {what} is not JSON: {e}")))
}

unsafe extern "C" fn create<P: Plugin>(
    host: *const HostServices,
    config: Str,
    out: *mut *mut c_void,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: pointers are valid during the call by the root's contract.
    unsafe {
        guard(error, || {
            let config = parse_json(&config.to_string_lossy(), "config")?;
            let plugin = P::create(Host::new(host), &config)?;
            *out = Box::into_raw(Box::new(plugin)).cast();
            Ok(())
        })
    }
}

unsafe extern "C" fn destroy<P: Plugin>(instance: *mut c_void) {
    // SAFETY: made by `create` of this plugin and destroyed once.
    guard_silent(|| drop(unsafe { Box::from_raw(instance.cast::<P>()) }));
}

unsafe extern "C" fn codec_count<P: KvCodecs>(plugin: *mut c_void) -> u32 {
    // SAFETY: see `object`.
    guard_silent(|| unsafe { object::<P>(plugin) }.codecs().len() as u32).unwrap_or(0)
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
            *out = Box::into_raw(Box::new(object::<P>(plugin).open(&params)?)).cast();
            Ok(())
        })
    }
}

unsafe extern "C" fn codec_close<C: KvCodec>(codec: *mut c_void) {
    // SAFETY: made by `open` of this plugin and closed once.
    guard_silent(|| drop(unsafe { Box::from_raw(codec.cast::<C>()) }));
}

unsafe extern "C" fn codec_layout<C: KvCodec>(
    codec: *mut c_void,
    out: *mut CodecLayout,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: see `object`; `out` starts with its size.
    unsafe {
        guard(error, || {
            let f = object::<C>(codec).facts();
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
            let codec = object::<C>(codec);
            let tile = tile_mut(data, codec.facts().tile_bytes, first_slot, n)?;
            codec.append(tile, first_slot as usize, rows(values, n, codec.facts().head_dim, stride))
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
            let codec = object::<C>(codec);
            let tile = tile_mut(data, codec.facts().tile_bytes, 0, PAGE_TOKENS as u32)?;
            codec.encode_page(tile, rows(values, PAGE_TOKENS as u32, codec.facts().head_dim, stride))
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
            let codec = object::<C>(codec);
            let tile = tile(data, codec.facts().tile_bytes, first_slot, n)?;
            codec.decode_page(tile, first_slot as usize, rows_mut(values, n, codec.facts().head_dim, stride))
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
            let codec = object::<C>(codec);
            codec.transform_query(rows_mut(values, n, codec.facts().head_dim, stride))
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
            let codec = object::<C>(codec);
            codec.transform_output(rows_mut(values, n, codec.facts().head_dim, stride))
        })
    }
}

unsafe extern "C" fn codec_extension<C: KvCodec>(_codec: *mut c_void, id: Str) -> *const c_void {
    // SAFETY: `id` is valid during the call.
    let table = guard_silent(|| match unsafe { id.to_string_lossy() }.as_str() {
        CPU_TILES_ID => C::cpu_tiles(),
        _ => None,
    });
    table.flatten().map_or(core::ptr::null(), |t| core::ptr::from_ref(t).cast())
}

unsafe extern "C" fn tiles_query_bytes<C: CpuTiles>(codec: *mut c_void) -> usize {
    // SAFETY: see `object`.
    guard_silent(|| unsafe { object::<C>(codec) }.query_bytes()).unwrap_or(0)
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
            let codec = object::<C>(codec);
            let prepared = core::slice::from_raw_parts_mut(prepared, n as usize * codec.query_bytes());
            codec.prepare_query(rows(values, n, codec.facts().head_dim, stride), prepared)
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
            let codec = object::<C>(codec);
            let prepared = core::slice::from_raw_parts(prepared, n_rows as usize * codec.query_bytes());
            let tile = tile(data, codec.facts().tile_bytes, first_slot, n_tokens)?;
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
            let codec = object::<C>(codec);
            let tile = tile(data, codec.facts().tile_bytes, first_slot, n_tokens)?;
            let weights = rows(weights, n_rows, n_tokens as usize, weights_stride);
            let acc = rows_mut(acc, n_rows, codec.facts().head_dim, acc_stride);
            codec.accumulate(weights, tile, first_slot as usize, acc)
        })
    }
}

unsafe extern "C" fn residency_plan<P: ResidencyPolicy>(
    plugin: *mut c_void,
    snapshot: *const ResidencySnapshot,
    out: *mut ResidencyDecision,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: pointers and counts are the host's promise for the length of the call.
    unsafe {
        guard(error, || {
            let s = &*snapshot;
            let groups = if s.n_groups == 0 { &[] } else { core::slice::from_raw_parts(s.groups, s.n_groups as usize) };
            let decision = object::<P>(plugin).plan(&residency::Snapshot {
                event: s.event,
                groups,
                device_budget: s.device_budget,
                host_budget: s.host_budget,
                link_bytes_per_second: s.link_bytes_per_second,
            })?;
            if decision.device_pages.len() != groups.len() {
                return Err(Error::new(format!(
                    "the policy decided on {} groups, expected {}",
                    decision.device_pages.len(),
                    groups.len()
                )));
            }
            for (i, pages) in decision.device_pages.iter().enumerate() {
                *(*out).device_pages.add(i) = *pages;
            }
            (*out).staging_slots = decision.staging_slots;
            Ok(())
        })
    }
}

unsafe extern "C" fn admission_decide<P: AdmissionPolicy>(
    plugin: *mut c_void,
    request: *const AdmissionRequest,
    snapshot: *const AdmissionSnapshot,
    out: *mut AdmissionDecision,
    error: *mut TextBuf,
) -> Status {
    // SAFETY: pointers and counts are the host's promise for the length of the call.
    unsafe {
        guard(error, || {
            let (r, s) = (&*request, &*snapshot);
            let stores = if s.n_stores == 0 { &[] } else { core::slice::from_raw_parts(s.stores, s.n_stores as usize) };
            let stores = stores
                .iter()
                .map(|s| admission::Store {
                    name: s.name.to_string_lossy(),
                    total: s.total,
                    free: s.free,
                    reclaimable: s.reclaimable,
                    window: s.window,
                })
                .collect();
            let decision = object::<P>(plugin).decide(
                &admission::Request {
                    prompt_tokens: r.prompt_tokens,
                    shared_tokens: r.shared_tokens,
                    declared_tokens: r.declared_tokens,
                    overcommit: r.overcommit != 0,
                    known_session: r.known_session != 0,
                },
                &admission::Snapshot {
                    stores,
                    slots_total: s.slots_total,
                    slots_free: s.slots_free,
                    queued: s.queued,
                    seconds_to_next_release: s.seconds_to_next_release,
                },
            )?;
            write_decision(&mut *out, &decision);
            Ok(())
        })
    }
}

/// # Safety
/// The buffer in `out.reason` must be writable.
unsafe fn write_decision(out: &mut AdmissionDecision, decision: &admission::Decision) {
    out.verdict = match decision.verdict {
        admission::Verdict::Admit => admission::VERDICT_ADMIT,
        admission::Verdict::Queue => admission::VERDICT_QUEUE,
        admission::Verdict::Reject => admission::VERDICT_REJECT,
    };
    out.retry_after_seconds = decision.retry_after_seconds;
    out.demand_tokens = decision.demand_tokens;
    out.warn = decision.warn.into();
    out.short_store = decision.short_store.map_or(u32::MAX, |i| i as u32);
    // SAFETY: promised by the caller.
    unsafe { out.reason.write(&decision.reason) };
}
