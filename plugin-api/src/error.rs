//! Status codes and errors.

use crate::text::TextBuf;

/// Result of an ABI call. Text, where there is any, is in the call's [`TextBuf`].
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status(pub u32);

impl Status {
    /// Done.
    pub const OK: Status = Status(0);
    /// The call failed; the plugin stays usable.
    pub const ERROR: Status = Status(1);
    /// The plugin panicked; the host puts it in quarantine.
    pub const PANIC: Status = Status(2);
    /// The request can't be served by this plugin (a head size, a side, an option).
    pub const UNSUPPORTED: Status = Status(3);
}

/// An error that a plugin reports: one sentence, and whether the request is simply unsupported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// One sentence: what was found, what was expected, what to do.
    pub message: String,
    /// The code that crosses.
    pub status: Status,
}

impl Error {
    /// A failed call.
    pub fn new(message: impl Into<String>) -> Self {
        Error { message: message.into(), status: Status::ERROR }
    }

    /// A request this plugin can't serve.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Error { message: message.into(), status: Status::UNSUPPORTED }
    }

    /// The error of a call that returned `status`, with the text it left.
    ///
    /// # Safety
    /// `text` must be a buffer made by [`TextBuf::new`] whose space is still alive.
    pub unsafe fn from_call(status: Status, text: &TextBuf) -> Self {
        // SAFETY: promised by the caller.
        let mut message = unsafe { text.read() };
        if message.is_empty() {
            message = format!("the plugin gave no reason (status {})", status.0);
        }
        Error { message, status }
    }
}

impl core::fmt::Display for Error {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
