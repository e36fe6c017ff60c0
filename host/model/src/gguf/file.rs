//! A model on disk: one mapped file, or the mapped parts of a split one, seen as one set of tensors.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use super::split::{SplitKeys, SplitName, check_part};
use super::{Gguf, GgufError, Metadata, TensorInfo};

/// An opened model file with all its parts. Cloning shares the mappings.
#[derive(Clone, Debug)]
pub struct GgufFile {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    parts: Vec<Part>,
    /// Name to (part, index in the part).
    index: HashMap<String, (usize, usize)>,
}

#[derive(Debug)]
struct Part {
    path: PathBuf,
    map: Mmap,
    header: Gguf,
}

/// A tensor and its bytes. Keeps the mapping alive, so it may outlive the [`GgufFile`].
#[derive(Clone, Debug)]
pub struct TensorData {
    inner: Arc<Inner>,
    part: usize,
    tensor: usize,
}

impl TensorData {
    /// Name, dimensions and type.
    pub fn info(&self) -> &TensorInfo {
        &self.inner.parts[self.part].header.tensors[self.tensor]
    }

    /// The raw bytes, blocks as they lie in the file.
    pub fn bytes(&self) -> &[u8] {
        &self.inner.parts[self.part].map[self.info().range.clone()]
    }
}

impl AsRef<[u8]> for TensorData {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

impl GgufFile {
    /// Maps a model. Any part of a split model may be named; all its parts are found beside it.
    ///
    /// The file must not be truncated by another process while it is mapped: the system answers a read behind its new end by
    /// killing the process. Replacing it by a rename is harmless.
    ///
    /// # Errors
    /// [`GgufError`]: not readable, not GGUF, damaged, or a part missing or foreign.
    pub fn open(path: &Path) -> Result<GgufFile, GgufError> {
        let first = Part::open(path)?;
        let parts = match SplitKeys::read(&first.header)? {
            None => vec![first],
            Some(keys) => open_parts(path, first, &keys)?,
        };
        Ok(GgufFile { inner: Arc::new(Inner { index: index_tensors(&parts)?, parts }) })
    }

    /// A model of another format, seen as a file of this one: its tensors lie in the mapped file at `path`, and `header` says
    /// what and where they are.
    ///
    /// # Errors
    /// Two tensors have one name.
    pub(crate) fn from_foreign(path: &Path, map: Mmap, header: Gguf) -> Result<GgufFile, GgufError> {
        let parts = vec![Part { path: path.to_owned(), map, header }];
        Ok(GgufFile { inner: Arc::new(Inner { index: index_tensors(&parts)?, parts }) })
    }

    /// Metadata of the model (that of the first part).
    pub fn metadata(&self) -> &Metadata {
        &self.inner.parts[0].header.metadata
    }

    /// Format version of the first part.
    pub fn version(&self) -> u32 {
        self.inner.parts[0].header.version
    }

    /// Name of the first part as errors write it.
    pub fn name(&self) -> &str {
        self.metadata().file()
    }

    /// Paths of all parts in order.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.inner.parts.iter().map(|part| part.path.as_path())
    }

    /// Bytes of all parts on disk.
    pub fn bytes_on_disk(&self) -> u64 {
        self.inner.parts.iter().map(|part| part.map.len() as u64).sum()
    }

    /// Gives back the memory that mapped bytes take until somebody reads them again: for weights that were packed into another
    /// layout and are not needed as the file has them.
    pub fn release(&self) {
        for part in &self.inner.parts {
            // SAFETY: the mapping is of a file and read-only, so that pages given back come again with the same bytes.
            if let Err(error) = unsafe { part.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) } {
                tracing::debug!(path = %part.path.display(), %error, "mapped pages stay");
            }
        }
    }

    /// Asks the system to read all parts ahead, but for the tensors that `skip` tells by name. A hint: it returns at once, and
    /// what the system makes of it has no effect here.
    pub fn read_ahead(&self, skip: impl Fn(&str) -> bool) {
        for part in &self.inner.parts {
            let tensors = part.header.tensors.iter();
            let mut skipped: Vec<Range<usize>> = tensors.filter(|t| skip(&t.name)).map(|t| t.range.clone()).collect();
            skipped.sort_unstable_by_key(|range| range.start);
            skipped.push(part.map.len()..part.map.len());
            let mut start = 0;
            for range in skipped {
                let len = range.start.saturating_sub(start);
                if let Err(error) = part.map.advise_range(memmap2::Advice::WillNeed, start, len) {
                    tracing::debug!(path = %part.path.display(), %error, "no read-ahead");
                }
                start = range.end.max(start);
            }
        }
    }

    /// All tensors in file order, part after part.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.inner.parts.iter().flat_map(|part| &part.header.tensors)
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<TensorData> {
        let &(part, tensor) = self.inner.index.get(name)?;
        Some(TensorData { inner: Arc::clone(&self.inner), part, tensor })
    }
}

impl Part {
    fn open(path: &Path) -> Result<Part, GgufError> {
        let fail = |source| GgufError::Io { path: path.to_owned(), source };
        let map = map_file(path).map_err(fail)?;
        let header = Gguf::parse(&map, &path.display().to_string())?;
        Ok(Part { path: path.to_owned(), map, header })
    }
}

/// Maps a file to read.
pub(crate) fn map_file(path: &Path) -> std::io::Result<Mmap> {
    let file = File::open(path)?;
    if file.metadata()?.is_dir() {
        return Err(std::io::Error::other("it is a folder, expected a file"));
    }
    // SAFETY: the mapping is private and only read. Another process that truncates the file meanwhile can still kill us with
    // a signal; `GgufFile::open` documents that.
    unsafe { Mmap::map(&file) }
}

/// Opens the other parts of a split model, in order.
fn open_parts(path: &Path, opened: Part, keys: &SplitKeys) -> Result<Vec<Part>, GgufError> {
    let fail = |file: &Path, detail: String| GgufError::Split { file: file.display().to_string(), detail };
    let name = SplitName::parse(path).ok_or_else(|| {
        let pattern = format!("NAME-{:05}-of-{:05}.gguf", keys.number.saturating_add(1), keys.count);
        fail(
            path,
            format!(
                "it is part {} of {}, but not named {pattern}, so the other parts can't be found",
                keys.number.saturating_add(1),
                keys.count
            ),
        )
    })?;
    let mut opened = Some(opened);
    let mut parts = Vec::new();
    for number in 1..=name.count {
        let part_path = name.part(number);
        let part = match opened.take_if(|_| number == name.number) {
            Some(part) => part,
            None if part_path.exists() => Part::open(&part_path)?,
            None => {
                return Err(fail(
                    &part_path,
                    format!("part {number} of {} is missing; put all parts into one folder", name.count),
                ));
            }
        };
        let part_keys = check_part(&part.header, number, name.count)?;
        if part_keys.tensors != keys.tensors {
            return Err(fail(
                &part_path,
                "its key \"split.tensors.count\" differs from that of the other parts".to_owned(),
            ));
        }
        parts.push(part);
    }
    let found: usize = parts.iter().map(|part| part.header.tensors.len()).sum();
    match keys.tensors {
        Some(expected) if expected != found as u64 => {
            Err(fail(path, format!("its parts hold {found} tensors, but \"split.tensors.count\" says {expected}")))
        }
        _ => Ok(parts),
    }
}

fn index_tensors(parts: &[Part]) -> Result<HashMap<String, (usize, usize)>, GgufError> {
    let mut index = HashMap::new();
    for (p, part) in parts.iter().enumerate() {
        for (t, tensor) in part.header.tensors.iter().enumerate() {
            if let Some((other, _)) = index.insert(tensor.name.clone(), (p, t)) {
                return Err(GgufError::Tensor {
                    file: part.path.display().to_string(),
                    tensor: tensor.name.clone(),
                    detail: format!("is also in part {}", parts[other].path.display()),
                });
            }
        }
    }
    Ok(index)
}
