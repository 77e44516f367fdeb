"""Steps for Triton's attention kernels, on the device that computes them."""

import dataclasses
import random
from typing import Any

import torch

from tandem.workers.attention.forward_batch import ForwardBatch
from tests.support.attention_check import random_batch
from tests.support.interpreted import DEVICE


def triton_backend() -> Any:
    from tandem.workers.attention.triton_paged import TritonAttention

    return TritonAttention()


def on_device(batch: ForwardBatch) -> ForwardBatch:
    tensors = {
        field.name: value.to(DEVICE)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    return dataclasses.replace(batch, **tensors)


def batch_of(query_lens: list[int], seq_lens: list[int]) -> ForwardBatch:
    return on_device(random_batch(random.Random(0), 16, query_lens, seq_lens))
