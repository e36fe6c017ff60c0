//! Recurrent layers: what a sequence remembers has one size however long it is.
//!
//! Memory lives in *planes* that are never changed: a run of rows reads one plane, and the layer writes new ones after the
//! rows that the step names. Two kinds of layer are built on them: short causal convolutions, whose memory is the last few
//! inputs, and gated delta nets, whose memory is a matrix for each head.

mod chunk;
mod conv;
mod delta;
mod product;
#[cfg(test)]
mod tests;

use std::marker::PhantomData;
use std::ops::Range;

pub use conv::{ShortConv, short_conv};
pub use delta::{DeltaNet, DeltaShape, Scratch, delta_net};

use crate::plan::StateView;

/// One layer's memory in the planes of a step.
#[derive(Clone, Copy)]
pub struct Planes<'a> {
    base: *mut f32,
    plane_words: usize,
    n_planes: usize,
    /// Words before the layer's in a plane.
    offset: usize,
    /// Words of the layer.
    words: usize,
    memory: PhantomData<&'a StateView>,
}

// SAFETY: a description of memory; `read` and `write` hand parts out under their callers' promises.
unsafe impl Send for Planes<'_> {}
// SAFETY: as above.
unsafe impl Sync for Planes<'_> {}

impl<'a> Planes<'a> {
    /// Words `offset .. offset + words` of every plane.
    ///
    /// # Panics
    /// When a plane has fewer.
    pub fn new(view: &'a StateView, offset: usize, words: usize) -> Planes<'a> {
        assert!(offset + words <= view.plane_words, "planes of {} words", view.plane_words);
        let StateView { base, plane_words, n_planes } = *view;
        Planes { base: base.as_ptr(), plane_words, n_planes, offset, words, memory: PhantomData }
    }

    fn at(&self, plane: u32, words: &Range<usize>) -> *mut f32 {
        assert!((plane as usize) < self.n_planes && words.start <= words.end && words.end <= self.words);
        // SAFETY: inside the planes' memory, as was just checked.
        unsafe { self.base.add(plane as usize * self.plane_words + self.offset + words.start) }
    }

    /// Some of the layer's words in a plane.
    ///
    /// # Safety
    /// The view's memory is valid, and nobody writes these words while the slice lives.
    unsafe fn read(&self, plane: u32, words: Range<usize>) -> &'a [f32] {
        // SAFETY: `at` checked the range; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.at(plane, &words), words.len()) }
    }

    /// Some of the layer's words in a plane, to write.
    ///
    /// # Safety
    /// The view's memory is valid, and nobody else touches these words while the slice lives.
    #[allow(clippy::mut_from_ref, reason = "planes are shared by workers that write different words")]
    unsafe fn write(&self, plane: u32, words: Range<usize>) -> &'a mut [f32] {
        // SAFETY: `at` checked the range; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.at(plane, &words), words.len()) }
    }
}
