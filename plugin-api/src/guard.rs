//! The one choke point between the host's call and a plugin author's code.

use core::any::Any;
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
        // An error that calls itself a success would leave the host with an output nobody wrote.
        Ok(Err(e)) if e.status == Status::OK => (Status::ERROR, e.message),
        Ok(Err(e)) => (e.status, e.message),
        Err(payload) => {
            let text = panic_text(payload.as_ref());
            discard(payload);
            (Status::PANIC, text)
        }
    };
    if !error.is_null() {
        // SAFETY: promised by the caller.
        unsafe { (*error).write(&message) };
    }
    status
}

/// Runs a body that can't report an error (a destructor, a look-up); a panic gives `None`.
pub fn guard_silent<T>(body: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(body)).map_err(discard).ok()
}

/// Drops a panic's payload, whose own destructor may panic too; what that one leaves is leaked.
fn discard(payload: Box<dyn Any + Send>) {
    if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        core::mem::forget(second);
    }
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned());
    format!("the plugin panicked: {text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(body: impl FnOnce() -> Result<(), Error>) -> (Status, String) {
        let mut space = [0u8; 64];
        let mut text = TextBuf::new(&mut space);
        // SAFETY: `text` is writable.
        let status = unsafe { guard(&mut text, body) };
        // SAFETY: the space is initialised.
        (status, unsafe { text.read() })
    }

    #[test]
    fn a_panic_becomes_a_status_with_its_text() {
        assert_eq!(run(|| panic!("out of {}", "luck")), (Status::PANIC, "the plugin panicked: out of luck".into()));
        assert_eq!(run(|| panic!("static")), (Status::PANIC, "the plugin panicked: static".into()));
    }

    #[test]
    fn a_panic_without_text_says_so() {
        let (status, text) = run(|| std::panic::panic_any(7));
        assert_eq!((status, text.as_str()), (Status::PANIC, "the plugin panicked: no message"));
    }

    #[test]
    fn a_payload_that_panics_when_dropped_is_caught_too() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("again");
            }
        }
        assert_eq!(run(|| std::panic::panic_any(Bomb)).0, Status::PANIC);
    }

    #[test]
    fn an_error_keeps_its_status_and_text() {
        assert_eq!(run(|| Err(Error::unsupported("no"))), (Status::UNSUPPORTED, "no".into()));
        assert_eq!(run(|| Ok(())), (Status::OK, String::new()));
    }

    #[test]
    fn an_error_that_calls_itself_a_success_is_an_error() {
        let lie = Error { message: "lie".into(), status: Status::OK };
        assert_eq!(run(|| Err(lie)), (Status::ERROR, "lie".into()));
    }

    #[test]
    fn a_null_text_buffer_is_allowed() {
        // SAFETY: null is allowed.
        let status = unsafe { guard(core::ptr::null_mut(), || Err(Error::new("unheard"))) };
        assert_eq!(status, Status::ERROR);
    }
}
