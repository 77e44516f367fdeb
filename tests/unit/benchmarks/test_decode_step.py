"""The benchmark of decode steps: its switch between KV caches stands where a decoder expects an attention backend."""

import torch

from benchmarks.engine.decode_step import Switch
from tandem.workers.attention.backend import AttentionBackend
from tandem.workers.platforms.cpu import CpuPlatform


def test_the_switch_has_all_that_a_decoder_asks_of_an_attention_backend() -> None:
    dtypes = (torch.float32, torch.int8)
    switch = Switch({kv: CpuPlatform().attention(torch.float32, 16, kv) for kv in dtypes})
    wanted = {*AttentionBackend.__annotations__, *(n for n in vars(AttentionBackend) if not n.startswith("_"))}
    assert wanted and not [name for name in wanted if not hasattr(switch, name)]
    assert switch.kv_dtype is torch.float32
