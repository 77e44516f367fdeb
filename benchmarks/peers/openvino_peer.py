"""OpenVINO GenAI's continuous batching as a peer, by the package openvino-genai. See talk.py for the options."""

from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.talk import Prompt, serve

CACHE_GB = 2


class OpenVino:
    """model: a folder with the model in OpenVINO's form."""

    def __init__(self, model: str, threads: int, rows: int, max_len: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = rows, rows * max_len
        scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GB, False
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._handles: dict[int, Any] = {}
        self._left: dict[int, int] = {}

    def add(self, job: int, prompt: Prompt, output_len: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_len, True, False
        ids = openvino.Tensor(np.array([prompt], np.int64))
        self._handles[job] = self._pipeline.add_request(job, ids, config)
        self._left[job] = output_len

    def step(self) -> dict[int, int]:
        self._pipeline.step()
        got = {}
        for job, handle in list(self._handles.items()):
            if handle.can_read():
                got[job] = sum(len(output.generated_ids) for output in handle.read().values())
                self._left[job] -= got[job]
            if not self._left[job]:
                del self._handles[job]
        return got


if __name__ == "__main__":
    serve(lambda options: OpenVino(**options))
