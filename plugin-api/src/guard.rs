//! The one choke point between the host's call and a plugin author's code.

use core::panic::AssertUnwindSafe;
use std::panic::catch_unwind;

use crate::error::{Error, Status};
use crate::text::TextBuf;

/// Runs `body`, turns an error into a status and text, and a panic into [`Status::PANIC`].
///
/// # Safety
/// `error` must be null or point to a writable [`TextBuf`].
pub unsafe fn guard(error: *mut TextBuf, body: impl FnOnce() -> Result<(), Error>) -> Status {
    let (status, message) = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return Status::OK,
        Ok(Err(e)) => (e.status, e.message),
        Err(payload) => (Status::PANIC, panic_text(payload.as_ref())),
    };
    if !error.is_null() {
        // SAFETY: promised by the caller.
        unsafe { (*error).write(&message) };
    }
    status
}

/// Runs a body that can't report an error (a destructor, a look-up); a panic gives `None`.
pub fn guard_silent<T>(body: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(body)).ok()
}

fn panic_text(payload: &(dyn core::any::Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned());
    format!("the plugin panicked: {text}")
}
