//! What a measurement ran on.

use opencoti_compute::cpu::simd::Isa;
use serde_json::{Value, json};

/// Name of the processor, as the system tells it.
pub fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, n)| n.trim()));
    name.unwrap_or(std::env::consts::ARCH).to_owned()
}

/// Most memory that this process has held at once, in bytes; `None` where the system does not tell.
pub fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The facts of a measurement's machine.
pub fn to_json(threads: usize) -> Value {
    json!({
        "processor": processor(),
        "instructions": format!("{:?}", Isa::detect().level()).to_lowercase(),
        "threads": threads,
        "version": env!("CARGO_PKG_VERSION"),
    })
}
