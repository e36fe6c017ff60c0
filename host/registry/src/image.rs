//! Is this file a library for this machine, and is all of it there?
//!
//! Asked before the dynamic loader sees the file: its own messages are of little use to an operator, and on a file that
//! was cut short it maps pages beyond the end, which kills the process at the first touch.

use crate::refusal::Refusal;
use std::path::Path;

/// Refuses what the dynamic loader of this system should not be given.
pub(crate) fn check(path: &Path, bytes: &[u8]) -> Result<(), Refusal> {
    if cfg!(target_os = "macos") {
        // Mach-O, 64 bits, and universal files.
        check_magic(path, bytes, &[b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe"], "a Mach-O library")
    } else if cfg!(windows) {
        check_magic(path, bytes, &[b"MZ"], "a DLL")
    } else {
        check_magic(path, bytes, &[b"\x7fELF"], "an ELF library")?;
        check_elf(bytes, expected_machine()).map_err(|(found, expected)| Refusal::WrongImage {
            path: path.into(),
            found,
            expected,
        })
    }
}

fn check_magic(path: &Path, bytes: &[u8], magics: &[&[u8]], expected: &'static str) -> Result<(), Refusal> {
    if magics.iter().any(|m| bytes.starts_with(m)) {
        return Ok(());
    }
    Err(Refusal::NotALibrary { path: path.into(), starts_with: first_bytes(bytes), expected })
}

/// The first bytes, as text when they are text.
fn first_bytes(bytes: &[u8]) -> String {
    let start = &bytes[..bytes.len().min(16)];
    if start.is_empty() {
        return "nothing: it is empty".to_owned();
    }
    match std::str::from_utf8(start) {
        Ok(text) if !text.contains('\0') => format!("{text:?}"),
        _ => start.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(" "),
    }
}

/// `e_machine` of this build, from the ELF specification's processor supplements.
fn expected_machine() -> u16 {
    match std::env::consts::ARCH {
        "x86_64" => 62,
        "aarch64" => 183,
        "riscv64" => 243,
        "powerpc64" => 21,
        "s390x" => 22,
        "loongarch64" => 258,
        _ => 0,
    }
}

fn machine_name(machine: u16) -> String {
    match machine {
        3 => "x86 (32 bits)".to_owned(),
        21 => "powerpc64".to_owned(),
        22 => "s390x".to_owned(),
        40 => "arm (32 bits)".to_owned(),
        62 => "x86_64".to_owned(),
        183 => "aarch64".to_owned(),
        243 => "riscv".to_owned(),
        258 => "loongarch64".to_owned(),
        other => format!("machine {other}"),
    }
}

/// `(found, expected)` of the first thing that is wrong. Layouts of the headers as in the ELF-64 object file format.
fn check_elf(bytes: &[u8], machine: u16) -> Result<(), (String, String)> {
    const CLASS_64: u8 = 2;
    const LITTLE_ENDIAN: u8 = 1;
    const TYPE_SHARED: u16 = 3;
    const HEADER: usize = 64;
    const PROGRAM_HEADER: u64 = 56;
    const LOAD: u32 = 1;
    const DYNAMIC: u32 = 2;

    let cut =
        |end: u64| (format!("{} bytes", bytes.len()), format!("at least {end} by its headers: the file is cut short"));
    if bytes.len() < HEADER {
        return Err(cut(HEADER as u64));
    }
    let data = if cfg!(target_endian = "little") { LITTLE_ENDIAN } else { 2 };
    if (bytes[4], bytes[5]) != (CLASS_64, data) {
        return Err((format!("ELF class {} and byte order {}", bytes[4], bytes[5]), format!("{CLASS_64} and {data}")));
    }
    let found_machine = u16_at(bytes, 18);
    if found_machine != Some(machine) {
        return Err((format!("a library for {}", machine_name(found_machine.unwrap_or(0))), machine_name(machine)));
    }
    if u16_at(bytes, 16) != Some(TYPE_SHARED) {
        let found = u16_at(bytes, 16).unwrap_or(0);
        return Err((format!("an ELF file of type {found}"), "a shared library (type 3)".to_owned()));
    }
    let (start, entry, n) = (u64_at(bytes, 32), u16_at(bytes, 54), u16_at(bytes, 56));
    let (Some(start), Some(entry), Some(n)) = (start, entry, n) else { return Err(cut(HEADER as u64)) };
    if u64::from(entry) != PROGRAM_HEADER {
        return Err((format!("program headers of {entry} bytes"), PROGRAM_HEADER.to_string()));
    }
    for i in 0..u64::from(n) {
        let at = start.saturating_add(i * PROGRAM_HEADER);
        let end = at.saturating_add(PROGRAM_HEADER);
        if end > bytes.len() as u64 {
            return Err(cut(end));
        }
        let header = &bytes[at as usize..end as usize];
        let (Some(kind), Some(offset), Some(len)) = (u32_at(header, 0), u64_at(header, 8), u64_at(header, 32)) else {
            return Err(cut(end));
        };
        let end = offset.saturating_add(len);
        if (kind == LOAD || kind == DYNAMIC) && end > bytes.len() as u64 {
            return Err(cut(end));
        }
    }
    Ok(())
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(all(test, target_endian = "little"))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MACHINE: u16 = 62;

    /// A header and one segment of `segment` bytes behind it.
    fn elf(segment: u64) -> Vec<u8> {
        let mut bytes = vec![0u8; 64 + 56];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[16..18].copy_from_slice(&3u16.to_le_bytes());
        bytes[18..20].copy_from_slice(&MACHINE.to_le_bytes());
        bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&56u16.to_le_bytes());
        bytes[56..58].copy_from_slice(&1u16.to_le_bytes());
        bytes[64..68].copy_from_slice(&1u32.to_le_bytes());
        bytes[72..80].copy_from_slice(&120u64.to_le_bytes());
        bytes[96..104].copy_from_slice(&segment.to_le_bytes());
        bytes.resize(120 + segment as usize, 0);
        bytes
    }

    #[test]
    fn a_whole_library_passes_and_every_shorter_one_is_cut_short() {
        let bytes = elf(40);
        assert_eq!(check_elf(&bytes, MACHINE), Ok(()));
        for len in 0..bytes.len() {
            let (_, expected) = check_elf(&bytes[..len], MACHINE).unwrap_err();
            assert!(expected.ends_with("the file is cut short"), "{len}: {expected}");
        }
    }

    #[test]
    fn another_machine_is_named() {
        let mut bytes = elf(0);
        bytes[18..20].copy_from_slice(&183u16.to_le_bytes());
        assert_eq!(check_elf(&bytes, MACHINE), Err(("a library for aarch64".into(), "x86_64".into())));
    }

    #[test]
    fn an_object_file_is_no_library() {
        let mut bytes = elf(0);
        bytes[16] = 1;
        assert_eq!(check_elf(&bytes, MACHINE).unwrap_err().0, "an ELF file of type 1");
    }

    #[test]
    fn first_bytes_are_shown_as_text_or_as_hex() {
        assert_eq!(first_bytes(b"#!/bin/sh\necho"), "\"#!/bin/sh\\necho\"");
        assert_eq!(first_bytes(b"\x7fELF\x01"), "\"\\u{7f}ELF\\u{1}\"");
        assert_eq!(first_bytes(b"\xff\x00"), "ff 00");
        assert_eq!(first_bytes(b""), "nothing: it is empty");
    }

    proptest! {
        #[test]
        fn no_header_makes_the_check_panic(noise in proptest::collection::vec(any::<u8>(), 0..300), at in 0usize..120) {
            let _ = check_elf(&noise, MACHINE);
            let mut bytes = elf(30);
            for (to, from) in bytes[at..].iter_mut().zip(&noise) {
                *to = *from;
            }
            let _ = check_elf(&bytes, MACHINE);
        }
    }
}
