//! The tokens that experiments run: of a text, or as they are given.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use opencoti_model::tokenizer::{EncodeOptions, Tokenizer};

/// Where tokens come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A text, to be tokenised.
    Text(PathBuf),
    /// Token ids, a JSON array of numbers.
    Ids(PathBuf),
}

impl Source {
    /// The file.
    pub fn path(&self) -> &PathBuf {
        match self {
            Source::Text(path) | Source::Ids(path) => path,
        }
    }

    /// All its tokens, none of them added.
    ///
    /// # Errors
    /// A file that can't be read, or ids that the vocabulary does not have.
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let path = self.path();
        let content = std::fs::read(path).with_context(|| format!("{} can't be read", path.display()))?;
        let Source::Ids(_) = self else {
            let text = String::from_utf8(content).with_context(|| format!("{} is no text in UTF-8", path.display()))?;
            return Ok(tokenizer.encode(&text, EncodeOptions { add_special: false, parse_special: false })?);
        };
        let ids: Vec<u32> = serde_json::from_slice(&content)
            .with_context(|| format!("{} is no JSON array of token ids", path.display()))?;
        let vocabulary = tokenizer.n_vocab();
        match ids.iter().find(|&&id| id as usize >= vocabulary) {
            Some(id) => bail!("{} has token {id}, but the vocabulary has {vocabulary}", path.display()),
            None => Ok(ids),
        }
    }
}

/// The first `count` passages of `length` tokens, or all there are with 0. With a token that begins every text, it takes the
/// place of the first of each passage: the procedure of llama.cpp's perplexity tool.
///
/// # Errors
/// Too few tokens.
pub fn passages(tokens: &[u32], length: usize, count: usize, begin: Option<u32>) -> Result<Vec<Vec<u32>>> {
    // The text itself begins with that token.
    let tokens: Vec<u32> = begin.into_iter().chain(tokens.iter().copied()).collect();
    let there = tokens.len() / length;
    if there < count.max(1) {
        bail!(
            "the text has {} tokens, but {} passages of {length} need {}; give a longer text or ask for fewer",
            tokens.len(),
            count.max(1),
            length * count.max(1)
        );
    }
    let taken = if count == 0 { there } else { count };
    let mut passages: Vec<Vec<u32>> = tokens.chunks_exact(length).take(taken).map(<[u32]>::to_vec).collect();
    if let Some(begin) = begin {
        passages.iter_mut().for_each(|passage| passage[0] = begin);
    }
    Ok(passages)
}

/// The token that a model wants before every text.
pub fn begin(tokenizer: &Tokenizer) -> Option<u32> {
    tokenizer.bos().filter(|_| tokenizer.add_bos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_passage_begins_with_the_token_that_begins_texts() {
        let tokens: Vec<u32> = (10..20).collect();
        assert_eq!(passages(&tokens, 4, 2, Some(1)).unwrap(), [[1, 10, 11, 12], [1, 14, 15, 16]]);
        assert_eq!(passages(&tokens, 4, 0, None).unwrap(), [[10, 11, 12, 13], [14, 15, 16, 17]]);
    }

    #[test]
    fn too_short_a_text_says_what_is_needed() {
        let error = passages(&[1, 2, 3], 4, 2, None).unwrap_err().to_string();
        assert!(error.contains("has 3 tokens, but 2 passages of 4 need 8"), "{error}");
        assert!(passages(&[], 4, 0, None).is_err());
    }
}
