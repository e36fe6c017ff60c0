#!/usr/bin/env python3
"""llama.cpp under the requests of `opencoti bench --interactive` (docs/bench.md): `peer.py MODEL THREADS`.

Through its own C interface, with flash attention, memory-mapped weights and steps of 512 tokens, as its own bench runs it. Sequences
of their own get streams of their own, a shared prefix a unified cache: what suits it better in either case. Needs an interpreter with
`llama-cpp-python`; `cargo xtask bench-peer` builds one.
"""

import ctypes
import json
import resource
import sys
import time

import llama_cpp as lib

STEP = 512
TYPES = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0, "q5_0": lib.GGML_TYPE_Q5_0, "q4_0": lib.GGML_TYPE_Q4_0}


def tokens(n):
    """The tokens that opencoti's bench takes."""
    return [4 + i * 37 % 199 for i in range(n)]


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Context:
    """A context for some sequences, and how many tokens the first of them hold."""

    def __init__(self, model, threads, kv, cells, sequences, unified):
        self.key = (kv, unified)
        self.room = (cells, sequences)
        params = lib.llama_context_default_params()
        params.n_ctx = (cells if unified else cells * sequences) + 256
        params.n_batch = params.n_ubatch = STEP
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = unified
        k, _, v = kv.partition(":")
        if k not in TYPES or (v or k) not in TYPES:
            raise ValueError(f"`kv` is `{kv}`, expected two of {list(TYPES)}")
        params.type_k, params.type_v = TYPES[k], TYPES[v or k]
        self.context = lib.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp refuses a context with a cache in {kv}")
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(STEP, 0, 1)
        self.filled = [0] * sequences

    def close(self):
        lib.llama_batch_free(self.batch)
        lib.llama_free(self.context)

    def step(self, rows):
        """Runs rows of (token, position, sequence, whether its logits are wanted); returns the seconds."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, logits) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        start = time.perf_counter()
        if lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama.cpp can't run a step of {len(rows)} rows")
        lib.llama_synchronize(self.context)
        return time.perf_counter() - start

    def prompt(self, ids, sequence, first, with_logits):
        """Seconds of each step of a prompt."""
        seconds = []
        for at in range(0, len(ids), STEP):
            part = ids[at:at + STEP]
            last = at + len(part) == len(ids)
            rows = [(t, first + at + i, sequence, with_logits and last and i + 1 == len(part)) for i, t in enumerate(part)]
            seconds.append(self.step(rows))
        return seconds

    def prepare(self, depth, sequences, shared):
        """Brings every sequence to `depth` tokens."""
        for s in range(1 if shared else sequences):
            if self.filled[s] > depth:
                self.cut(s, 0)
            if self.filled[s] < depth:
                self.prompt(tokens(depth - self.filled[s]), s, self.filled[s], False)
                self.filled[s] = depth
        if shared:
            for s in range(1, sequences):
                if self.filled[s] != depth:
                    self.cut(s, 0)
                    lib.llama_memory_seq_cp(self.memory, 0, s, -1, -1)
                    self.filled[s] = depth

    def cut(self, sequence, length):
        lib.llama_memory_seq_rm(self.memory, sequence, length, -1)
        self.filled[sequence] = min(self.filled[sequence], length)


def sample(context, test, n, depth, sequences):
    """Seconds of each step; the sequences are as before then."""
    if test == "prefill":
        seconds = context.prompt(tokens(n), 0, depth, True)
    else:
        seconds = [context.step([(t, depth + i, s, True) for s in range(sequences)]) for i, t in enumerate(tokens(n))]
    for s in range(sequences):
        lib.llama_memory_seq_rm(context.memory, s, depth, -1)
    return seconds


def answer(state, model, threads, request):
    test, n = request.get("test", "decode"), request.get("tokens", 64)
    depth, sequences = request.get("depth", 0), request.get("sequences", 1)
    kv, shared = request.get("kv", "f16"), test == "shared"
    if test not in ("prefill", "decode", "batch", "shared"):
        raise ValueError(f"`test` is `{test}`, which llama.cpp is not asked for")
    cells = depth + n * (sequences if shared else 1)
    context = state.get("context")
    if context and (context.key != (kv, shared) or context.room[0] < cells or context.room[1] != sequences):
        state.pop("context").close()
        context = None
    if not context:
        context = state["context"] = Context(model, threads, kv, cells, sequences, shared)
    context.prepare(depth, sequences, shared)
    seconds = sample(context, test, n, depth, sequences)
    return {"tokens": n * (1 if test == "prefill" else sequences), "seconds": sum(seconds), "longest_step": max(seconds),
            "peak_bytes": peak_bytes()}


def main():
    path, threads = sys.argv[1], int(sys.argv[2])
    # Kept alive as long as the library may call it.
    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    lib.llama_backend_init()
    base = peak_bytes()
    start = time.perf_counter()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp can't load {path}")
    ready = {"ready": True, "load_seconds": time.perf_counter() - start, "base_bytes": base}
    print(json.dumps(ready), flush=True)
    state = {}
    for line in sys.stdin:
        try:
            result = answer(state, model, threads, json.loads(line))
        except (RuntimeError, ValueError) as error:
            result = {"error": str(error)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
