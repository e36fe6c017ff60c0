"""Logits against llama.cpp on 512 tokens of text, teacher-forced. An optional check, not part of the test run.

    pip install llama-cpp-python==0.3.36 gguf==0.19.0
    cargo build --release -p opencoti-model --example logits
    expand_gguf.py MODEL.gguf EXPANDED.gguf
    compare_llama_cpp.py target/release/examples/logits MODEL.gguf EXPANDED.gguf [CODEC]

We read MODEL.gguf; llama.cpp reads EXPANDED.gguf (the same weights in f32) with an f32 KV cache and without flash attention. On the
quantised file llama.cpp rounds activations to eight bits, which alone moves it 2e-3 to 6e-3 nats from its own f32 result, so
that would measure llama.cpp; give MODEL.gguf twice to see it. The text is ARCHITECTURE.md of this repository. Prints mean, median
and 99th percentile of KL(llama.cpp || ours) in nats, and how often the most probable token agrees.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from llama_cpp import Llama
import llama_cpp

N = 512


def divergence(theirs, ours):
    """KL(theirs || ours) of two rows of logits."""
    p, q = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64)) for x in (theirs, ours))
    return (np.exp(p) * (p - q)).sum()


def main():
    binary, model, reference, *codec = sys.argv[1:]
    text = (pathlib.Path(__file__).parents[2] / "ARCHITECTURE.md").read_bytes()
    llama = Llama(reference, n_ctx=N, n_batch=N, logits_all=True, flash_attn=False, verbose=False,
                  type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32)
    tokens = llama.tokenize(text)[:N]
    assert len(tokens) == N, len(tokens)
    llama.eval(tokens)
    theirs = np.array(llama.scores[:N], dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path, out = f"{folder}/tokens.json", f"{folder}/logits.f32"
        with open(path, "w") as file:
            json.dump(tokens, file)
        subprocess.run([binary, model, path, out, *codec], check=True)
        ours = np.fromfile(out, dtype=np.float32).reshape(N, -1)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    kld = np.array([divergence(t, o) for t, o in zip(theirs, ours)])
    agree = (ours.argmax(axis=1) == theirs.argmax(axis=1)).mean()
    print(f"mean {kld.mean():.3e}  median {np.median(kld):.3e}  99% {np.quantile(kld, 0.99):.3e}  "
          f"max {kld.max():.3e}  same top token {agree:.4f}")
    if kld.mean() >= 1e-3:
        sys.exit("the mean divergence is not below 1e-3")


if __name__ == "__main__":
    main()
