//! The driver: finding a card, its memory, its stream, launches.
//!
//! The driver's library and NVRTC are opened at run time, so that one program runs with and without a card.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{result, sys};

use crate::CudaError;

/// A failed call, with what it was for.
fn failed(what: &str) -> impl FnOnce(result::DriverError) -> CudaError + '_ {
    move |error| CudaError::Driver { what: what.to_owned(), error: describe(error) }
}

fn describe(error: result::DriverError) -> String {
    match error.error_string() {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => format!("{:?}", error.0),
    }
}

/// A card with its context and one stream on which everything runs in order.
pub struct Gpu {
    context: sys::CUcontext,
    device: sys::CUdevice,
    stream: sys::CUstream,
    /// Name, for people.
    pub name: String,
    /// Compute capability as `90` for 9.0.
    pub arch: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
}

// SAFETY: contexts and streams may be used from any thread that made the context current, which every method here does.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Opens card `ordinal`.
    ///
    /// # Errors
    /// One sentence when there is no driver, no compiler or no such card.
    pub fn open(ordinal: u32) -> Result<Arc<Gpu>, CudaError> {
        // SAFETY: looks for libraries by their names. Calls of the driver without its library would panic.
        unsafe {
            if !sys::is_culib_present() {
                return Err(CudaError::NoCard("no CUDA driver is installed (libcuda.so.1 was not found)".to_owned()));
            }
            if !cudarc::nvrtc::sys::is_culib_present() {
                return Err(CudaError::NoCard(
                    "the CUDA driver is there, but NVRTC, which compiles the kernels, is not (libnvrtc.so was not found)"
                        .to_owned(),
                ));
            }
        }
        let no_card = |e| CudaError::NoCard(format!("the CUDA driver gives no card: {}", describe(e)));
        result::init().map_err(no_card)?;
        let count = result::device::get_count().map_err(no_card)?;
        let index = i32::try_from(ordinal).unwrap_or(i32::MAX);
        if index >= count {
            return Err(CudaError::NoCard(format!("card {ordinal} was asked for, but the CUDA driver sees {count}")));
        }
        let device = result::device::get(index).map_err(no_card)?;
        let attribute = |which| {
            // SAFETY: `device` came from the driver.
            unsafe { result::device::get_attribute(device, which) }.map(|v| v.max(0).cast_unsigned()).map_err(no_card)
        };
        use sys::CUdevice_attribute_enum as A;
        let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let arch = major * 10 + minor;
        let name = result::device::get_name(device).map_err(no_card)?;
        if arch < 75 {
            return Err(CudaError::NoCard(format!(
                "{name} has compute capability {major}.{minor}, but these kernels need 7.5 or later"
            )));
        }
        // SAFETY: the device exists; the context is released when the card is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(no_card)?;
        // SAFETY: the context was just retained.
        unsafe { result::ctx::set_current(context) }.map_err(no_card)?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(no_card)?;
        Ok(Arc::new(Gpu { context, device, stream, name, arch, multiprocessors }))
    }

    /// Makes the card current on this thread; cheap.
    pub fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as the card.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("entering the card's context"))
    }

    /// Free and total bytes.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.enter()?;
        result::mem_get_info().map_err(failed("asking for free memory"))
    }

    /// Memory of `len` bytes, not initialised.
    pub fn allocate(self: &Arc<Self>, len: usize, what: &str) -> Result<Memory, CudaError> {
        self.enter()?;
        // SAFETY: the context is current.
        match unsafe { result::malloc_sync(len.max(1)) } {
            Ok(at) => Ok(Memory { gpu: Arc::clone(self), at, len }),
            Err(_) => {
                let (free, total) = self.memory()?;
                Err(CudaError::OutOfMemory { what: what.to_owned(), asked: len, free, total })
            }
        }
    }

    /// Pinned host memory of `len` bytes, zeroed.
    pub fn pinned(self: &Arc<Self>, len: usize) -> Result<Pinned, CudaError> {
        self.enter()?;
        // SAFETY: the context is current; the memory is initialised before anybody sees it.
        unsafe {
            let at = result::malloc_host(len.max(1), 0).map_err(failed("allocating pinned memory"))?.cast::<u8>();
            at.write_bytes(0, len);
            Ok(Pinned { gpu: Arc::clone(self), at, len })
        }
    }

    /// Loads compiled kernels.
    pub fn load(self: &Arc<Self>, cubin: &[u8]) -> Result<Module, CudaError> {
        self.enter()?;
        // SAFETY: the image is a whole cubin of the compiler; the driver copies it.
        let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) }.map_err(failed("loading kernels"))?;
        Ok(Module { gpu: Arc::clone(self), module })
    }

    /// Waits until everything that was queued is done.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the stream lives as long as the card.
        unsafe { result::stream::synchronize(self.stream) }.map_err(failed("running kernels"))
    }

    /// Queues a copy to the card; `from` must stay as it is until the stream has passed it.
    ///
    /// # Safety
    /// `to` and the `len` bytes from it are memory of this card.
    pub unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe { result::memcpy_htod_async(to, from, self.stream) }.map_err(failed("copying to the card"))
    }

    /// Queues a copy from the card.
    ///
    /// # Safety
    /// `from` and the bytes from it are memory of this card; `to` stays until the stream has passed.
    pub unsafe fn download(&self, to: &mut [u8], from: u64) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe { result::memcpy_dtoh_async(to, from, self.stream) }.map_err(failed("copying from the card"))
    }

    /// Queues zeros.
    ///
    /// # Safety
    /// The bytes are memory of this card.
    pub unsafe fn zero(&self, at: u64, len: usize) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe { result::memset_d8_async(at, 0, len, self.stream) }.map_err(failed("clearing memory"))
    }

    /// Queues a kernel.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and what they point to is memory of this card of the sizes it expects.
    pub unsafe fn launch(&self, kernel: &Kernel, grid: [u32; 3], block: u32, args: Args) -> Result<(), CudaError> {
        // SAFETY: the context is current while the executor runs; the rest is the caller's promise.
        unsafe { self.launch_shared(kernel, grid, block, 0, args) }
    }

    /// As [`launch`](Self::launch), with dynamic shared memory.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    pub unsafe fn launch_shared(
        &self,
        kernel: &Kernel,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        mut args: Args,
    ) -> Result<(), CudaError> {
        let mut pointers = args.pointers();
        let pointers = &mut pointers[..args.count];
        // SAFETY: promised by the caller.
        unsafe {
            result::launch_kernel(
                kernel.function,
                (grid[0], grid[1], grid[2]),
                (block, 1, 1),
                shared,
                self.stream,
                pointers,
            )
        }
        .map_err(|e| CudaError::Driver { what: format!("launching `{}`", kernel.name), error: describe(e) })
    }

    /// Records what `body` queues as a graph, instead of running it.
    pub fn capture(self: &Arc<Self>, body: impl FnOnce() -> Result<(), CudaError>) -> Result<Recorded, CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is ours and nothing else captures on it.
        unsafe { result::stream::begin_capture(self.stream, mode) }.map_err(failed("recording a step"))?;
        let done = body();
        // SAFETY: capture was begun on this stream.
        let graph = unsafe { result::stream::end_capture(self.stream) };
        done?;
        let graph = graph.map_err(failed("recording a step"))?;
        // SAFETY: the graph was just made; it is not needed once it is instantiated.
        unsafe {
            let mut exec = std::ptr::null_mut();
            let made = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0).result();
            result::graph::destroy(graph).map_err(failed("recording a step"))?;
            made.map_err(failed("preparing a recorded step"))?;
            Ok(Recorded { gpu: Arc::clone(self), exec })
        }
    }

    /// A point in the stream whose time can be told.
    pub fn mark(self: &Arc<Self>) -> Result<Mark, CudaError> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(failed("making an event"))?;
        // SAFETY: both are alive.
        unsafe { result::event::record(event, self.stream) }.map_err(failed("recording an event"))?;
        Ok(Mark { gpu: Arc::clone(self), event })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: nothing that was made on the card outlives it: all hold it by reference count.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// Memory on the card.
pub struct Memory {
    gpu: Arc<Gpu>,
    at: u64,
    len: usize,
}

impl Memory {
    /// Its address.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by this card and freed once; the driver waits for kernels that use it.
        unsafe {
            let _ = result::ctx::set_current(self.gpu.context);
            let _ = result::free_sync(self.at);
        }
    }
}

/// Host memory that the card copies from and to by itself.
pub struct Pinned {
    gpu: Arc<Gpu>,
    at: *mut u8,
    len: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: initialised memory of that length.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }

    /// Its bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, with one owner.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by this card and freed once.
        unsafe {
            let _ = result::ctx::set_current(self.gpu.context);
            let _ = result::free_host(self.at.cast());
        }
    }
}

/// Loaded kernels.
pub struct Module {
    gpu: Arc<Gpu>,
    module: sys::CUmodule,
}

// SAFETY: modules may be used from any thread with the context current.
unsafe impl Send for Module {}

impl Module {
    /// A kernel by its name, allowed `shared` bytes of dynamic shared memory.
    pub fn kernel(&self, name: &'static str, shared: u32) -> Result<Kernel, CudaError> {
        self.gpu.enter()?;
        let symbol =
            CString::new(name).map_err(|_| CudaError::Internal("a kernel's name has a zero byte".to_owned()))?;
        let what = format!("finding kernel `{name}`");
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(self.module, symbol) }.map_err(failed(&what))?;
        // Asking for its registers loads it now: while a step is recorded nothing can be loaded.
        let registers = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // SAFETY: the function is of this module.
        unsafe { result::function::get_function_attribute(function, registers) }.map_err(failed(&what))?;
        if shared > 0 {
            use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MOST;
            // SAFETY: the function is of this module.
            unsafe { result::function::set_function_attribute(function, MOST, shared.cast_signed()) }.map_err(|e| {
                CudaError::Driver {
                    what: format!("giving `{name}` {shared} bytes of shared memory"),
                    error: describe(e),
                }
            })?;
        }
        Ok(Kernel { function, name })
    }

    /// Words of a variable.
    pub fn words<const N: usize>(&self, name: &str) -> Result<[u32; N], CudaError> {
        self.gpu.enter()?;
        let symbol =
            CString::new(name).map_err(|_| CudaError::Internal("a variable's name has a zero byte".to_owned()))?;
        let mut words = [0; N];
        // SAFETY: the variable is of this module; its size is checked.
        unsafe {
            let (at, len) = result::module::get_global(self.module, symbol).map_err(failed("finding a variable"))?;
            if len != size_of::<[u32; N]>() {
                return Err(CudaError::Internal(format!("`{name}` has {len} bytes")));
            }
            result::memcpy_dtoh_sync(&mut words, at).map_err(failed("reading a variable"))?;
        }
        Ok(words)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by this card and unloaded once; kernels are kept beside their module.
        unsafe {
            let _ = result::ctx::set_current(self.gpu.context);
            let _ = result::module::unload(self.module);
        }
    }
}

/// A kernel of a loaded module.
#[derive(Clone, Copy)]
pub struct Kernel {
    function: sys::CUfunction,
    name: &'static str,
}

// SAFETY: as `Module`.
unsafe impl Send for Kernel {}

/// A recorded step.
pub struct Recorded {
    gpu: Arc<Gpu>,
    exec: sys::CUgraphExec,
}

// SAFETY: as `Module`.
unsafe impl Send for Recorded {}

impl Recorded {
    /// Queues it.
    ///
    /// # Safety
    /// The memory that it was recorded with is still there.
    pub unsafe fn launch(&self) -> Result<(), CudaError> {
        // SAFETY: promised by the caller.
        unsafe { result::graph::launch(self.exec, self.gpu.stream) }.map_err(failed("launching a recorded step"))
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: instantiated by this card and destroyed once.
        unsafe {
            let _ = result::ctx::set_current(self.gpu.context);
            let _ = result::graph::exec_destroy(self.exec);
        }
    }
}

/// A point in the stream.
pub struct Mark {
    gpu: Arc<Gpu>,
    event: sys::CUevent,
}

impl Mark {
    /// Waits until the stream has passed it.
    pub fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.event) }.map_err(failed("running kernels"))
    }

    /// Milliseconds from `earlier` to this point, which the stream has passed.
    pub fn since(&self, earlier: &Mark) -> Result<f32, CudaError> {
        // SAFETY: both events are alive.
        unsafe { result::event::elapsed(earlier.event, self.event) }.map_err(failed("timing kernels"))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: made by this card and destroyed once.
        unsafe {
            let _ = result::ctx::set_current(self.gpu.context);
            let _ = result::event::destroy(self.event);
        }
    }
}

/// Most words and most arguments of a kernel.
const ARG_WORDS: usize = 48;
const ARG_COUNT: usize = 16;

/// A kernel's arguments, each from an 8-byte word of its own on.
#[derive(Clone, Copy)]
pub struct Args {
    words: [u64; ARG_WORDS],
    starts: [usize; ARG_COUNT],
    used: usize,
    count: usize,
}

impl Args {
    /// None yet.
    pub fn new() -> Args {
        Args { words: [0; ARG_WORDS], starts: [0; ARG_COUNT], used: 0, count: 0 }
    }

    /// With one more.
    ///
    /// # Panics
    /// Beyond 16 arguments or 48 words.
    pub fn with<T: Pod>(mut self, value: T) -> Args {
        let words = size_of::<T>().div_ceil(8);
        let to = &mut self.words[self.used..self.used + words];
        bytemuck::cast_slice_mut::<u64, u8>(to)[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&value));
        self.starts[self.count] = self.used;
        self.used += words;
        self.count += 1;
        self
    }

    fn pointers(&mut self) -> [*mut c_void; ARG_COUNT] {
        let words = self.words.as_mut_ptr();
        // SAFETY: every start lies inside the words.
        self.starts.map(|start| unsafe { words.add(start) }.cast())
    }
}

impl Default for Args {
    fn default() -> Self {
        Args::new()
    }
}
