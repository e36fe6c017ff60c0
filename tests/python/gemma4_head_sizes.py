"""Gemma 4 at its real head sizes (256 and 512) against llama.cpp: made-up models, small but for the heads. An optional check.

    pip install llama-cpp-python==0.3.36 gguf==0.19.0
    cargo build --release -p opencoti-model --example logits
    gemma4_head_sizes.py target/release/examples/logits

Weights are random f32, so that llama.cpp does not round activations; its KV cache is f32 and flash attention off. 512 random tokens
reach beyond the window of 128. Prints mean, median and 99th percentile of KL(llama.cpp || ours) in nats. In the model with experts
llama.cpp's f16 table of GELU now and then tips the choice of an expert.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import gguf
import llama_cpp
import numpy as np
from llama_cpp import Llama

from compare_llama_cpp import N, divergence

VOCAB, WIDTH, WINDOW, HEAD, HEAD_SWA, LAYER_INPUT = 2048, 512, 128, 512, 256, 256
EXPERTS, USED, EXPERT_WIDTH = 32, 8, 192


class Made:
    """A file in the making."""

    def __init__(self, path):
        self.out = gguf.GGUFWriter(path, "gemma4")
        self.rng = np.random.default_rng(5)

    def matrix(self, name, cols, *rows):
        values = self.rng.normal(0, 1 / np.sqrt(cols), size=(*rows, cols))
        self.out.add_tensor(f"{name}.weight", values.astype(np.float32))

    def vector(self, name, n, low=0.85, high=1.15):
        self.out.add_tensor(name, self.rng.uniform(low, high, n).astype(np.float32))


def make(path, sliding, owners, heads, kv_heads, experts):
    """`kv_heads` of window and of global layers; those behind the first `owners` layers read the keys and values of others."""
    made, layers = Made(path), len(sliding)
    out, inputs = made.out, 0 if experts else LAYER_INPUT
    widths = [768 if l < owners else 1536 for l in range(layers)]
    kv = [kv_heads[0] if s else kv_heads[1] for s in sliding]
    out.add_vocab_size(VOCAB)
    out.add_tokenizer_model("none")
    out.add_context_length(4096)
    out.add_embedding_length(WIDTH)
    out.add_block_count(layers)
    out.add_feed_forward_length(widths)
    out.add_head_count(heads)
    out.add_head_count_kv(kv)
    out.add_key_length(HEAD)
    out.add_value_length(HEAD)
    out.add_key_length_swa(HEAD_SWA)
    out.add_value_length_swa(HEAD_SWA)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_sliding_window(WINDOW)
    out.add_sliding_window_pattern(sliding)
    out.add_shared_kv_layers(layers - owners)
    out.add_embedding_length_per_layer_input(inputs)
    out.add_rope_dimension_count(HEAD)
    out.add_rope_dimension_count_swa(HEAD_SWA)
    out.add_rope_freq_base(1e6)
    out.add_rope_freq_base_swa(1e4)
    out.add_final_logit_softcapping(30.0)
    if experts:
        out.add_expert_count(EXPERTS)
        out.add_expert_used_count(USED)
        out.add_expert_feed_forward_length(EXPERT_WIDTH)
    made.matrix("token_embd", WIDTH, VOCAB)
    made.vector("output_norm.weight", WIDTH)
    out.add_tensor("rope_freqs.weight", np.array([1.0] * (HEAD // 8) + [1e30] * (HEAD * 3 // 8), dtype=np.float32))
    if inputs:
        made.matrix("per_layer_token_embd", inputs * layers, VOCAB)
        made.matrix("per_layer_model_proj", WIDTH, inputs * layers)
        made.vector("per_layer_proj_norm.weight", inputs)
    for l in range(layers):
        block(made, f"blk.{l}.", HEAD_SWA if sliding[l] else HEAD, heads, kv[l] if l < owners else 0, widths[l], inputs, experts)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def block(made, name, head, heads, kv_heads, width, inputs, experts):
    norms = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
    norms += ["post_norm"] if inputs else []
    norms += ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"] if experts else []
    for norm in norms:
        made.vector(f"{name}{norm}.weight", WIDTH)
    made.matrix(f"{name}attn_q", WIDTH, heads * head)
    made.matrix(f"{name}attn_output", heads * head, WIDTH)
    # Scores are not scaled: larger norms would make attention pick a single key.
    made.vector(f"{name}attn_q_norm.weight", head, 0.2, 0.4)
    if kv_heads:
        made.matrix(f"{name}attn_k", WIDTH, kv_heads * head)
        made.vector(f"{name}attn_k_norm.weight", head, 0.2, 0.4)
    if kv_heads and not (experts and head == HEAD):
        made.matrix(f"{name}attn_v", WIDTH, kv_heads * head)
    made.matrix(f"{name}ffn_gate", WIDTH, width)
    made.matrix(f"{name}ffn_up", WIDTH, width)
    made.matrix(f"{name}ffn_down", width, WIDTH)
    if inputs:
        made.matrix(f"{name}inp_gate", WIDTH, inputs)
        made.matrix(f"{name}proj", inputs, WIDTH)
    if experts:
        made.matrix(f"{name}ffn_gate_inp", WIDTH, EXPERTS)
        made.vector(f"{name}ffn_gate_inp.scale", WIDTH, 4, 6)
        made.matrix(f"{name}ffn_gate_up_exps", WIDTH, EXPERTS, 2 * EXPERT_WIDTH)
        made.matrix(f"{name}ffn_down_exps", EXPERT_WIDTH, EXPERTS, WIDTH)
        made.vector(f"{name}ffn_down_exps.scale", EXPERTS)
    made.vector(f"{name}layer_output_scale.weight", 1)


def main():
    binary = sys.argv[1]
    models = {
        "elastic": dict(sliding=([True] * 4 + [False]) * 2, owners=5, heads=8, kv_heads=(1, 1), experts=False),
        "experts": dict(sliding=[True] * 5 + [False], owners=6, heads=16, kv_heads=(8, 2), experts=True),
    }
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, VOCAB, N)]
    for name, shape in models.items():
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            path, ids, logits = folder / "model.gguf", folder / "tokens.json", folder / "logits.f32"
            make(path, **shape)
            ids.write_text(json.dumps(tokens))
            llama = Llama(str(path), n_ctx=N, n_batch=N, logits_all=True, flash_attn=False, verbose=False, swa_full=True,
                          type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32)
            llama.eval(tokens)
            theirs = np.array(llama.scores[:N], dtype=np.float32)
            subprocess.run([binary, path, ids, logits], check=True)
            ours = np.fromfile(logits, dtype=np.float32).reshape(N, -1)
        kld = np.array([divergence(t, o) for t, o in zip(theirs, ours)])
        agree = (ours.argmax(axis=1) == theirs.argmax(axis=1)).mean()
        print(f"{name}: mean {kld.mean():.3e}  median {np.median(kld):.3e}  99% {np.quantile(kld, 0.99):.3e}  "
              f"max {kld.max():.3e}  same top token {agree:.4f}")


if __name__ == "__main__":
    main()
