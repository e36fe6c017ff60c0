//! The engine thread as its clients see it.

mod batching;
mod ends;
mod recurrent;
mod rig;
mod sharing;
mod surface;
