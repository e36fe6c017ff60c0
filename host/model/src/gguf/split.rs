//! Split models: the names of their parts and the keys that tie them together.
//!
//! Part `i` of `n` (counted from 1) is `PREFIX-0000i-of-0000n.gguf`. Each carries `split.no` (from 0), `split.count` and
//! `split.tensors.count` (over all parts); the first carries the metadata of the model.

use std::path::{Path, PathBuf};

use super::{Gguf, GgufError};

/// A file name of the split pattern, taken apart.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SplitName {
    prefix: PathBuf,
    /// Number of this part, from 1.
    pub(super) number: u32,
    /// Number of parts.
    pub(super) count: u32,
}

impl SplitName {
    /// Takes a path apart; `None` if its name is not of the pattern.
    pub(super) fn parse(path: &Path) -> Option<SplitName> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let (number, count) = (five_digits(number)?, five_digits(count)?);
        (1..=count).contains(&number).then(|| SplitName { prefix: path.with_file_name(prefix), number, count })
    }

    /// Path of part `number`, from 1.
    pub(super) fn part(&self, number: u32) -> PathBuf {
        let mut name = self.prefix.file_name().unwrap_or_default().to_os_string();
        name.push(format!("-{number:05}-of-{:05}.gguf", self.count));
        self.prefix.with_file_name(name)
    }
}

fn five_digits(text: &str) -> Option<u32> {
    (text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok())?
}

/// The split keys of one part.
pub(super) struct SplitKeys {
    pub(super) number: u32,
    pub(super) count: u32,
    pub(super) tensors: Option<u64>,
}

impl SplitKeys {
    /// The keys, or `None` if the file is not a part of several.
    pub(super) fn read(part: &Gguf) -> Result<Option<SplitKeys>, GgufError> {
        let meta = &part.metadata;
        match meta.u32("split.count")? {
            None | Some(0 | 1) => Ok(None),
            Some(count) => Ok(Some(SplitKeys {
                number: meta.u32("split.no")?.ok_or_else(|| meta.missing("split.no", "the number of this part"))?,
                count,
                tensors: meta.u64("split.tensors.count")?,
            })),
        }
    }
}

/// Checks that `part`, found under the name of part `number` (from 1) of `count`, says the same of itself.
pub(super) fn check_part(part: &Gguf, number: u32, count: u32) -> Result<SplitKeys, GgufError> {
    let file = part.metadata.file();
    let fail = |detail: String| GgufError::Split { file: file.to_owned(), detail };
    let keys = SplitKeys::read(part)?.ok_or_else(|| {
        fail(format!("it is named as part {number} of {count}, but has no key \"split.count\" that says so"))
    })?;
    if keys.count != count {
        return Err(fail(format!("its key \"split.count\" says {} parts, its name says {count}", keys.count)));
    }
    if keys.number != number - 1 {
        return Err(fail(format!(
            "its key \"split.no\" says {}, expected {} for part {number} of {count}",
            keys.number,
            number - 1
        )));
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_names_are_taken_apart_and_put_together() {
        let path = Path::new("/m/big-Q4_K-00002-of-00003.gguf");
        let name = SplitName::parse(path).expect("of the pattern");
        assert_eq!((name.number, name.count), (2, 3));
        assert_eq!(name.part(2), path);
        assert_eq!(name.part(3), Path::new("/m/big-Q4_K-00003-of-00003.gguf"));
    }

    #[test]
    fn other_names_are_not_parts() {
        for name in [
            "a.gguf",
            "a-1-of-2.gguf",
            "a-00003-of-00002.gguf",
            "a-00000-of-00002.gguf",
            "a-00001-of-00002.bin",
            "a-0000x-of-00002.gguf",
        ] {
            assert_eq!(SplitName::parse(Path::new(name)), None, "{name}");
        }
    }
}
