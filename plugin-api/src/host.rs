//! The host's side: typed wrappers around a plugin's tables, and the services the host gives.
//!
//! Everything here works alike for a plugin loaded from a file and for one linked in, since both are a
//! [`PluginRoot`].

use core::ffi::c_void;
use core::mem::{MaybeUninit, size_of};
use std::sync::Arc;
use std::time::Instant;

use opencoti_plugin_api_derive::AbiLayout;

use crate::admission::{self, AdmissionDecision, AdmissionPolicyVtbl, AdmissionRequest, AdmissionSnapshot, StoreState};
use crate::cpu_tiles::{CPU_TILES_ID, CpuTilesVtbl};
use crate::error::{Error, Status};
use crate::health::Health;
use crate::kv_codec::{CodecInfo, CodecLayout, CodecParams, DOMAIN_PLAIN, KvCodecVtbl, Side};
use crate::residency::{self, ResidencyDecision, ResidencyPolicyVtbl, ResidencySnapshot};
use crate::root::{Kind, PluginRoot};
use crate::text::{Str, TextBuf};

/// What the host gives a plugin. Valid as long as the instance it was created for.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
#[abi(growing)]
pub struct HostServices {
    /// Bytes of this struct as the host was built.
    pub size: usize,
    /// Passed back to every function.
    pub context: *mut c_void,
    /// `[any-thread]` Logs one line; levels are 1 error, 2 warn, 3 info, 4 debug, 5 trace.
    pub log: unsafe extern "C" fn(context: *mut c_void, level: u32, message: Str),
    /// `[any-thread]` Sets the gauge `opencoti_plugin_<name>` of this plugin.
    pub gauge: unsafe extern "C" fn(context: *mut c_void, name: Str, value: f64),
    /// `[any-thread]` Nanoseconds since the host started; monotonic.
    pub clock_ns: unsafe extern "C" fn(context: *mut c_void) -> u64,
    /// `[any-thread]` Bytes this plugin may allocate for tables of its own; 0 for no stated limit.
    pub memory_budget: unsafe extern "C" fn(context: *mut c_void) -> u64,
    /// `[any-thread]` A further service by id, a static struct, or null.
    pub service: unsafe extern "C" fn(context: *mut c_void, id: Str) -> *const c_void,
}

/// The host's services, as a plugin author uses them.
#[derive(Clone, Copy)]
pub struct Host(*const HostServices);

// SAFETY: every service is labelled [any-thread], and the struct outlives the instance.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

impl Host {
    /// # Safety
    /// `services` must be what the host passed to `create`.
    pub(crate) unsafe fn new(services: *const HostServices) -> Self {
        Host(services)
    }

    fn services(&self) -> &HostServices {
        // SAFETY: valid as long as the instance, by the contract of `create`.
        unsafe { &*self.0 }
    }

    /// Logs a warning.
    pub fn warn(&self, message: &str) {
        // SAFETY: the host's own function with its own context.
        unsafe { (self.services().log)(self.services().context, 2, Str::new(message)) }
    }

    /// Logs a line of information.
    pub fn info(&self, message: &str) {
        // SAFETY: as above.
        unsafe { (self.services().log)(self.services().context, 3, Str::new(message)) }
    }

    /// Sets a gauge of this plugin.
    pub fn gauge(&self, name: &str, value: f64) {
        // SAFETY: as above.
        unsafe { (self.services().gauge)(self.services().context, Str::new(name), value) }
    }

    /// Nanoseconds since the host started.
    pub fn clock_ns(&self) -> u64 {
        // SAFETY: as above.
        unsafe { (self.services().clock_ns)(self.services().context) }
    }
}

/// Where a plugin's log lines and gauges go.
pub trait Sink: Send + Sync + 'static {
    /// A log line; levels as in [`HostServices::log`].
    fn log(&self, plugin: &str, level: u32, message: &str);
    /// A gauge.
    fn gauge(&self, plugin: &str, name: &str, value: f64);
}

/// A sink that drops everything.
pub struct NoSink;

impl Sink for NoSink {
    fn log(&self, _: &str, _: u32, _: &str) {}
    fn gauge(&self, _: &str, _: &str, _: f64) {}
}

struct Context {
    plugin: String,
    sink: Arc<dyn Sink>,
    started: Instant,
}

unsafe extern "C" fn log(context: *mut c_void, level: u32, message: Str) {
    // SAFETY: `context` is the box kept by the instance; `message` is valid during the call.
    let (context, message) = unsafe { (&*context.cast::<Context>(), message.to_string_lossy()) };
    context.sink.log(&context.plugin, level, &message);
}

unsafe extern "C" fn gauge(context: *mut c_void, name: Str, value: f64) {
    // SAFETY: as above.
    let (context, name) = unsafe { (&*context.cast::<Context>(), name.to_string_lossy()) };
    context.sink.gauge(&context.plugin, &name, value);
}

unsafe extern "C" fn clock_ns(context: *mut c_void) -> u64 {
    // SAFETY: as above.
    let context = unsafe { &*context.cast::<Context>() };
    u64::try_from(context.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

unsafe extern "C" fn memory_budget(_: *mut c_void) -> u64 {
    0
}

unsafe extern "C" fn service(_: *mut c_void, _: Str) -> *const c_void {
    core::ptr::null()
}

/// Space for the text a failed call leaves; on the stack, so that a good call costs nothing.
struct ErrorSpace {
    bytes: MaybeUninit<[u8; 512]>,
}

impl ErrorSpace {
    fn new() -> Self {
        ErrorSpace { bytes: MaybeUninit::uninit() }
    }

    fn buf(&mut self) -> TextBuf {
        TextBuf { ptr: self.bytes.as_mut_ptr().cast(), capacity: 512, len: 0 }
    }
}

/// Turns a status into a result; a panic puts the plugin in quarantine.
fn outcome(status: Status, text: &TextBuf, health: &Health) -> Result<(), Error> {
    if status == Status::OK {
        return Ok(());
    }
    // SAFETY: made by `ErrorSpace::buf`; the callee wrote the first `len` bytes.
    let error = unsafe { Error::from_call(status, text) };
    if status != Status::UNSUPPORTED {
        health.failed();
    }
    if status == Status::PANIC {
        health.quarantine(&error.message);
    }
    Err(error)
}

/// A plugin that was created: any kind, by file or linked in.
pub struct Instance {
    root: &'static PluginRoot,
    object: *mut c_void,
    health: Arc<Health>,
    name: String,
    kind: Kind,
    // The plugin holds a pointer to the services, which hold one to the context.
    _services: Box<HostServices>,
    _context: Box<Context>,
}

// SAFETY: the ABI's objects are used from any thread according to each function's label.
unsafe impl Send for Instance {}
// SAFETY: as above.
unsafe impl Sync for Instance {}

impl Instance {
    /// Creates an instance from a root that was checked before (magic, API, layout).
    ///
    /// `config` is JSON text.
    pub fn create(root: &'static PluginRoot, config: &str, sink: Arc<dyn Sink>) -> Result<Arc<Self>, Error> {
        // SAFETY: manifests are static and were checked by whoever found the root.
        let (name, kind) = unsafe {
            let manifest = root.manifest.as_ref().ok_or_else(|| Error::new("the plugin has no manifest"))?;
            (manifest.name.to_string_lossy(), manifest.kind.to_string_lossy())
        };
        let kind = Kind::from_name(&kind).ok_or_else(|| Error::new(format!("`{kind}` is no kind of plugin")))?;
        let mut context = Box::new(Context { plugin: name.clone(), sink, started: Instant::now() });
        let services = Box::new(HostServices {
            size: size_of::<HostServices>(),
            context: core::ptr::from_mut(context.as_mut()).cast(),
            log,
            gauge,
            clock_ns,
            memory_budget,
            service,
        });
        let health = Arc::new(Health::default());
        let mut object = core::ptr::null_mut();
        let (mut space, mut text);
        space = ErrorSpace::new();
        text = space.buf();
        health.called();
        // SAFETY: all pointers live through the call; services live as long as the instance.
        let status = unsafe { (root.create)(services.as_ref(), Str::new(config), &mut object, &mut text) };
        outcome(status, &text, &health)?;
        Ok(Arc::new(Instance { root, object, health, name, kind, _services: services, _context: context }))
    }

    /// The plugin's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its own version.
    pub fn version(&self) -> String {
        // SAFETY: manifests are static; `create` found this one.
        unsafe { (*self.root.manifest).version.to_string_lossy() }
    }

    /// Its kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its health.
    pub fn health(&self) -> &Arc<Health> {
        &self.health
    }

    fn interface<T>(&self, kind: Kind) -> Result<&'static T, Error> {
        if self.kind != kind {
            return Err(Error::new(format!(
                "plugin `{}` is a {}, expected a {}",
                self.name,
                self.kind.name(),
                kind.name()
            )));
        }
        let table = self.root.interface.cast::<T>();
        // SAFETY: the root's interface is the static table of its kind, which starts with its size.
        let size = unsafe { table.cast::<usize>().as_ref() };
        match size {
            // SAFETY: at least as long as every field that this host reads without asking for it.
            Some(&size) if size >= size_of::<T>() => Ok(unsafe { &*table }),
            found => Err(Error::new(format!(
                "plugin `{}` has a function table of {} bytes, expected at least {}",
                self.name,
                found.copied().unwrap_or(0),
                size_of::<T>()
            ))),
        }
    }

    fn check_health(&self) -> Result<(), Error> {
        match self.health.is_quarantined() {
            false => Ok(()),
            true => Err(quarantined(&self.name, &self.health)),
        }
    }
}

fn quarantined(name: &str, health: &Health) -> Error {
    let reason = health.reason().unwrap_or_default();
    Error { message: format!("plugin `{name}` is in quarantine ({reason})"), status: Status::PANIC }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: made by `create`, ended once, and everything made from it holds an `Arc` of this.
        unsafe { (self.root.destroy)(self.object) }
    }
}

/// A codec plugin.
#[derive(Clone)]
pub struct CodecPlugin {
    instance: Arc<Instance>,
    table: &'static KvCodecVtbl,
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
        let table = instance.interface(Kind::KvCodec)?;
        Ok(CodecPlugin { instance, table })
    }

    /// The plugin.
    pub fn instance(&self) -> &Arc<Instance> {
        &self.instance
    }

    /// The codecs it offers.
    pub fn codecs(&self) -> Result<Vec<CodecEntry>, Error> {
        self.instance.check_health()?;
        self.instance.health.called();
        // SAFETY: the instance is alive.
        let n = unsafe { (self.table.count)(self.instance.object) };
        (0..n.min(1024)).map(|i| self.codec(i)).collect()
    }

    fn codec(&self, index: u32) -> Result<CodecEntry, Error> {
        let mut info = CodecInfo { size: size_of::<CodecInfo>(), name: Str::EMPTY, summary: Str::EMPTY };
        let mut space = ErrorSpace::new();
        let mut text = space.buf();
        // SAFETY: pointers live through the call.
        let status = unsafe { (self.table.info)(self.instance.object, index, &mut info, &mut text) };
        outcome(status, &text, &self.instance.health)?;
        // SAFETY: static text by the contract of `CodecInfo`.
        Ok(unsafe { CodecEntry { name: info.name.to_string_lossy(), summary: info.summary.to_string_lossy() } })
    }

    /// Opens a codec for one side and head size. `options` is a JSON object.
    pub fn open(&self, codec: &str, options: &str, side: Side, head_dim: usize) -> Result<Codec, Error> {
        self.instance.check_health()?;
        let health = &self.instance.health;
        health.called();
        let params = CodecParams {
            size: size_of::<CodecParams>(),
            codec: Str::new(codec),
            options: Str::new(options),
            side: side.code(),
            head_dim: u32::try_from(head_dim).map_err(|_| Error::unsupported("the head size is beyond 32 bits"))?,
        };
        let mut object = core::ptr::null_mut();
        let mut space = ErrorSpace::new();
        let mut text = space.buf();
        // SAFETY: pointers live through the call.
        outcome(unsafe { (self.table.open)(self.instance.object, &params, &mut object, &mut text) }, &text, health)?;
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
        // SAFETY: as above; the codec is open.
        outcome(unsafe { (self.table.layout)(object, &mut opened.layout, &mut text) }, &text, health)?;
        let tile_bytes = opened.layout.tile_bytes;
        if tile_bytes == 0 || !tile_bytes.is_multiple_of(2) || tile_bytes > 1 << 30 {
            return Err(Error::new(format!(
                "codec `{codec}` of plugin `{}` asks for tiles of {tile_bytes} bytes, expected an even number up to 2^30",
                self.instance.name
            )));
        }
        // SAFETY: a static struct of the extension's frozen type, or null.
        opened.tiles =
            unsafe { (self.table.extension)(object, Str::from_static(CPU_TILES_ID)).cast::<CpuTilesVtbl>().as_ref() }
                .filter(|t| t.size >= size_of::<CpuTilesVtbl>());
        Ok(Codec(Arc::new(opened)))
    }
}

struct OpenCodec {
    plugin: CodecPlugin,
    object: *mut c_void,
    layout: CodecLayout,
    tiles: Option<&'static CpuTilesVtbl>,
    name: String,
    options: String,
    side: Side,
    head_dim: usize,
}

// SAFETY: an opened codec is immutable and its functions are [worker, re-entrant].
unsafe impl Send for OpenCodec {}
// SAFETY: as above.
unsafe impl Sync for OpenCodec {}

impl Drop for OpenCodec {
    fn drop(&mut self) {
        // SAFETY: opened by this table and closed once.
        unsafe { (self.plugin.table.close)(self.object) }
    }
}

/// An opened codec. Cheap to clone. Calls check nothing but their status: tile pointers are the caller's promise.
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
        self.0.tiles.map(|table| CpuTilesRef { table, codec: self })
    }

    fn call(&self, f: impl FnOnce(&KvCodecVtbl, *mut c_void, &mut TextBuf) -> Status) -> Result<(), Error> {
        let mut space = ErrorSpace::new();
        let mut text = space.buf();
        let health = &self.0.plugin.instance.health;
        let status = f(self.0.plugin.table, self.0.object, &mut text);
        outcome(status, &text, health)
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

/// A codec's CPU kernels.
#[derive(Clone, Copy)]
pub struct CpuTilesRef<'a> {
    table: &'static CpuTilesVtbl,
    codec: &'a Codec,
}

impl CpuTilesRef<'_> {
    /// Bytes of one prepared query row.
    pub fn query_bytes(&self) -> usize {
        // SAFETY: the codec is open.
        unsafe { (self.table.query_bytes)(self.codec.0.object) }
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
        self.codec.call(|_, c, e| unsafe { (self.table.prepare_query)(c, rows, n as u32, stride, prepared, e) })
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
            (self.table.score)(
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
            (self.table.accumulate)(
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

/// A residency policy plugin.
#[derive(Clone)]
pub struct ResidencyPlugin {
    instance: Arc<Instance>,
    table: &'static ResidencyPolicyVtbl,
}

impl ResidencyPlugin {
    /// The residency face of an instance; an error when it is of another kind.
    pub fn new(instance: Arc<Instance>) -> Result<Self, Error> {
        let table = instance.interface(Kind::ResidencyPolicy)?;
        Ok(ResidencyPlugin { instance, table })
    }

    /// The plugin.
    pub fn instance(&self) -> &Arc<Instance> {
        &self.instance
    }

    /// Asks the policy.
    pub fn plan(&self, snapshot: &residency::Snapshot) -> Result<residency::Decision, Error> {
        self.instance.check_health()?;
        self.instance.health.called();
        let mut device_pages = vec![0u64; snapshot.groups.len()];
        let wire = ResidencySnapshot {
            size: size_of::<ResidencySnapshot>(),
            event: snapshot.event,
            n_groups: snapshot.groups.len() as u32,
            groups: snapshot.groups.as_ptr(),
            device_budget: snapshot.device_budget,
            host_budget: snapshot.host_budget,
            link_bytes_per_second: snapshot.link_bytes_per_second,
        };
        let mut out = ResidencyDecision {
            size: size_of::<ResidencyDecision>(),
            device_pages: device_pages.as_mut_ptr(),
            staging_slots: 0,
        };
        let mut space = ErrorSpace::new();
        let mut text = space.buf();
        // SAFETY: pointers live through the call; the array has `n_groups` entries.
        let status = unsafe { (self.table.plan)(self.instance.object, &wire, &mut out, &mut text) };
        outcome(status, &text, &self.instance.health)?;
        Ok(residency::Decision { device_pages, staging_slots: out.staging_slots })
    }
}

/// An admission policy plugin.
#[derive(Clone)]
pub struct AdmissionPlugin {
    instance: Arc<Instance>,
    table: &'static AdmissionPolicyVtbl,
}

impl AdmissionPlugin {
    /// The admission face of an instance; an error when it is of another kind.
    pub fn new(instance: Arc<Instance>) -> Result<Self, Error> {
        let table = instance.interface(Kind::AdmissionPolicy)?;
        Ok(AdmissionPlugin { instance, table })
    }

    /// The plugin.
    pub fn instance(&self) -> &Arc<Instance> {
        &self.instance
    }

    /// Asks the policy.
    pub fn decide(
        &self,
        request: &admission::Request,
        snapshot: &admission::Snapshot,
    ) -> Result<admission::Decision, Error> {
        self.instance.check_health()?;
        self.instance.health.called();
        let stores: Vec<StoreState> = snapshot
            .stores
            .iter()
            .map(|s| StoreState {
                name: Str::new(&s.name),
                total: s.total,
                free: s.free,
                reclaimable: s.reclaimable,
                window: s.window,
            })
            .collect();
        let wire = AdmissionSnapshot {
            size: size_of::<AdmissionSnapshot>(),
            stores: stores.as_ptr(),
            n_stores: stores.len() as u32,
            slots_total: snapshot.slots_total,
            slots_free: snapshot.slots_free,
            queued: snapshot.queued,
            seconds_to_next_release: snapshot.seconds_to_next_release,
        };
        let request = AdmissionRequest {
            size: size_of::<AdmissionRequest>(),
            prompt_tokens: request.prompt_tokens,
            shared_tokens: request.shared_tokens,
            declared_tokens: request.declared_tokens,
            overcommit: request.overcommit.into(),
            known_session: request.known_session.into(),
        };
        let mut reason = [0u8; 512];
        let mut out = AdmissionDecision {
            size: size_of::<AdmissionDecision>(),
            verdict: admission::VERDICT_ADMIT,
            retry_after_seconds: 0,
            demand_tokens: 0,
            warn: 0,
            short_store: u32::MAX,
            reason: TextBuf::new(&mut reason),
        };
        let mut space = ErrorSpace::new();
        let mut text = space.buf();
        // SAFETY: pointers live through the call.
        let status = unsafe { (self.table.decide)(self.instance.object, &request, &wire, &mut out, &mut text) };
        outcome(status, &text, &self.instance.health)?;
        let verdict = match out.verdict {
            admission::VERDICT_ADMIT => admission::Verdict::Admit,
            admission::VERDICT_QUEUE => admission::Verdict::Queue,
            admission::VERDICT_REJECT => admission::Verdict::Reject,
            other => {
                self.instance.health.failed();
                return Err(Error::new(format!(
                    "policy `{}` answered verdict {other}, expected 0, 1 or 2",
                    self.instance.name
                )));
            }
        };
        Ok(admission::Decision {
            verdict,
            retry_after_seconds: out.retry_after_seconds,
            demand_tokens: out.demand_tokens,
            warn: out.warn != 0,
            short_store: usize::try_from(out.short_store).ok().filter(|&i| i < stores.len()),
            // SAFETY: the buffer above, zeroed.
            reason: unsafe { out.reason.read() },
        })
    }
}
