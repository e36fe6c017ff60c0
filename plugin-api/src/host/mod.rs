//! The host's side: typed wrappers around a plugin's tables, and the services the host gives.
//!
//! Everything here works alike for a plugin loaded from a file and for one linked in, since both are a
//! [`PluginRoot`].

mod codec;
mod policy;

use core::ffi::c_void;
use core::mem::{MaybeUninit, size_of};
use std::sync::Arc;
use std::time::Instant;

use opencoti_plugin_api_derive::AbiLayout;

use crate::error::{Error, Status};
use crate::guard::guard_silent;
use crate::health::Health;
use crate::layout::AbiLayout;
use crate::root::{Kind, PluginRoot};
use crate::text::{Str, TextBuf};

pub use codec::{Codec, CodecEntry, CodecPlugin, CpuTilesRef, OwnedSource};
pub use policy::{AdmissionPlugin, ResidencyPlugin};

/// Level of a log line: something failed.
pub const LOG_ERROR: u32 = 1;
/// Level of a log line: something looks wrong.
pub const LOG_WARN: u32 = 2;
/// Level of a log line: worth knowing.
pub const LOG_INFO: u32 = 3;
/// Level of a log line: for debugging.
pub const LOG_DEBUG: u32 = 4;
/// Level of a log line: every step.
pub const LOG_TRACE: u32 = 5;

/// What the host gives a plugin. Valid for as long as the process lives, so that a plugin's own thread may still log
/// after its instance was destroyed.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
#[abi(growing)]
pub struct HostServices {
    /// Bytes of this struct as the host was built.
    pub size: usize,
    /// Passed back to every function.
    pub context: *mut c_void,
    /// `[any-thread]` Logs one line at one of the `LOG_` levels; the host adds the plugin's name.
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

// SAFETY: every service is labelled [any-thread], and the struct is never freed.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

impl Host {
    /// # Safety
    /// `services` must be what the host passed to `create`.
    pub(crate) unsafe fn new(services: *const HostServices) -> Self {
        Host(services)
    }

    fn log(&self, level: u32, message: &str) {
        // SAFETY: the host's own function with its own context, valid for ever. Fields are read one by one: an older
        // host's struct may be shorter than this type.
        unsafe { ((*self.0).log)((*self.0).context, level, Str::new(message)) }
    }

    /// Logs an error that the operator should see.
    pub fn error(&self, message: &str) {
        self.log(LOG_ERROR, message);
    }

    /// Logs a warning.
    pub fn warn(&self, message: &str) {
        self.log(LOG_WARN, message);
    }

    /// Logs a line of information.
    pub fn info(&self, message: &str) {
        self.log(LOG_INFO, message);
    }

    /// Logs a detail for debugging.
    pub fn debug(&self, message: &str) {
        self.log(LOG_DEBUG, message);
    }

    /// Sets a gauge of this plugin.
    pub fn gauge(&self, name: &str, value: f64) {
        // SAFETY: as in `log`.
        unsafe { ((*self.0).gauge)((*self.0).context, Str::new(name), value) }
    }

    /// Nanoseconds since the host started.
    pub fn clock_ns(&self) -> u64 {
        // SAFETY: as in `log`.
        unsafe { ((*self.0).clock_ns)((*self.0).context) }
    }

    /// Bytes this plugin may allocate for tables of its own; `None` for no stated limit.
    pub fn memory_budget(&self) -> Option<u64> {
        // SAFETY: as in `log`.
        let bytes = unsafe { ((*self.0).memory_budget)((*self.0).context) };
        (bytes != 0).then_some(bytes)
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

/// # Safety
/// `context` is the leaked box of an instance.
unsafe fn context<'a>(context: *mut c_void) -> &'a Context {
    // SAFETY: promised by the caller.
    unsafe { &*context.cast::<Context>() }
}

// A sink that panics must not unwind into the plugin's C frames, hence the guards.

unsafe extern "C" fn log(host: *mut c_void, level: u32, message: Str) {
    // SAFETY: `host` is what this instance was given; `message` is valid during the call.
    let (context, message) = unsafe { (context(host), message.to_string_lossy()) };
    guard_silent(|| context.sink.log(&context.plugin, level, &message));
}

unsafe extern "C" fn gauge(host: *mut c_void, name: Str, value: f64) {
    // SAFETY: as above.
    let (context, name) = unsafe { (context(host), name.to_string_lossy()) };
    guard_silent(|| context.sink.gauge(&context.plugin, &name, value));
}

unsafe extern "C" fn clock_ns(host: *mut c_void) -> u64 {
    // SAFETY: as above.
    let context = unsafe { context(host) };
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

/// Copies a growing table of functions, whose writer may know fewer or more fields than this build.
///
/// Each field that ends within the writer's size is copied to `to`; the others keep what is there. The first
/// `required` bytes must be there. The error is a sentence without the plugin's name.
///
/// # Safety
/// `table` is null or points to a table that starts with its size in bytes and is readable that far; `to` is writable.
unsafe fn copy_table<T: AbiLayout>(table: *const T, to: *mut T, required: usize) -> Result<(), String> {
    let name = static_text(T::LAYOUT.name);
    if table.is_null() || !table.is_aligned() {
        return Err(format!("its `{name}` is at {table:p}, expected the address of a static struct"));
    }
    // SAFETY: promised by the caller.
    let size = unsafe { table.byte_add(size_offset::<T>()).cast::<usize>().read() };
    if size < required {
        return Err(format!("its `{name}` has {size} bytes, expected at least {required}"));
    }
    for field in T::FIELDS {
        let (offset, len) = (field.offset as usize, field.size as usize);
        if offset + len > size {
            break;
        }
        let is_function = static_text(field.ty).starts_with("unsafe extern");
        // SAFETY: the field ends within the table; a function pointer is as long as an address.
        if is_function && unsafe { table.byte_add(offset).cast::<usize>().read() } == 0 {
            return Err(format!("its `{name}` has no function `{}`", static_text(field.name)));
        }
        // SAFETY: the field ends within both.
        unsafe { table.byte_add(offset).cast::<u8>().copy_to(to.byte_add(offset).cast(), len) };
    }
    Ok(())
}

/// Copies a table of which every field that this build knows must be there.
///
/// # Safety
/// As [`copy_table`].
unsafe fn read_table<T: AbiLayout>(table: *const T) -> Result<T, String> {
    let mut copy = MaybeUninit::uninit();
    // SAFETY: promised by the caller; all fields are written.
    unsafe { copy_table(table, copy.as_mut_ptr(), size_of::<T>()).map(|()| copy.assume_init()) }
}

/// Text of this build's own layout tables.
fn static_text(text: Str) -> &'static str {
    // SAFETY: layout tables are made from static text.
    unsafe { text.as_static() }.unwrap_or("?")
}

/// Where a growing struct has its size: at its start, but for the root.
fn size_offset<T: AbiLayout>() -> usize {
    T::FIELDS.iter().find(|f| static_text(f.name) == "size").map_or(0, |f| f.offset as usize)
}

/// Whether a root is long enough for this build and has its functions.
///
/// # Safety
/// `root` is null or points to a root of this API's major version that is readable as far as its size says.
pub unsafe fn check_root_functions(root: *const PluginRoot) -> Result<(), String> {
    // SAFETY: promised by the caller.
    unsafe { read_table(root) }.map(drop)
}

/// Whether the root's function table can be used as that of `kind`; kinds without a table in this version pass.
///
/// # Safety
/// `root` is readable, and its interface, when not null, points to a table that starts with its size.
pub unsafe fn check_interface(root: &PluginRoot, kind: Kind) -> Result<(), String> {
    // SAFETY: promised by the caller.
    unsafe {
        match kind {
            Kind::KvCodec => codec::read(root).map(drop),
            Kind::ResidencyPolicy => policy::read_residency(root).map(drop),
            Kind::AdmissionPolicy => policy::read_admission(root).map(drop),
            _ => Ok(()),
        }
    }
}

/// A plugin that was created: any kind, by file or linked in.
pub struct Instance {
    root: &'static PluginRoot,
    object: *mut c_void,
    health: Arc<Health>,
    name: String,
    kind: Kind,
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
        // Leaked: a plugin may keep the pointer in a thread that outlives the instance.
        let context = Box::leak(Box::new(Context { plugin: name.clone(), sink, started: Instant::now() }));
        let services = Box::leak(Box::new(HostServices {
            size: size_of::<HostServices>(),
            context: core::ptr::from_mut(context).cast(),
            log,
            gauge,
            clock_ns,
            memory_budget,
            service,
        }));
        let health = Arc::new(Health::default());
        let mut object = core::ptr::null_mut();
        let mut space = ErrorSpace::new();
        let mut text = space.buf();
        health.called();
        // SAFETY: all pointers live through the call, the services for ever.
        let status = unsafe { (root.create)(services, Str::new(config), &mut object, &mut text) };
        outcome(status, &text, &health)?;
        Ok(Arc::new(Instance { root, object, health, name, kind }))
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

    /// The root's table as that of `kind`.
    fn table<T>(&self, kind: Kind, read: unsafe fn(&PluginRoot) -> Result<T, String>) -> Result<T, Error> {
        if self.kind != kind {
            return Err(Error::new(format!(
                "plugin `{}` is of kind `{}`, expected `{}`",
                self.name,
                self.kind.name(),
                kind.name()
            )));
        }
        // SAFETY: the interface of a root is the static table of its manifest's kind.
        unsafe { read(self.root) }.map_err(|e| Error::new(format!("plugin `{}` can't be used: {e}", self.name)))
    }

    fn check_health(&self) -> Result<(), Error> {
        match self.health.is_quarantined() {
            false => Ok(()),
            true => Err(quarantined(&self.name, &self.health)),
        }
    }

    /// A control call: refused in quarantine, counted.
    fn control(&self, call: impl FnOnce(*mut c_void, &mut TextBuf) -> Status) -> Result<(), Error> {
        self.check_health()?;
        self.health.called();
        let mut space = ErrorSpace::new();
        let mut text = space.buf();
        outcome(call(self.object, &mut text), &text, &self.health)
    }
}

#[cold]
fn quarantined(name: &str, health: &Health) -> Error {
    let reason = health.reason().unwrap_or_default();
    Error { message: format!("plugin `{name}` is in quarantine ({reason})"), status: Status::PANIC }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // After a panic the object may be half changed: it is leaked rather than asked to clean up. A panic here is
        // recorded by `control`; nobody is left to be told.
        // SAFETY: made by `create`, ended once, and everything made from it holds an `Arc` of this.
        let _ = self.control(|object, text| unsafe { (self.root.destroy)(object, text) });
    }
}
