"""LongRoPE has one set of factors within the trained context and one beyond, chosen by the served context."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem import LLM
from tandem.parallel.context import ParallelContext
from tandem.workers.models.decoder import build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.service import DEMO
from tests.support.tiny_models import load_peer

TRAINED = 16


@pytest.mark.parametrize(("max_model_len", "length"), [(TRAINED, TRAINED), (TRAINED + 1, 30)])
def test_the_served_context_chooses_the_factors(
    max_model_len: int, length: int, tiny_folder: Callable[[str], Path]
) -> None:
    folder = tiny_folder("phi3-longrope")
    spec = load_spec(folder).for_context(max_model_len)
    decoder = build_decoder(spec, ParallelContext.single(), folder=folder, dtype=torch.float32, platform=CpuPlatform())
    ids = prompt_ids(length, spec.vocab_size)
    ours = PagedRows(decoder, 1, length).step([(0, ids)], all_logits=True)
    with torch.inference_mode():
        theirs = load_peer(folder)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("max_model_len", [TRAINED, TRAINED + 1])
def test_an_offline_engine_warns_of_texts_that_differ(
    max_model_len: int, tiny_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    sizes: dict[str, Any] = {"max_model_len": max_model_len, "max_num_seqs": 2, "num_gpu_blocks_override": 8}
    with LLM(tiny_folder("phi3-longrope"), tokenizer=str(DEMO), dtype="float32", device="cpu", **sizes):
        warned = [text for record in caplog.records if (text := record.getMessage()).startswith("longrope: ")]
    assert len(warned) == (max_model_len > TRAINED)
    assert not warned or "differ from transformers'" in warned[0]
