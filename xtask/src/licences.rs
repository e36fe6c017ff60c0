//! Licences of all dependencies against the allow list of `deny.toml`.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};

use crate::cache;

/// Fails with the packages whose licence expression can't be met by allowed licences alone.
pub fn check() -> Result<()> {
    let allowed = allowed()?;
    let output = cache::cargo().args(["metadata", "--format-version", "1", "--locked"]).output()?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).context("cargo metadata is no JSON")?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let refused: Vec<String> = packages
        .iter()
        .filter_map(|p| {
            let licence = p["license"].as_str().unwrap_or("");
            let ok = satisfied(licence, &allowed);
            (!ok).then(|| format!("{} {} ({licence:?})", p["name"], p["version"]))
        })
        .collect();
    if !refused.is_empty() {
        bail!("licences not allowed by deny.toml: {}", refused.join(", "));
    }
    println!("licences of {} packages are allowed", packages.len());
    Ok(())
}

/// The strings of `allow = [...]` in `[licenses]`.
fn allowed() -> Result<BTreeSet<String>> {
    let text = std::fs::read_to_string(cache::workspace().join("deny.toml"))?;
    let list =
        text.split_once("allow = [").and_then(|(_, rest)| rest.split_once(']')).context("deny.toml allows nothing")?.0;
    Ok(list.split('"').skip(1).step_by(2).map(str::to_owned).collect())
}

/// Evaluates an SPDX expression of AND, OR, WITH and parentheses; `/` is the old spelling of OR.
fn satisfied(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    !tokens.is_empty() && any(&tokens, &mut at, allowed) && at == tokens.len()
}

fn any(tokens: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut ok = all(tokens, at, allowed);
    while tokens.get(*at) == Some(&"OR") {
        *at += 1;
        ok |= all(tokens, at, allowed);
    }
    ok
}

fn all(tokens: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut ok = one(tokens, at, allowed);
    while tokens.get(*at) == Some(&"AND") {
        *at += 1;
        ok &= one(tokens, at, allowed);
    }
    ok
}

fn one(tokens: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    match tokens.get(*at) {
        Some(&"(") => {
            *at += 1;
            let ok = any(tokens, at, allowed);
            let closed = tokens.get(*at) == Some(&")");
            *at += 1;
            ok && closed
        }
        Some(name) => {
            *at += 1;
            let mut name = (*name).to_owned();
            if tokens.get(*at) == Some(&"WITH") {
                name = format!("{name} WITH {}", tokens.get(*at + 1).unwrap_or(&""));
                *at += 2;
            }
            allowed.contains(&name)
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_met_by_allowed_licences_alone() {
        let allowed: BTreeSet<String> =
            ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"].map(String::from).into();
        for good in ["MIT", "MIT/GPL-3.0", "(MIT OR GPL-3.0) AND Apache-2.0", "Apache-2.0 WITH LLVM-exception OR X"] {
            assert!(satisfied(good, &allowed), "{good}");
        }
        for bad in ["", "GPL-3.0", "MIT AND GPL-3.0", "(MIT", "MIT GPL"] {
            assert!(!satisfied(bad, &allowed), "{bad}");
        }
    }
}
