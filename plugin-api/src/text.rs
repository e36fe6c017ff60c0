//! Text across the boundary: borrowed strings and buffers owned by the caller.
//!
//! No allocation crosses: a string handed over is only borrowed, and a callee that has something to say writes into
//! the caller's buffer. So no two allocators ever have to agree.

use opencoti_plugin_api_derive::AbiLayout;

/// A borrowed UTF-8 string, not zero-terminated.
///
/// Valid as long as the function that received it runs, unless its documentation says otherwise.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
pub struct Str {
    /// First byte; may be null when `len` is 0.
    pub ptr: *const u8,
    /// Bytes.
    pub len: usize,
}

// SAFETY: `Str` is a shared, read-only view; whoever makes one promises that the bytes outlive its use.
unsafe impl Send for Str {}
// SAFETY: as above, nothing is ever written through it.
unsafe impl Sync for Str {}

impl Str {
    /// The empty string.
    pub const EMPTY: Str = Str { ptr: core::ptr::null(), len: 0 };

    /// A view of a string that lives for ever.
    pub const fn from_static(text: &'static str) -> Self {
        Str { ptr: text.as_ptr(), len: text.len() }
    }

    /// A view of `text`, for the length of a call.
    pub fn new(text: &str) -> Self {
        Str { ptr: text.as_ptr(), len: text.len() }
    }

    /// The text, with bytes that are not UTF-8 replaced.
    ///
    /// # Safety
    /// `ptr` must point to `len` readable bytes for as long as this call runs.
    pub unsafe fn to_string_lossy(&self) -> String {
        if self.ptr.is_null() || self.len == 0 {
            return String::new();
        }
        // SAFETY: promised by the caller.
        let bytes = unsafe { core::slice::from_raw_parts(self.ptr, self.len) };
        String::from_utf8_lossy(bytes).into_owned()
    }

    /// The text of a `Str` that was made from static data.
    ///
    /// # Safety
    /// `ptr` must point to `len` bytes of UTF-8 that live for ever (a plugin's code is never unmapped).
    pub unsafe fn as_static(&self) -> Option<&'static str> {
        if self.len == 0 {
            return Some("");
        }
        if self.ptr.is_null() || self.len > isize::MAX as usize {
            return None;
        }
        // SAFETY: promised by the caller; null and impossible lengths are excluded above.
        core::str::from_utf8(unsafe { core::slice::from_raw_parts(self.ptr, self.len) }).ok()
    }
}

/// A buffer the caller owns and the callee writes text into. Longer text is cut at a character boundary.
#[repr(C)]
#[derive(Clone, Copy, AbiLayout)]
pub struct TextBuf {
    /// First byte of the buffer; may be null when `capacity` is 0.
    pub ptr: *mut u8,
    /// Bytes that fit.
    pub capacity: usize,
    /// Bytes written.
    pub len: usize,
}

impl TextBuf {
    /// A buffer over `space`, valid as long as `space` is.
    pub fn new(space: &mut [u8]) -> Self {
        TextBuf { ptr: space.as_mut_ptr(), capacity: space.len(), len: 0 }
    }

    /// A buffer that takes nothing.
    pub const fn none() -> Self {
        TextBuf { ptr: core::ptr::null_mut(), capacity: 0, len: 0 }
    }

    /// Replaces the contents by `text`, cut to the capacity.
    ///
    /// # Safety
    /// `ptr` must point to `capacity` writable bytes.
    pub unsafe fn write(&mut self, text: &str) {
        let mut n = if self.ptr.is_null() { 0 } else { text.len().min(self.capacity) };
        while !text.is_char_boundary(n) {
            n -= 1;
        }
        if n > 0 {
            // SAFETY: n <= capacity, and the source is a live string that can't overlap a `&mut` buffer.
            unsafe { core::ptr::copy_nonoverlapping(text.as_ptr(), self.ptr, n) };
        }
        self.len = n;
    }

    /// What was written.
    ///
    /// # Safety
    /// `ptr` must point to `capacity` initialised bytes.
    pub unsafe fn read(&self) -> String {
        // SAFETY: promised by the caller; a length beyond the capacity is the callee's lie and is cut.
        unsafe { Str { ptr: self.ptr, len: self.len.min(self.capacity) }.to_string_lossy() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(text: &str, capacity: usize) -> String {
        let mut space = vec![0u8; capacity];
        let mut buf = TextBuf::new(&mut space);
        // SAFETY: the space is writable and initialised.
        unsafe {
            buf.write(text);
            buf.read()
        }
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        assert_eq!(cut("grün", 4), "grü");
        assert_eq!(cut("grün", 3), "gr");
        assert_eq!(cut("grün", 5), "grün");
        assert_eq!(cut("grün", 0), "");
    }

    #[test]
    fn a_second_text_replaces_the_first() {
        let mut space = [0u8; 16];
        let mut buf = TextBuf::new(&mut space);
        // SAFETY: the space is writable and initialised.
        let text = unsafe {
            buf.write("a long one");
            buf.write("short");
            buf.read()
        };
        assert_eq!(text, "short");
    }

    #[test]
    fn a_null_buffer_takes_nothing_whatever_its_capacity() {
        let mut buf = TextBuf { ptr: core::ptr::null_mut(), capacity: 9, len: 0 };
        // SAFETY: null is never written to.
        unsafe { buf.write("text") };
        assert_eq!(buf.len, 0);
    }

    #[test]
    fn a_length_beyond_the_capacity_is_cut_when_read() {
        let mut space = *b"abcd";
        let mut buf = TextBuf::new(&mut space);
        buf.len = 4000;
        // SAFETY: the space is initialised.
        assert_eq!(unsafe { buf.read() }, "abcd");
    }

    #[test]
    fn bytes_that_are_no_text_are_replaced_or_refused() {
        let bytes: &'static [u8] = &[b'a', 0xff];
        let text = Str { ptr: bytes.as_ptr(), len: 2 };
        // SAFETY: static bytes.
        unsafe {
            assert_eq!(text.to_string_lossy(), "a\u{fffd}");
            assert_eq!(text.as_static(), None);
        }
    }
}
