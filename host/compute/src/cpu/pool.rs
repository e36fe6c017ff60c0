//! A persistent pool of workers for kernels.
//!
//! [`Pool::run`] lets every worker (the calling thread is worker 0) execute the same closure once; inside it workers
//! meet at [`Worker::barrier`]. A whole step of a model is one `run` with one barrier per operation. Both are a few
//! atomic operations: waiting spins for a bounded time, then gives the core away, and workers without work park,
//! so that an idle server burns no processor time. Nothing is allocated per dispatch.
//!
//! A panic in one worker releases the others from their barriers and comes out of `run` as an error; the pool can be
//! used again afterwards.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// Why a pool could not be made or its work not be finished.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The system refused a thread.
    #[error("worker thread {index} of {count} could not be started: {source}; ask for fewer threads")]
    Spawn { index: usize, count: usize, source: std::io::Error },
    /// A kernel panicked.
    #[error("compute worker {index} panicked: {message}")]
    Panicked { index: usize, message: String },
}

/// What a worker knows inside [`Pool::run`].
#[derive(Clone, Copy)]
pub struct Worker<'a> {
    index: usize,
    count: usize,
    barrier: &'a Barrier,
}

impl Worker<'_> {
    /// This worker, `0..count`.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Workers in this run.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Waits until all workers of the run are here. What they wrote before is visible after.
    pub fn barrier(&self) {
        self.barrier.wait();
    }

    /// This worker's part of `0..n`: contiguous, all parts but the last in multiples of `grain`.
    pub fn share(&self, n: usize, grain: usize) -> Range<usize> {
        let grains = n.div_ceil(grain);
        let bound = |i: usize| (grains * i / self.count * grain).min(n);
        bound(self.index)..bound(self.index + 1)
    }
}

/// The payload with which workers leave a barrier that can no longer be completed.
struct Released;

struct Barrier {
    count: usize,
    spins: u32,
    arrived: AtomicUsize,
    generation: AtomicUsize,
    broken: AtomicBool,
}

impl Barrier {
    fn wait(&self) {
        if self.count == 1 {
            return;
        }
        let generation = self.generation.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.count {
            self.arrived.store(0, Ordering::Relaxed);
            self.generation.store(generation.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut spins = 0;
        while self.generation.load(Ordering::Acquire) == generation {
            if self.broken.load(Ordering::Relaxed) {
                resume_unwind(Box::new(Released));
            }
            relax(&mut spins, self.spins);
        }
    }
}

/// One turn of a waiting loop: a pause while the bound lasts, then the core goes to somebody else.
fn relax(spins: &mut u32, bound: u32) {
    if *spins < bound {
        *spins += 1;
        std::hint::spin_loop();
    } else {
        thread::yield_now();
    }
}

/// A borrowed closure without its lifetime; valid while [`Pool::run`] waits for the workers.
type Job = *const (dyn Fn(Worker<'_>) + Sync);

struct Shared {
    barrier: Barrier,
    /// Number of the current run; workers wait for it to change.
    epoch: AtomicUsize,
    job: UnsafeCell<Option<Job>>,
    unfinished: AtomicUsize,
    parked: Box<[AtomicBool]>,
    stopping: AtomicBool,
    /// The first panic of a run. Touched only when a worker panics and when a failed run ends.
    failure: Mutex<Option<(usize, Box<dyn Any + Send>)>>,
}

// SAFETY: `job` is written only by `Pool::run` between runs (it holds `&mut Pool` and has waited for all workers) and
// read by workers after they acquired the new epoch; the closure it points to is `Sync`. The rest is atomics and locks.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Runs the job as worker `index` and keeps its panic.
    fn work(&self, job: &(dyn Fn(Worker<'_>) + Sync), index: usize) {
        let worker = Worker { index, count: self.barrier.count, barrier: &self.barrier };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(worker))) {
            self.barrier.broken.store(true, Ordering::Relaxed);
            if !payload.is::<Released>() {
                self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((index, payload));
            }
        }
    }

    /// Waits for a run later than `seen`: spins, then parks.
    fn next_epoch(&self, index: usize, seen: usize) -> usize {
        for _ in 0..self.barrier.spins {
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        // The flag and the epoch are both SeqCst, here and in `run`: either `run` sees the flag and unparks, or this
        // thread sees the new epoch.
        self.parked[index].store(true, Ordering::SeqCst);
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            if epoch != seen {
                self.parked[index].store(false, Ordering::Relaxed);
                return epoch;
            }
            thread::park();
        }
    }

    fn serve(&self, index: usize) {
        let mut epoch = 0;
        loop {
            epoch = self.next_epoch(index, epoch);
            if self.stopping.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: acquiring the new epoch makes the write of `job` visible, and nobody writes it until this
            // worker has counted itself out below.
            if let Some(job) = unsafe { *self.job.get() } {
                // SAFETY: `run` keeps the closure alive until `unfinished` is zero.
                self.work(unsafe { &*job }, index);
            }
            self.unfinished.fetch_sub(1, Ordering::Release);
        }
    }
}

/// Threads that stay, and the calling thread as one of the workers.
pub struct Pool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    threads: Vec<Thread>,
}

impl Pool {
    /// A pool of `count` workers (at least one), `count - 1` of them new threads.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn new(count: usize) -> Result<Pool, PoolError> {
        let count = count.max(1);
        let cores = thread::available_parallelism().map_or(1, usize::from);
        // A pause takes 10 to 40 ns: up to about 100 µs where each worker has a core, next to nothing where not.
        let spins = if count <= cores { 4000 } else { 50 };
        let shared = Arc::new(Shared {
            barrier: Barrier {
                count,
                spins,
                arrived: AtomicUsize::new(0),
                generation: AtomicUsize::new(0),
                broken: AtomicBool::new(false),
            },
            epoch: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            unfinished: AtomicUsize::new(0),
            parked: (0..count).map(|_| AtomicBool::new(false)).collect(),
            stopping: AtomicBool::new(false),
            failure: Mutex::new(None),
        });
        let mut pool = Pool { shared, handles: Vec::new(), threads: Vec::new() };
        for index in 1..count {
            let shared = Arc::clone(&pool.shared);
            let handle = thread::Builder::new()
                .name(format!("compute-{index}"))
                .spawn(move || shared.serve(index))
                .map_err(|source| PoolError::Spawn { index, count, source })?;
            pool.threads.push(handle.thread().clone());
            pool.handles.push(handle);
        }
        Ok(pool)
    }

    /// Workers, the calling thread included.
    pub fn workers(&self) -> usize {
        self.shared.barrier.count
    }

    /// Lets every worker execute `job` once, and returns when all have.
    ///
    /// # Errors
    /// [`PoolError::Panicked`] with the first panic among the workers.
    pub fn run<F: Fn(Worker<'_>) + Sync>(&mut self, job: F) -> Result<(), PoolError> {
        let shared = &*self.shared;
        let borrowed: &(dyn Fn(Worker<'_>) + Sync) = &job;
        // SAFETY: only the lifetime changes. No worker touches the pointer after it has counted itself out, and this
        // function does not return, nor unwind (`work` catches), before all have.
        let erased: Job = unsafe { std::mem::transmute::<&(dyn Fn(Worker<'_>) + Sync), Job>(borrowed) };
        // SAFETY: `&mut self` and the end of the previous run: no worker reads `job` now.
        unsafe { *shared.job.get() = Some(erased) };
        shared.unfinished.store(self.threads.len(), Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        self.wake();
        shared.work(borrowed, 0);
        let mut spins = 0;
        while shared.unfinished.load(Ordering::Acquire) != 0 {
            relax(&mut spins, shared.barrier.spins);
        }
        if shared.barrier.broken.load(Ordering::Relaxed) { self.recover() } else { Ok(()) }
    }

    fn wake(&self) {
        for (i, thread) in self.threads.iter().enumerate() {
            if self.shared.parked[i + 1].load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
    }

    /// Makes the pool usable again after a panic and says what happened. All workers are idle.
    fn recover(&mut self) -> Result<(), PoolError> {
        let barrier = &self.shared.barrier;
        barrier.arrived.store(0, Ordering::Relaxed);
        barrier.broken.store(false, Ordering::Relaxed);
        let failure = self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        match failure {
            Some((index, payload)) => Err(PoolError::Panicked { index, message: panic_message(&*payload) }),
            None => Ok(()),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        self.wake();
        for handle in self.handles.drain(..) {
            // A worker catches every panic, so joining cannot fail; if it did, there is nothing left to do.
            let _ = handle.join();
        }
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "(no message)".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;
    use std::time::Duration;

    #[test]
    fn every_worker_runs_once_and_sees_what_others_wrote_before_a_barrier() {
        for count in [1, 2, 5] {
            let mut pool = Pool::new(count).unwrap();
            assert_eq!(pool.workers(), count);
            let slots: Vec<AtomicU64> = (0..count).map(|_| AtomicU64::new(0)).collect();
            for round in 1..=50 {
                let seen = AtomicU64::new(0);
                pool.run(|w| {
                    for phase in 0..10 {
                        slots[w.index()].store(round * 100 + phase, Ordering::Relaxed);
                        w.barrier();
                        let sum: u64 = slots.iter().map(|s| s.load(Ordering::Relaxed)).sum();
                        assert_eq!(sum, (round * 100 + phase) * count as u64);
                        w.barrier();
                    }
                    seen.fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
                assert_eq!(seen.into_inner(), count as u64);
            }
        }
    }

    #[test]
    fn a_panic_is_an_error_while_others_wait_at_a_barrier_and_the_pool_lives_on() {
        let mut pool = Pool::new(3).unwrap();
        for culprit in 0..3 {
            let error = pool
                .run(|w| {
                    assert!(w.index() != culprit, "kernel {culprit} failed");
                    w.barrier();
                })
                .unwrap_err();
            assert_eq!(error.to_string(), format!("compute worker {culprit} panicked: kernel {culprit} failed"));
            pool.run(|w| w.barrier()).unwrap();
        }
    }

    #[test]
    fn parked_workers_wake_up_for_the_next_run() {
        let mut pool = Pool::new(3).unwrap();
        for _ in 0..5 {
            let parked = |pool: &Pool| pool.shared.parked[1..].iter().all(|p| p.load(Ordering::SeqCst));
            while !parked(&pool) {
                thread::sleep(Duration::from_millis(1));
            }
            let ran = AtomicU64::new(0);
            pool.run(|_| {
                ran.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            assert_eq!(ran.into_inner(), 3);
        }
    }

    #[test]
    fn shares_cover_everything_once_in_whole_grains() {
        let barrier = Pool::new(1).unwrap();
        for count in 1..6 {
            for (n, grain) in [(0, 1), (1, 4), (7, 1), (49, 16), (576, 8)] {
                let mut next = 0;
                for index in 0..count {
                    let share = Worker { index, count, barrier: &barrier.shared.barrier }.share(n, grain);
                    assert_eq!(share.start, next);
                    assert!(share.end == n || share.end.is_multiple_of(grain));
                    next = share.end;
                }
                assert_eq!(next, n);
            }
        }
    }
}
