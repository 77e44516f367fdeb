"""What `tandem plan` predicts of adapters' memory, against what ranks allocate and hold: every cut, and
tables."""

from pathlib import Path

import pytest
import torch

from tandem.configs.errors import SettingsError
from tandem.configs.schema import LoraSettings
from tandem.parallel.context import ParallelContext
from tandem.parallel.mesh import Mesh
from tandem.workers.lora.device.host_copy import make_shard
from tandem.workers.lora.device.rank_adapters import RankAdapters, open_adapters
from tandem.workers.lora.peft.peft_folder import read_adapter
from tandem.workers.models.decoder import attention_of, build_decoder
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.adapter_room import AdapterRoom, adapter_room
from tandem.workers.platforms.cpu import CpuPlatform, HostAccelerator
from tests.support.adapters import ALL_LINEARS, save_random_adapter
from tests.support.tiny_models import BY_NAME, TinyModel, save_tiny_model

CPU = torch.device("cpu")
CUTS = [(1, 1), (2, 1), (1, 2), (1, 4), (2, 2)]
RANK = 8
LORA = LoraSettings(enable_lora=True, max_loras=3, max_lora_rank=RANK, max_cpu_loras=5)
UNEVEN = TinyModel("three-layers", "llama", {"num_hidden_layers": 3})
MANY_WORDS = TinyModel("many-words", "llama", {"vocab_size": 2011, "tie_word_embeddings": True})
"""A table of more words than a page holds."""


def opened(
    folder: Path, spec: ArchSpec, mesh: Mesh, lora: LoraSettings = LORA, dtype: torch.dtype = torch.float32
) -> RankAdapters:
    """As the rank at `mesh` opens them."""
    attention = attention_of(spec, CpuPlatform(), dtype)
    decoder = build_decoder(
        spec, ParallelContext(mesh), folder=folder, dtype=dtype, platform=CpuPlatform(), attention=attention
    )
    return open_adapters(lora, spec, folder, decoder, CpuPlatform(), dtype, available_bytes=None, pp_size=mesh.pp_size)


@pytest.mark.parametrize("model", [BY_NAME["llama-mqa-biased"], BY_NAME["qwen3"], MANY_WORDS], ids=lambda m: m.name)
def test_every_rank_has_the_predicted_memory(model: TinyModel, tmp_path: Path) -> None:
    folder = save_tiny_model(model, tmp_path)
    spec = load_spec(folder)
    for tp_size, pp_size in CUTS:
        for rank in range(tp_size * pp_size):
            mesh = Mesh(tp_size, pp_size, rank)
            found, room = opened(folder, spec, mesh), adapter_room(LORA, spec, mesh, 4)
            assert (room.num_pages, room.page_bytes) == (found.num_pages, found.slab.page_bytes), mesh
            copy_pages = min(found.slab.shape.most_pages, found.num_pages)
            assert room.copy_bytes == copy_pages * found.slab.page_bytes, mesh
            assert room.host_bytes == 5 * room.copy_bytes


def test_stages_of_unequal_depth_have_equal_pages(tmp_path: Path) -> None:
    folder = save_tiny_model(UNEVEN, tmp_path)
    spec = load_spec(folder)
    rooms = [adapter_room(LORA, spec, Mesh(1, 2, rank), 2) for rank in range(2)]
    for rank, room in enumerate(rooms):
        assert room.num_pages == opened(folder, spec, Mesh(1, 2, rank), dtype=torch.bfloat16).num_pages
    assert rooms[0].num_pages == rooms[1].num_pages and rooms[0].copy_bytes != rooms[1].copy_bytes


@pytest.mark.parametrize("model", [BY_NAME["llama-gqa"], MANY_WORDS], ids=lambda m: m.name)
def test_the_largest_adapter_fits_the_predicted_memory(model: TinyModel, tmp_path: Path) -> None:
    folder = save_tiny_model(model, tmp_path)
    spec = load_spec(folder)
    modules = (*ALL_LINEARS, "embed_tokens", "lm_head")
    adapter = read_adapter(save_random_adapter(folder, tmp_path / "a", rank=RANK, modules=modules), spec, RANK)
    found = opened(folder, spec, Mesh())
    copy = make_shard(adapter, found.slab.shape, torch.float32, HostAccelerator())
    assert copy.pages_NE.nbytes == adapter_room(LORA, spec, Mesh(), 4).copy_bytes


def test_memory_that_was_asked_for_is_cut_in_pages(tmp_path: Path) -> None:
    folder = save_tiny_model(BY_NAME["llama-gqa"], tmp_path)
    spec = load_spec(folder)
    page = adapter_room(LORA, spec, Mesh(), 4).page_bytes
    asked = LoraSettings(enable_lora=True, max_lora_rank=RANK, memory_bytes=7 * page + 1)
    room = adapter_room(asked, spec, Mesh(), 4)
    assert room.num_pages == 7 == opened(folder, spec, Mesh(), asked).num_pages
    assert room.copy_bytes == room.device_bytes == 7 * page, "what is larger than the device's room is not served"
    with pytest.raises(SettingsError, match=f"is less than one page of {page} bytes") as refused:
        adapter_room(LoraSettings(enable_lora=True, memory_bytes=page - 1), spec, Mesh(), 4)
    assert refused.value.flag == "--lora-memory-bytes"
    assert adapter_room(LoraSettings(), spec, Mesh(), 4) == AdapterRoom()
