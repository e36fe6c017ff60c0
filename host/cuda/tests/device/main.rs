//! What runs on a card, against the CPU executor and the oracle of attention.
//!
//! Without a card these tests say so and pass; `OPENCOTI_TEST_CUDA=required` makes them fail instead.

#[path = "../../../compute/tests/oracle/cases.rs"]
#[allow(dead_code, reason = "the CPU's tests use all of it")]
mod cases;
#[path = "../../../compute/tests/oracle/f64_attention.rs"]
mod f64_attention;
mod models;
#[path = "../../../compute/tests/oracle/plain_codec.rs"]
mod plain_codec;
mod plans;
mod products;
mod runner;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use opencoti_cuda::driver::Gpu;
use opencoti_cuda::executor::Config;

/// This crate's folder, which lies elsewhere when the tests run on another machine than built them.
fn crate_folder() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from)
}

/// The card, for one test at a time.
struct Card {
    gpu: Arc<Gpu>,
    _turn: MutexGuard<'static, ()>,
}

impl std::ops::Deref for Card {
    type Target = Arc<Gpu>;

    fn deref(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

/// The card, or nothing where there is none.
fn gpu() -> Option<Card> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match Gpu::open(0) {
        Ok(gpu) => Some(Card { gpu, _turn: turn }),
        Err(reason) => {
            let required = std::env::var("OPENCOTI_TEST_CUDA").is_ok_and(|v| v == "required");
            assert!(!required, "{reason}");
            eprintln!("not run: {reason}");
            None
        }
    }
}

fn config(max_rows: usize) -> Config {
    let kernel_cache = Some(std::env::temp_dir().join("opencoti-test-kernels"));
    Config { max_rows, max_outputs: max_rows, kernel_cache, record: true }
}

/// `‖a - b‖ / ‖b‖`.
fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |v: f64| v * v;
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let norm: f64 = b.iter().map(|b| square(f64::from(*b))).sum();
    (difference / norm.max(1e-30)).sqrt()
}

#[test]
fn without_a_card_one_sentence_says_why() {
    if let Err(reason) = Gpu::open(9999) {
        let text = reason.to_string();
        assert!(!text.contains('\n') && text.len() > 20, "{text}");
    }
}
