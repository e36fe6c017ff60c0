//! The engine thread as its clients see it.

mod batching;
mod ends;
mod pools;
mod recurrent;
mod rig;
mod sharing;
mod soak;
mod surface;
