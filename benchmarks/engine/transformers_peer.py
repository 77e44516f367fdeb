"""`transformers`, with `peft` for adapters, as the peer of a comparison.

Jobs run one after another, greedy, with its KV cache, in this process and with torch's threads.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.workload import Job


class TransformersPeer:
    """A model in this process, warm. adapters: folders in PEFT's form, which jobs use in turn."""

    def __init__(self, folder: Path, dtype: str, adapters: Sequence[Path] = ()) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._adapters = [f"a{place}" for place in range(len(adapters))]
        if adapters:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, adapters[0], adapter_name=self._adapters[0])
            for name, adapter in zip(self._adapters[1:], adapters[1:], strict=True):
                self.model.load_adapter(str(adapter), adapter_name=name)
        self.tokens_per_s([Job(list(range(2, 18)), 4)])

    def tokens_per_s(self, jobs: Sequence[Job]) -> float:
        """Output tokens per second of `generate` over the jobs; with adapters, switching before each."""
        start = time.perf_counter()
        with torch.inference_mode():
            for place, job in enumerate(jobs):
                if self._adapters:
                    self.model.set_adapter(self._adapters[place % len(self._adapters)])
                ids = torch.tensor([job.prompt])
                out = self.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=job.output_len,
                    min_new_tokens=job.output_len,
                    pad_token_id=0,
                )
                assert out.shape[1] == len(job.prompt) + job.output_len
        return sum(job.output_len for job in jobs) / (time.perf_counter() - start)
