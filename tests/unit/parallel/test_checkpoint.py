"""Slices of a checkpoint: what each rank reads, padding, and errors that name tensor and file."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.configs.errors import SettingsError
from tandem.parallel.checkpoint import DummySource, SafetensorsSource, assemble, load
from tandem.parallel.params import Init, ParameterSlot, ShardSpec, Slice, whole

CPU = torch.device("cpu")
A, B = torch.arange(24.0).view(6, 4), torch.arange(8.0).view(2, 4) + 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": B}, tmp_path / "two.safetensors")
    return tmp_path


def test_slices_are_stacked_and_cast(folder: Path) -> None:
    source = SafetensorsSource(folder, ["a", "b"])
    shard = ShardSpec((Slice("a", (6, 4), 0, 2, 3), Slice("b", (2, 4), 0, 1, 1)))
    got = assemble(shard, source, torch.bfloat16, CPU)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got.float(), torch.cat((A[2:5], B[1:])))


def test_columns_and_padding(folder: Path) -> None:
    source = SafetensorsSource(folder, ["a", "b"])
    columns = assemble(ShardSpec((Slice("a", (6, 4), 1, 2, 2),)), source, torch.float32, CPU)
    assert torch.equal(columns, A[:, 2:])
    padded = assemble(ShardSpec((Slice("a", (6, 4), 0, 4, 4),)), source, torch.float32, CPU)
    assert torch.equal(padded, torch.cat((A[4:], torch.zeros(2, 4))))
    beyond = assemble(ShardSpec((Slice("a", (6, 4), 0, 8, 4),)), source, torch.float32, CPU)
    assert torch.equal(beyond, torch.zeros(4, 4))


def test_load_hands_out_tensors_of_their_own(folder: Path) -> None:
    """Nothing stays mapped: overwriting the file later cannot change or crash a running model."""
    taken: list[torch.Tensor] = []
    slots = [ParameterSlot(whole("b", 2, 4), taken.append)]
    assert load(slots, SafetensorsSource(folder, ["a", "b"]), dtype=torch.float32, device=CPU, progress=False) == 32
    (folder / "two.safetensors").write_bytes(bytes((folder / "two.safetensors").stat().st_size))
    assert torch.equal(taken[0], B)


def test_load_tells_how_far_it_is(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    slots = [ParameterSlot(whole("b", 2, 4), lambda _: None), ParameterSlot(whole("a", 6, 4), lambda _: None)]
    source = SafetensorsSource(folder, ["a", "b"])
    load(slots, source, dtype=torch.bfloat16, device=CPU, progress=False, on_bytes=lambda *said: told.append(said))
    assert told == [(0, 64), (16, 64), (64, 64)]


def test_missing_unexpected_and_misshapen_tensors_are_named(folder: Path) -> None:
    with pytest.raises(SettingsError, match="tensor c is in none"):
        SafetensorsSource(folder, ["a", "b", "c"])
    with pytest.raises(SettingsError, match=r"two\.safetensors: tensor b does not belong"):
        SafetensorsSource(folder, ["a"])
    SafetensorsSource(folder, ["a"], ignored_suffixes=("b",))
    source = SafetensorsSource(folder, ["a", "b"])
    with pytest.raises(SettingsError, match=r"one\.safetensors: tensor a has shape \[6, 4\].* \[4, 6\]"):
        source.read(Slice("a", (4, 6)), Init.NORMAL)


def test_damaged_folders(folder: Path, tmp_path: Path) -> None:
    (folder / "one.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(SettingsError, match=r"cannot read .*one\.safetensors"):
        SafetensorsSource(folder, ["a", "b"])
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(SettingsError, match="index"):
        SafetensorsSource(folder, ["a", "b"])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "gone.safetensors"}}))
    with pytest.raises(SettingsError, match=r"gone\.safetensors"):
        SafetensorsSource(folder, ["b"]).read(Slice("b", (2, 4)), Init.NORMAL)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SettingsError, match=r"no \.safetensors file"):
        SafetensorsSource(empty, [])


def test_dummy_slices_belong_to_one_tensor() -> None:
    """Every rank cuts its share from the same random tensor, whatever the degree."""
    source = DummySource(3, torch.float32)
    full = source.read(Slice("w", (8, 6)), Init.NORMAL)
    halves = [source.read(Slice("w", (8, 6), 1, start, 3), Init.NORMAL) for start in (0, 3)]
    assert torch.equal(torch.cat(halves, dim=1), full)
    assert not torch.equal(full, source.read(Slice("v", (8, 6)), Init.NORMAL))
    assert not torch.equal(full, DummySource(4, torch.float32).read(Slice("w", (8, 6)), Init.NORMAL))
    assert torch.equal(source.read(Slice("n", (5,)), Init.ONES), torch.ones(5))


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_a_bar_of_bytes_and_nothing_where_it_is_not_wanted(
    folder: Path, progress: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """All bytes of this rank's slots, in the dtype that they get."""
    slots = [ParameterSlot(whole(name, *tensor.shape), lambda _: None) for name, tensor in (("a", A), ("b", B))] * 50
    load(slots, SafetensorsSource(folder, ["a", "b"]), dtype=torch.bfloat16, device=CPU, progress=progress)
    drawn = capsys.readouterr().err.rstrip().rsplit("\r", 1)[-1]
    assert bool(re.fullmatch(r"loading weights: 100%\|\S+\| 3\.20k/3\.20k \[.*B/s\]", drawn)) == progress, drawn
    assert progress or not drawn
