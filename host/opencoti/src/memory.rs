//! How much memory there is.

/// Bytes that can be taken without swapping; `None` where the system does not tell.
pub fn available() -> Option<u64> {
    parse(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Bytes for people.
pub fn show(bytes: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{value:.0} B"),
        _ => format!("{value:.1} {}", UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_in_kibibytes() {
        assert_eq!(parse("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(parse("MemTotal: 9 kB\n"), None);
    }

    #[test]
    fn bytes_are_shown_in_binary_units() {
        assert_eq!(show(23040.0), "22.5 KiB");
        assert_eq!(show(12.0), "12 B");
    }
}
