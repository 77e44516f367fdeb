"""The arithmetic of bytes against loaded ranks: weights, KV blocks, layers that stream; every family and degree."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.offload.weights.layer_placement import spread
from tandem.parallel import checkpoint
from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.mesh import Mesh
from tandem.workers.models.decoder import Decoder, attention_of, build_decoder
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec, spec_from_config
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.planning.sizes import activation_bytes, adapter_bytes, kv_token_bytes, rank_weights
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank.kv_cache import block_bytes
from tests.support.tiny_models import BY_NAME, save_tiny_model, some_in_parity

CPU = torch.device("cpu")
CUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]
IN_TEST = ("phi3", "olmo2", "cohere", "opt-post", "gptj", "qwen2_moe", "granitemoe")
SHALLOW_CUTS = [(1, 1), (2, 2)]
BLOCK_SIZE = 16
KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def packs(dtype: torch.dtype) -> bool:
    return CpuPlatform().packs(dtype)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def rank_of(
    spec: ArchSpec,
    folder: Path,
    mesh: Mesh,
    dtype: torch.dtype,
    streamed: tuple[int, ...] = (),
) -> Decoder:
    """The decoder of one rank, loaded without the others."""
    context = ParallelContext(mesh)
    attention = attention_of(spec, CpuPlatform(), dtype)
    return build_decoder(
        spec,
        context,
        folder=folder,
        dtype=dtype,
        platform=CpuPlatform(),
        attention=attention,
        streamed=streamed,
    )


@pytest.mark.parametrize("name", some_in_parity(sorted(BY_NAME), IN_TEST))
def test_bytes_of_every_rank_are_predicted(root: Path, name: str) -> None:
    folder = save_tiny_model(BY_NAME[name], root)
    spec = load_spec(folder)
    dtype = torch.float32
    for tp, pp in CUTS if spec.num_layers == 4 else SHALLOW_CUTS:
        if any(layer.attention.num_heads % tp for layer in spec.layers):
            continue
        for rank in range(tp * pp):
            mesh = Mesh(tp, pp, rank)
            decoder = rank_of(spec, folder, mesh, dtype)
            assert rank_weights(spec, mesh, 4, packs(dtype)).total_bytes == decoder.weight_bytes, (
                tp,
                pp,
                rank,
            )
            for kind, stored in KV_DTYPES.items():
                wanted = block_bytes(decoder.kv_layouts, BLOCK_SIZE, stored)
                assert BLOCK_SIZE * kv_token_bytes(spec, mesh, kind) == wanted, kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bytes_in_half_precision(root: Path, dtype: torch.dtype) -> None:
    folder = save_tiny_model(BY_NAME["qwen2"], root)
    spec = load_spec(folder)
    decoder = rank_of(spec, folder, Mesh(), dtype)
    assert rank_weights(spec, Mesh(), 2, packs(dtype)).total_bytes == decoder.weight_bytes


@pytest.mark.parametrize("name", ["qwen3", "llama-mqa-biased", "mixtral", "qwen2_moe", "gpt2", "gemma2"])
def test_bytes_of_quantized_weights_are_predicted(root: Path, name: str) -> None:
    """Router, the gate of a shared expert, norms and the table that ids are looked up in stay dense; streamed bytes are
    those of the integers."""
    folder = save_tiny_model(BY_NAME[name], root)
    spec, dense = load_spec(folder, quantization="int8"), load_spec(folder)
    for tp, pp, dtype in [(1, 1, torch.bfloat16), (2, 1, torch.bfloat16), (1, 2, torch.float32), (2, 2, torch.float16)]:
        for rank in range(tp * pp):
            mesh = Mesh(tp, pp, rank)
            weights = rank_weights(spec, mesh, dtype.itemsize, packs(dtype))
            decoder = rank_of(spec, folder, mesh, dtype, (0,))
            assert weights.total_bytes == decoder.weight_bytes, mesh
            assert weights.total_bytes < rank_weights(dense, mesh, dtype.itemsize, packs(dtype)).total_bytes
            assert 1 <= decoder.stream.host_bytes / weights.layer_bytes < 1.8, mesh  # whole blocks of 64 outputs
            decoder.close()


@pytest.mark.parametrize("name", ["qwen3", "llama-mqa-biased"])
def test_bytes_that_stream_are_predicted(root: Path, name: str) -> None:
    folder = save_tiny_model(BY_NAME[name], root)
    spec = load_spec(folder)
    for tp, pp in [(1, 1), (2, 1), (1, 2)]:
        mesh = Mesh(tp, pp, tp * pp - 1)
        weights = rank_weights(spec, mesh, 4, True)
        count = weights.num_layers
        decoder = rank_of(spec, folder, mesh, torch.float32, spread(count, count))
        # packed matrices are padded to whole tiles: nothing where sizes are multiples of 64, some in tiny models
        assert 1 <= decoder.stream.host_bytes / (count * weights.layer_bytes) < 1.25, mesh
        assert 1 <= decoder.stream.buffer_bytes / (min(2, count) * weights.layer_bytes) < 1.25, mesh
        decoder.close()


def test_an_adapter_counts_both_factors_of_every_linear(root: Path) -> None:
    spec = load_spec(save_tiny_model(BY_NAME["llama-gqa"], root))
    whole = sum(16 * sum(param.shape) for param in parameters_of(spec).layers[0].matrices)
    assert adapter_bytes(spec, Mesh(), 16, 2) == spec.num_layers * whole * 2
    cut = [adapter_bytes(spec, Mesh(2, 2, rank), 16, 2) for rank in range(4)]
    assert len(set(cut)) == 1
    assert whole * spec.num_layers * 2 // 4 < cut[0] < whole * spec.num_layers * 2 // 2


def test_a_rank_of_whole_experts_has_rows_for_all_of_a_tokens() -> None:
    """As wide as an expert is, where ranks that share experts have a part of each."""
    hidden, width, top_k = 64, 128, 2
    spec = spec_from_config(
        {
            "architectures": ["MixtralForCausalLM"],
            "vocab_size": 100,
            "num_hidden_layers": 2,
            "hidden_size": hidden,
            "intermediate_size": width,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        }
    )
    parts, whole = (activation_bytes(spec, Mesh(4, expert_parallel=own), 1, 0, 2) for own in (False, True))
    assert parts == 2 * (3 * hidden + top_k * (width // 4 + hidden))
    assert whole == 2 * (3 * hidden + top_k * 3 * width)


def test_quantizing_holds_one_dense_matrix_at_a_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model(BY_NAME["llama-gqa"], root)
    made: list[weakref.ref[torch.Tensor]] = []
    assemble = checkpoint._assemble

    def noted(slot: ParameterSlot, *rest: Any) -> torch.Tensor:
        assert all(tensor() is None for tensor in made), slot.params[0].name
        tensor = assemble(slot, *rest)
        if slot.as_stored:
            made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(checkpoint, "_assemble", noted)
    rank_of(load_spec(folder, quantization="int8"), folder, Mesh(), torch.float32)
    assert len(made) == 4 * 4 + 1
