//! The engine thread as its clients see it.

mod batching;
mod ends;
mod rig;
mod sharing;
mod surface;
