"""llama.cpp as a peer, by the bindings of the package llama-cpp-python. See talk.py for the options.

A job is a sequence; a step decodes a token of each, or first all prompts, and takes the largest logits.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import _ggml

from benchmarks.peers.talk import Prompt, serve

UBATCH = 512


class LlamaCpp:
    """model: a GGUF file."""

    def __init__(self, model: str, threads: int, rows: int, max_len: int) -> None:
        _ggml.libggml.ggml_backend_load_all()  # builds whose CPU code is in files of their own
        model_params = llama_cpp.llama_model_default_params()
        loaded = llama_cpp.llama_model_load_from_file(model.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = rows * max_len, rows * max_len, UBATCH, rows
        params.n_outputs_max = rows
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(loaded, params)
        assert self._context, "llama.cpp made no context"
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
        self._free = list(range(rows))[::-1]
        self._new: dict[int, Prompt] = {}
        self._seat: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._place: dict[int, int] = {}
        self._left: dict[int, int] = {}

    def add(self, job: int, prompt: Prompt, output_len: int) -> None:
        self._seat[job] = self._free.pop()
        self._new[job], self._left[job], self._place[job] = prompt, output_len, 0

    def step(self) -> dict[int, int]:
        given = self._new or {job: [self._last[job]] for job in self._left}
        self._new = {}
        logits = self._decode(given)
        for job, row in logits.items():
            self._last[job] = int(row.argmax())
            self._left[job] -= 1
            if not self._left[job]:
                self._end(job)
        return dict.fromkeys(given, 1)

    def _decode(self, given: dict[int, Sequence[int]]) -> dict[int, Any]:
        count = sum(map(len, given.values()))
        batch, at, ends = llama_cpp.llama_batch_init(count, 0, 1), 0, {}
        for job, tokens in given.items():
            for token in tokens:
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, self._place[job], 1
                batch.seq_id[at][0], batch.logits[at] = self._seat[job], 0
                self._place[job] += 1
                at += 1
            ends[job] = at - 1
            batch.logits[at - 1] = 1
        batch.n_tokens = count
        code = llama_cpp.llama_decode(self._context, batch)
        assert code == 0, f"llama_decode returned {code}"
        found = {job: self._logits(place) for job, place in ends.items()}
        llama_cpp.llama_batch_free(batch)
        return found

    def _logits(self, place: int) -> Any:
        numbers = llama_cpp.llama_get_logits_ith(self._context, place)
        return np.ctypeslib.as_array(ctypes.cast(numbers, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))

    def _end(self, job: int) -> None:
        seat = self._seat.pop(job)
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), seat, -1, -1)
        self._free.append(seat)
        del self._left[job], self._place[job]


if __name__ == "__main__":
    serve(lambda options: LlamaCpp(**options))
