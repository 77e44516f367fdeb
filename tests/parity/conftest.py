"""Tiny checkpoints, made once per test run, and decoders over them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.workers.attention.backend import AttentionBackend
from tandem.workers.models.decoder import Decoder, attention_of, build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.tiny_models import made_once

CPU = torch.device("cpu")
MakeDecoder = Callable[..., Decoder]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from a second thread, and on a busy machine its barriers cost a time slice each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a tiny model to its folder."""
    return made_once(tmp_path_factory.mktemp("tiny-models"))


@pytest.fixture(scope="session")
def make_decoder() -> MakeDecoder:
    """A single-rank decoder of a folder."""

    def make(folder: Path, dtype: torch.dtype = torch.float32, attention: AttentionBackend | None = None) -> Decoder:
        spec = load_spec(folder)
        return build_decoder(
            spec,
            ParallelContext.single(),
            folder=folder,
            dtype=dtype,
            platform=CpuPlatform(),
            attention=attention or attention_of(spec, CpuPlatform(), dtype),
        )

    return make
