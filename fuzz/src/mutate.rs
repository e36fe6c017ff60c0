//! Mutations of byte strings.

use rand::{Rng, RngExt};

/// Numbers that break size arithmetic.
const NUMBERS: [u64; 12] = [
    0,
    1,
    0x7f,
    0xff,
    0x7fff_ffff,
    0xffff_ffff,
    0x1_0000_0000,
    1 << 40,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 7,
    u64::MAX,
];
const LONGEST: usize = 1 << 20;

/// Changes `input` in one to four ways; `other` is another input of the corpus.
pub fn mutate(input: &mut Vec<u8>, other: &[u8], rng: &mut impl Rng) {
    for _ in 0..rng.random_range(1..=4) {
        match rng.random_range(0..8) {
            0 => flip(input, rng),
            1 => number(input, rng),
            2 => input.truncate(rng.random_range(0..=input.len())),
            3 => remove(input, rng),
            4 => repeat(input, rng),
            5 => splice(input, other, rng),
            6 => digit(input, rng),
            _ => insert(input, rng),
        }
    }
    input.truncate(LONGEST);
}

fn place(input: &[u8], rng: &mut impl Rng) -> usize {
    if input.is_empty() { 0 } else { rng.random_range(0..input.len()) }
}

fn range(input: &[u8], rng: &mut impl Rng) -> std::ops::Range<usize> {
    let start = place(input, rng);
    start..(start + rng.random_range(1..=64)).min(input.len())
}

fn flip(input: &mut [u8], rng: &mut impl Rng) {
    let at = place(input, rng);
    if let Some(byte) = input.get_mut(at) {
        *byte ^= 1 << rng.random_range(0..8);
    }
}

/// Overwrites 1, 2, 4 or 8 bytes by a number that breaks size arithmetic, or one near what stands there.
fn number(input: &mut [u8], rng: &mut impl Rng) {
    let (at, width) = (place(input, rng), 1usize << rng.random_range(0..4));
    if at + width > input.len() {
        return;
    }
    let mut bytes = [0u8; 8];
    bytes[..width].copy_from_slice(&input[at..at + width]);
    let value = match rng.random_bool(0.5) {
        true => NUMBERS[rng.random_range(0..NUMBERS.len())],
        false => u64::from_le_bytes(bytes).wrapping_add_signed(rng.random_range(-4..=4)),
    };
    input[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
}

fn remove(input: &mut Vec<u8>, rng: &mut impl Rng) {
    let range = range(input, rng);
    input.drain(range);
}

fn repeat(input: &mut Vec<u8>, rng: &mut impl Rng) {
    let part = input[range(input, rng)].to_vec();
    let (at, times) = (place(input, rng), rng.random_range(1..=16));
    input.splice(at..at, part.repeat(times));
}

fn splice(input: &mut Vec<u8>, other: &[u8], rng: &mut impl Rng) {
    let part = other[range(other, rng)].to_vec();
    let at = range(input, rng);
    input.splice(at, part);
}

/// Changes a digit or a bracket of text.
fn digit(input: &mut [u8], rng: &mut impl Rng) {
    const TEXT: &[u8] = b"0123456789-.eE[]{}\":,tfn\\u";
    let at = place(input, rng);
    if let Some(byte) = input.get_mut(at) {
        *byte = TEXT[rng.random_range(0..TEXT.len())];
    }
}

fn insert(input: &mut Vec<u8>, rng: &mut impl Rng) {
    let at = place(input, rng);
    let bytes: Vec<u8> = (0..rng.random_range(1..=8)).map(|_| rng.random()).collect();
    input.splice(at..at, bytes);
}
