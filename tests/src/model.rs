//! A made-up model for tests of the whole program: llama with two layers, random weights and a byte-level tokenizer
//! that knows every text. It says nonsense, but always the same, and is ready in milliseconds.

use std::path::Path;

use opencoti_model::gguf::write::GgufWriter;
use opencoti_model::gguf::{Array, Value};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Tokens it was trained for.
pub const CONTEXT: u32 = 16384;
/// Ends a text.
pub const END_OF_TEXT: u32 = 256;
/// Ends a message.
pub const IM_END: u32 = 258;

const WIDTH: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const FFN: usize = 128;
const LAYERS: usize = 2;

/// Merges, in order; each makes a token.
const MERGES: [&str; 6] = ["t h", "th e", "Ġ the", "a n", "i n", "Ġ a"];

const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + \
                        '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}\
                        {{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Writes the model.
///
/// # Errors
/// What the system says.
pub fn write(path: &Path) -> std::io::Result<()> {
    write_with(path, &[])
}

/// Writes the model with more special tokens in its vocabulary.
///
/// # Errors
/// What the system says.
pub fn write_with(path: &Path, special: &[&str]) -> std::io::Result<()> {
    let mut tokens = vocabulary();
    let n_plain = tokens.len();
    tokens.extend(special.iter().map(|&token| token.to_owned()));
    weights(keys(&tokens, n_plain), &tokens).write_to(path)
}

/// The characters by which byte-level vocabularies write the bytes: printable ones stand for themselves, the others
/// are U+0100 and up (GPT-2's alphabet).
fn alphabet() -> impl Iterator<Item = char> {
    let mut shifted = 0x100..;
    (0..=255u8).map(move |byte| match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => shifted.next().and_then(char::from_u32).unwrap_or_default(),
    })
}

/// 256 bytes, three special tokens, one token a merge.
fn vocabulary() -> Vec<String> {
    let bytes = alphabet().map(String::from);
    let special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(str::to_owned);
    bytes.chain(special).chain(MERGES.map(|merge| merge.replace(' ', ""))).collect()
}

/// The keys of a model whose tokens from `n_plain` on are special, like the three after the bytes.
fn keys(tokens: &[String], n_plain: usize) -> GgufWriter {
    let size = |n: usize| Value::U32(n as u32);
    let texts = |texts: Vec<String>| Value::Array(Array::Str(texts));
    let is_special = |id: usize| (256..259).contains(&id) || id >= n_plain;
    let types = (0..tokens.len()).map(|id| if is_special(id) { 3 } else { 1 }).collect();
    GgufWriter::new()
        .str("general.architecture", "llama")
        .str("general.name", "tiny")
        .key("llama.block_count", size(LAYERS))
        .key("llama.context_length", Value::U32(CONTEXT))
        .key("llama.embedding_length", size(WIDTH))
        .key("llama.feed_forward_length", size(FFN))
        .key("llama.attention.head_count", size(HEADS))
        .key("llama.attention.head_count_kv", size(KV_HEADS))
        .key("llama.attention.key_length", size(HEAD_DIM))
        .key("llama.attention.value_length", size(HEAD_DIM))
        .key("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5))
        .key("llama.rope.dimension_count", size(HEAD_DIM))
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "smollm")
        .key("tokenizer.ggml.tokens", texts(tokens.to_vec()))
        .key("tokenizer.ggml.token_type", Value::Array(Array::I32(types)))
        .key("tokenizer.ggml.merges", texts(MERGES.map(str::to_owned).to_vec()))
        .key("tokenizer.ggml.bos_token_id", Value::U32(END_OF_TEXT))
        .key("tokenizer.ggml.eos_token_id", Value::U32(IM_END))
        .key("tokenizer.ggml.add_bos_token", Value::Bool(false))
        .str("tokenizer.chat_template", TEMPLATE)
}

fn weights(file: GgufWriter, tokens: &[String]) -> GgufWriter {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut matrix = |columns: usize, rows: usize| -> Vec<f32> {
        let bound = (3.0 / columns as f32).sqrt();
        (0..columns * rows).map(|_| random.random_range(-bound..bound)).collect()
    };
    let ones = [1.0; WIDTH];
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    // Whatever is no printable ASCII character has small logits, so that greedy texts are readable and go on.
    let mut output = matrix(WIDTH, tokens.len());
    for (_, row) in output.chunks_mut(WIDTH).enumerate().filter(|(id, _)| !(0x20..0x7f).contains(id)) {
        row.iter_mut().for_each(|w| *w *= 0.05);
    }
    let mut file = file
        .f32_tensor("token_embd.weight", &[WIDTH, tokens.len()], &matrix(WIDTH, tokens.len()))
        .f32_tensor("output_norm.weight", &[WIDTH], &ones)
        .f32_tensor("output.weight", &[WIDTH, tokens.len()], &output);
    for l in 0..LAYERS {
        file = file.f32_tensor(&format!("blk.{l}.attn_norm.weight"), &[WIDTH], &ones).f32_tensor(
            &format!("blk.{l}.ffn_norm.weight"),
            &[WIDTH],
            &ones,
        );
        for (name, columns, rows) in [
            ("attn_q", WIDTH, q),
            ("attn_k", WIDTH, kv),
            ("attn_v", WIDTH, kv),
            ("attn_output", q, WIDTH),
            ("ffn_gate", WIDTH, FFN),
            ("ffn_up", WIDTH, FFN),
            ("ffn_down", FFN, WIDTH),
        ] {
            file = file.f32_tensor(&format!("blk.{l}.{name}.weight"), &[columns, rows], &matrix(columns, rows));
        }
    }
    file
}
