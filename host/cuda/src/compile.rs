//! From source to kernels of a card: NVRTC, and a cache on disk.
//!
//! The kernels under `kernels/` include nothing of the toolkit, so the compiler alone is needed. What it makes is machine code
//! of one architecture; it is kept under a name that is a hash of everything that went into it.

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};

use cudarc::nvrtc::{result, sys};
use opencoti_plugin_api::host::Codec;
use sha2::{Digest, Sha256};

use crate::CudaError;

/// What every kernel, and every codec's source, may use.
pub const COMMON: &str = include_str!("../kernels/common.cuh");
const WEIGHTS: &str = include_str!("../kernels/weights.cuh");
const PRODUCTS: &str = include_str!("../kernels/products.cu");
const ROWS: &str = include_str!("../kernels/rows.cu");
const MERGE: &str = include_str!("../kernels/merge.cu");
const ATTENTION: &str = include_str!("../kernels/attention.cu");

/// Language of the device sources that these kernels take.
pub const LANGUAGE: &str = "cuda-c++/1";

/// Architectures for which the kernels are compiled in tests, as NVRTC names them.
pub const ARCHITECTURES: [u32; 7] = [75, 80, 86, 89, 90, 100, 120];

/// A codec's device source: a text and the name of a type in it.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub struct CodecSource {
    /// Source text.
    pub text: String,
    /// The type that implements the concept, as an expression.
    pub name: String,
}

impl CodecSource {
    /// The source of an opened codec.
    ///
    /// # Errors
    /// When its plugin has none in [`LANGUAGE`].
    pub fn of(codec: &Codec) -> Result<CodecSource, CudaError> {
        match codec.device_source(LANGUAGE) {
            Ok(Some(source)) => Ok(CodecSource { text: source.text, name: source.name }),
            Ok(None) => Err(CudaError::Unsupported(format!(
                "codec `{}` of plugin `{}` has no device source in {LANGUAGE}",
                codec.name(),
                codec.plugin().name()
            ))),
            Err(error) => Err(CudaError::Wrong(format!("the device source of codec `{}`: {error}", codec.name()))),
        }
    }
}

/// A source to compile.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Program {
    /// What it is, for people.
    pub name: String,
    source: String,
}

impl Program {
    /// Products with weights of a format, `Q4_K` for example.
    pub fn products(format: &str) -> Program {
        let define = format!("#define FORMAT {format}\n");
        Program { name: format!("products of {format}"), source: assemble(&[COMMON, WEIGHTS, &define, PRODUCTS]) }
    }

    /// Functions of rows.
    pub fn rows() -> Program {
        Program { name: "rows".to_owned(), source: assemble(&[COMMON, ROWS]) }
    }

    /// The merge of partial attention.
    pub fn merge() -> Program {
        Program { name: "merge".to_owned(), source: assemble(&[COMMON, MERGE]) }
    }

    /// Attention over keys and values of two codecs at their head sizes.
    pub fn attention(keys: &CodecSource, k_dim: usize, values: &CodecSource, v_dim: usize) -> Program {
        let types = format!(
            "typedef {} KEYS;\ntypedef {} VALUES;\nconstexpr int K_DIM = {k_dim}, V_DIM = {v_dim};\n",
            keys.name, values.name
        );
        let second = if keys.text == values.text { "" } else { &values.text };
        Program {
            name: format!("attention of {} and {}", keys.name, values.name),
            source: assemble(&[COMMON, &keys.text, "\n", second, "\n", &types, ATTENTION]),
        }
    }
}

/// One text of several, without the lines that name each other.
fn assemble(parts: &[&str]) -> String {
    let mut text = String::new();
    for line in parts.iter().flat_map(|part| part.lines()) {
        if !line.starts_with("#include \"") && line != "#pragma once" {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// What the assembler says of a kernel.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Name of the kernel.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes that registers were spilled to.
    pub spilled: u32,
    /// Bytes of static shared memory.
    pub shared: u32,
}

/// Machine code of an architecture.
pub struct Compiled {
    /// The code, to be loaded.
    pub cubin: Vec<u8>,
    /// What its kernels use.
    pub usage: Vec<Usage>,
}

/// Compiles for architecture `arch`, `90` for example.
///
/// # Errors
/// With the compiler's own words when the source is wrong.
pub fn compile(program: &Program, arch: u32) -> Result<Compiled, CudaError> {
    let internal = |what: &str| CudaError::Internal(format!("{what} of the {} kernels", program.name));
    let source = CString::new(program.source.as_str()).map_err(|_| internal("a zero byte in the source"))?;
    let wrong = |e: result::NvrtcError| CudaError::Compiler { name: program.name.clone(), log: e.to_string() };
    let handle = Handle(result::create_program(&source, Some(c"kernels.cu")).map_err(wrong)?);
    let options = [
        format!("--gpu-architecture=sm_{arch}"),
        "--std=c++17".to_owned(),
        "--ptxas-options=-v".to_owned(),
        "--diag-suppress=177".to_owned(),
    ];
    // SAFETY: the program was just made.
    let compiled = unsafe { result::compile_program(handle.0, &options) };
    // SAFETY: as above.
    let log = unsafe { result::get_program_log(handle.0) }.map_err(wrong)?;
    // SAFETY: every bit pattern of a C character is a byte.
    let log = unsafe { std::slice::from_raw_parts(log.as_ptr().cast::<u8>(), log.len()) };
    let log = CStr::from_bytes_until_nul(log).map(CStr::to_string_lossy).unwrap_or_default().into_owned();
    compiled.map_err(|_| CudaError::Compiler { name: program.name.clone(), log: log.clone() })?;
    let mut len = 0;
    // SAFETY: the program was compiled; the buffer has the size that the compiler names.
    let cubin = unsafe {
        sys::nvrtcGetCUBINSize(handle.0, &mut len).result().map_err(wrong)?;
        let mut cubin = vec![0u8; len];
        sys::nvrtcGetCUBIN(handle.0, cubin.as_mut_ptr().cast()).result().map_err(wrong)?;
        cubin
    };
    Ok(Compiled { cubin, usage: usage(&log) })
}

struct Handle(sys::nvrtcProgram);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made once and destroyed once.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Reads the assembler's report.
fn usage(log: &str) -> Vec<Usage> {
    let mut kernels: Vec<Usage> = Vec::new();
    let number = |text: &str, unit: &str| -> Option<u32> {
        let before = &text[..text.find(unit)?];
        before.trim_end().rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("entry function '")
            && let Some((kernel, _)) = rest.split_once('\'')
        {
            kernels.push(Usage { kernel: kernel.to_owned(), ..Usage::default() });
        }
        let Some(last) = kernels.last_mut() else { continue };
        last.registers = number(line, " registers").unwrap_or(last.registers);
        last.spilled = number(line, " bytes spill stores").unwrap_or(last.spilled);
        last.shared = number(line, " bytes smem").unwrap_or(last.shared);
    }
    kernels
}

/// Whether the compiler is there.
pub fn has_compiler() -> bool {
    // SAFETY: looks for a library by its names.
    unsafe { sys::is_culib_present() }
}

/// Compiled kernels on disk.
pub struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// A cache in `folder`, which is made when it is first needed; `None` keeps nothing.
    pub fn new(folder: Option<PathBuf>) -> Cache {
        Cache { folder }
    }

    /// The kernels of a program for an architecture, from the cache or compiled.
    ///
    /// # Errors
    /// When it does not compile. A cache that can't be read or written is only a loss of time.
    pub fn cubin(&self, program: &Program, arch: u32) -> Result<Vec<u8>, CudaError> {
        let path = self.folder.as_ref().map(|folder| folder.join(format!("{}.cubin", key(program, arch))));
        if let Some(cubin) = path.as_deref().and_then(|path| std::fs::read(path).ok()) {
            return Ok(cubin);
        }
        let cubin = compile(program, arch)?.cubin;
        if let Some(path) = &path
            && let Err(error) = write(path, &cubin)
        {
            tracing::warn!(%error, path = %path.display(), "compiled kernels could not be kept");
        }
        Ok(cubin)
    }
}

/// A hash of everything that decides what the compiler makes.
pub fn key(program: &Program, arch: u32) -> String {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two variables to write to. A version that can't be told is 0.0.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    let mut hash = Sha256::new();
    hash.update(format!("{arch} {major}.{minor} {}\n", env!("CARGO_PKG_VERSION")));
    hash.update(&program.source);
    hash.finalize().iter().take(16).map(|b| format!("{b:02x}")).collect()
}

/// Writes a file as a whole: another process sees all of it or nothing.
fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let part = path.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&part, bytes)?;
    std::fs::rename(part, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assemblers_report_is_read() {
        let log = "ptxas info    : Compiling entry function 'few8' for 'sm_90'\n\
                   ptxas         .     8 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 46 registers, used 1 barriers, 4096 bytes smem\n\
                   ptxas info    : Compiling entry function 'pack' for 'sm_90'\n\
                   ptxas info    : Used 30 registers, used 0 barriers\n";
        let few = Usage { kernel: "few8".to_owned(), registers: 46, spilled: 16, shared: 4096 };
        let pack = Usage { kernel: "pack".to_owned(), registers: 30, ..Usage::default() };
        assert_eq!(usage(log), [few, pack]);
    }

    #[test]
    fn files_that_name_each_other_become_one_text() {
        let program = Program::products("Q8_0");
        assert!(!program.source.contains("#include") && program.source.contains("#define FORMAT Q8_0"));
        assert_ne!(key(&program, 80), key(&program, 90));
        assert_ne!(key(&program, 80), key(&Program::products("Q4_0"), 80));
    }
}
