"""Tandem's engine, one rank in this process, in the place of a peer. See talk.py for the options."""

from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.engine.engine_run import TimelineSink, cpu_settings, greedy_request, opened_engine
from benchmarks.peers.talk import Prompt, serve
from benchmarks.workload import Job, Timeline
from tandem.configs.schema import CacheSettings

CACHE_BYTES = 2 * 2**30


class Tandem:
    """model: a folder or a GGUF file. quantization: as the flag has it."""

    def __init__(self, model: str, threads: int, rows: int, max_len: int, quantization: str | None = None) -> None:
        cache = CacheSettings(enable_prefix_caching=False, kv_cache_memory_bytes=CACHE_BYTES)
        settings = cpu_settings(Path(model), threads, max_len, rows=rows, cache=cache)
        load_format = "gguf" if model.endswith(".gguf") else "safetensors"
        chosen = msgspec.structs.replace(settings.model, quantization=quantization, load_format=load_format)
        self._sink = TimelineSink()
        self._open = ExitStack()
        settings = msgspec.structs.replace(settings, model=chosen)
        self._engine, _ = self._open.enter_context(opened_engine(settings, self._sink))

    def add(self, job: int, prompt: Prompt, output_len: int) -> None:
        self._sink.timelines[str(job)] = Timeline(0.0)
        self._engine.add_request(greedy_request(str(job), Job(list(prompt), output_len)))

    def step(self) -> dict[int, int]:
        self._engine.turn(1.0)
        got = {int(job): len(tokens) for job, tokens in self._sink.tokens.items()}
        self._sink.tokens.clear()
        return got


if __name__ == "__main__":
    serve(lambda options: Tandem(**options))
