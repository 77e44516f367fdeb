"""Slices of a checkpoint: what each rank reads, padding, and errors that name tensor and file."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from tandem.configs.errors import SettingsError
from tandem.parallel.checkpoint import DummySource, ParameterSlot, WeightSource, load
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import WHOLE, Init, Param, Shard
from tandem.parallel.params import Source as Place
from tandem.parallel.stored.safetensors_source import SafetensorsSource
from tandem.parallel.stored.stored_checkpoint import StoredCheckpoint

CPU = torch.device("cpu")
A, B = torch.arange(24.0).view(6, 4), torch.arange(8.0).view(2, 4) + 100


def param(name: str, *shape: int, shard: Shard = WHOLE, init: Init = Init.NORMAL, **source: Any) -> Param:
    names = source.pop("names", (name,))
    return Param(name=name, shape=shape, role="any", source=Place(names, **source), shard=shard, init=init)


A_PARAM, B_PARAM = param("a", 6, 4), param("b", 2, 4)


def one(*params: Param) -> ParameterSlot:
    return ParameterSlot(params, lambda _: None)


def opened(folder: Path, *params: Param) -> SafetensorsSource:
    return SafetensorsSource(StoredCheckpoint(folder, params))


def assemble(
    slot: ParameterSlot, source: WeightSource, dtype: torch.dtype, device: torch.device, mesh: Mesh
) -> torch.Tensor:
    taken: list[torch.Tensor] = []
    load([replace(slot, accept=taken.append)], source, dtype=dtype, device=device, progress=False, mesh=mesh)
    return taken[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": B}, tmp_path / "two.safetensors")
    return tmp_path


@pytest.fixture
def source(folder: Path) -> SafetensorsSource:
    return opened(folder, A_PARAM, B_PARAM)


def test_shares_are_stacked_and_cast(source: SafetensorsSource) -> None:
    slot = one(param("a", 6, 4, shard=Shard("tp")), param("b", 2, 4, shard=Shard("tp")))
    got = assemble(slot, source, torch.bfloat16, CPU, Mesh(2, 1, 1))
    assert got.dtype is torch.bfloat16
    assert torch.equal(got.float(), torch.cat((A[3:], B[1:])))


def test_columns_and_padding(source: SafetensorsSource) -> None:
    columns = assemble(one(param("a", 6, 4, shard=Shard("tp", dim=1))), source, torch.float32, CPU, Mesh(2, 1, 1))
    assert torch.equal(columns, A[:, 2:])
    padded = one(param("a", 6, 4, shard=Shard("tp", pads=True)))
    shares = [assemble(padded, source, torch.float32, CPU, Mesh(4, 1, rank)) for rank in range(4)]
    assert torch.equal(torch.cat(shares), torch.cat((A, torch.zeros(2, 4))))
    assert torch.equal(shares[3], torch.zeros(2, 4))


def test_parts_of_a_stored_tensor(folder: Path) -> None:
    """Fused, interleaved by heads, transposed, and stored with an offset."""
    source = opened(folder, A_PARAM, B_PARAM)

    def read(wanted: Param, mesh: Mesh | None = None) -> torch.Tensor:
        return assemble(one(wanted), source, torch.float32, CPU, mesh or Mesh())

    assert torch.equal(read(param("k", 2, 4, names=("a",), rows=6, start=2)), A[2:4])
    by_heads = param("v", 2, 4, names=("a",), rows=6, start=2, run=1, stride=3, shard=Shard("tp"))
    assert torch.equal(read(by_heads), A[[2, 5]])
    assert torch.equal(read(by_heads, Mesh(2, 1, 1)), A[[5]])
    turned = param("t", 4, 6, names=("a",), transposed=True, shard=Shard("tp"))
    assert torch.equal(read(turned), A.T)
    assert torch.equal(read(turned, Mesh(2, 1, 1)), A.T[2:])
    columns = param("t", 2, 6, names=("a",), rows=4, start=1, transposed=True, shard=Shard("tp", dim=1))
    assert torch.equal(read(columns, Mesh(2, 1, 0)), A.T[1:3, :3])
    assert torch.equal(read(param("n", 2, 4, names=("b",), add=1.0)), B + 1)


def test_a_parameter_may_be_stored_under_several_names(folder: Path) -> None:
    tied = param("head", 2, 4, names=("head", "b"))
    assert torch.equal(assemble(one(tied), opened(folder, A_PARAM, tied), torch.float32, CPU, Mesh()), B)
    with pytest.raises(SettingsError, match="tensor head or table is in none"):
        opened(folder, A_PARAM, B_PARAM, param("head", 2, 4, names=("head", "table")))


def test_load_hands_out_tensors_of_their_own(folder: Path, source: SafetensorsSource) -> None:
    """Nothing stays mapped: overwriting the file later cannot change or crash a running model."""
    taken: list[torch.Tensor] = []
    slots = [ParameterSlot((B_PARAM,), taken.append)]
    assert load(slots, source, dtype=torch.float32, device=CPU, progress=False) == 32
    (folder / "two.safetensors").write_bytes(bytes((folder / "two.safetensors").stat().st_size))
    assert torch.equal(taken[0], B)


def test_load_tells_how_far_it_is(source: SafetensorsSource) -> None:
    told: list[tuple[int, int]] = []
    slots = [one(B_PARAM), one(A_PARAM)]
    load(slots, source, dtype=torch.bfloat16, device=CPU, progress=False, on_bytes=lambda *said: told.append(said))
    assert told == [(0, 64), (16, 64), (64, 64)]


def test_missing_unexpected_and_misshapen_tensors_are_named(folder: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"tensor c is in none of its safetensors files; if a file is missing, fetch"
    ):
        opened(folder, A_PARAM, B_PARAM, param("c", 1))
    with pytest.raises(SettingsError, match=r"two\.safetensors: tensor b does not belong"):
        opened(folder, A_PARAM)
    StoredCheckpoint(folder, [A_PARAM], ignored_suffixes=("b",))
    wrong = param("a", 4, 6)
    with pytest.raises(SettingsError, match=r"one\.safetensors: tensor a has shape \[6, 4\].* \[4, 6\]"):
        opened(folder, wrong, B_PARAM)


def test_damaged_folders(folder: Path, tmp_path: Path) -> None:
    (folder / "one.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(SettingsError, match=r"one\.safetensors is not a safetensors file"):
        opened(folder, A_PARAM, B_PARAM)
    for size in (0, 5, 30):
        (folder / "one.safetensors").write_bytes(save({"a": A})[:size])
        with pytest.raises(
            SettingsError, match=rf"one\.safetensors is cut off: it has {size} bytes.*; fetch the model's"
        ):
            opened(folder, A_PARAM, B_PARAM)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(SettingsError, match="index"):
        opened(folder, A_PARAM, B_PARAM)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "gone.safetensors"}}))
    with pytest.raises(SettingsError, match=r"gone\.safetensors: No such file or directory; fetch the"):
        opened(folder, B_PARAM)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SettingsError, match=r"no \.safetensors file"):
        opened(empty)


def test_dummy_slices_belong_to_one_tensor() -> None:
    """Every rank cuts its share from the same random tensor, whatever the degree."""
    source, w = DummySource(3, torch.float32), param("w", 8, 6)
    full = source.read(w, 0, 0, 8)
    halves = [source.read(w, 1, start, 3) for start in (0, 3)]
    assert torch.equal(torch.cat(halves, dim=1), full)
    assert not torch.equal(full, source.read(param("v", 8, 6), 0, 0, 8))
    assert not torch.equal(full, DummySource(4, torch.float32).read(w, 0, 0, 8))
    assert torch.equal(source.read(param("n", 5, init=Init.ONES), 0, 0, 5), torch.ones(5))


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_a_bar_of_bytes_and_nothing_where_it_is_not_wanted(
    folder: Path, progress: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """All bytes of this rank's slots, in the dtype that they get."""
    slots = [one(A_PARAM), one(B_PARAM)] * 50
    load(slots, opened(folder, A_PARAM, B_PARAM), dtype=torch.bfloat16, device=CPU, progress=progress)
    drawn = capsys.readouterr().err.rstrip().rsplit("\r", 1)[-1]
    assert bool(re.fullmatch(r"loading weights: 100%\|\S+\| 3\.20k/3\.20k \[.*B/s\]", drawn)) == progress, drawn
    assert progress or not drawn


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.int8, "I8"), (torch.int32, "I32"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64")],
)
def test_weights_of_other_types_are_refused_by_name(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    """Integers without their scales are other numbers."""
    save_file({"a": A.to(dtype)}, tmp_path / "one.safetensors")
    with pytest.raises(SettingsError, match=f"one.safetensors: tensor a is stored as {name}"):
        opened(tmp_path, A_PARAM)
