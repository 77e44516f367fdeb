"""Slices are read ahead of what is packed: how much, which bytes, and what is said when they cannot be read."""

import os
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file

from tandem.configs.errors import SettingsError
from tandem.parallel.checkpoint import ParameterSlot, copy_share, load
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import WHOLE, Param, Shard, Source
from tandem.parallel.stored import read_ahead
from tandem.parallel.stored.read_ahead import Bounds, ReadAhead
from tandem.parallel.stored.safetensors_source import SafetensorsSource
from tandem.parallel.stored.slices import PAGE_BYTES, Slice, slice_of
from tandem.parallel.stored.stored_checkpoint import StoredCheckpoint

CPU = torch.device("cpu")
ROWS, COLUMNS = 32, 4096
SIZE = ROWS * COLUMNS * 4


def matrix(name: str, shard: Shard = WHOLE, rows: int = ROWS) -> Param:
    return Param(name=name, shape=(rows, COLUMNS), role="any", source=Source((name,)), shard=shard)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight matrices, each filled with its number, and a larger one."""
    folder = tmp_path_factory.mktemp("stored")
    tensors = {f"w{index}": torch.full((ROWS, COLUMNS), float(index)) for index in range(8)}
    save_file({**tensors, "large": torch.ones(8 * ROWS, COLUMNS)}, folder / "model.safetensors")
    return folder


def stored(folder: Path) -> tuple[list[Param], StoredCheckpoint]:
    params = [*(matrix(f"w{index}") for index in range(8)), matrix("large", rows=8 * ROWS)]
    return params, StoredCheckpoint(folder, params)


def groups(folder: Path) -> list[tuple[Slice, ...]]:
    params, checkpoint = stored(folder)
    return [(slice_of(param, checkpoint.tensors_of(param), 0, 0, param.shape[0]),) for param in params]


@pytest.mark.parametrize(
    ("bounds", "most"),
    [
        (Bounds(many=3 * SIZE, pair=0), 8 * SIZE),  # the large one alone
        (Bounds(many=3 * SIZE, pair=9 * SIZE), 9 * SIZE),
        (Bounds(many=9 * SIZE, pair=9 * SIZE), 9 * SIZE),
    ],
)
def test_what_is_held_at_once_is_bounded(folder: Path, bounds: Bounds, most: int) -> None:
    """Whatever the caller does meanwhile; the bound is used, too."""
    ahead = ReadAhead(groups(folder), bounds)
    assert len(list(ahead)) == 9
    assert ahead.most_bytes == most
    only = ReadAhead(groups(folder)[:8], bounds)
    memory = {read.data.data_ptr() for read in only}
    assert only.most_bytes <= bounds.many and len(memory) * SIZE <= bounds.many, "memory is used again"


def test_pages_are_asked_for_of_new_memory_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is used again has its pages."""
    provided: dict[int, int] = {}

    def note(address: int, num_bytes: int) -> None:
        assert address not in provided
        provided[address] = num_bytes

    monkeypatch.setattr(read_ahead, "provide_pages", note)
    memory = {found.data.data_ptr() for found in ReadAhead(groups(folder)[:8], Bounds(many=2 * SIZE, pair=2 * SIZE))}
    assert len(memory) == 2 and provided == dict.fromkeys(memory, SIZE)


def test_the_next_is_read_while_one_is_packed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = threading.Semaphore(0)
    plain = os.preadv

    def counted(*given: object) -> int:
        count: int = plain(*given)  # type: ignore[arg-type]
        read.release()
        return count

    monkeypatch.setattr(os, "preadv", counted)
    params, checkpoint = stored(folder)
    taken: list[torch.Tensor] = []

    def packed(tensor: torch.Tensor) -> None:
        if not taken:
            assert all(read.acquire(timeout=30) for _ in range(3)), "two more, before the first is done with"
        taken.append(tensor.clone())

    slots = [ParameterSlot((param,), packed, keeps=False) for param in params[:8]]
    source = SafetensorsSource(checkpoint, Bounds(many=3 * SIZE))
    load(slots, source, dtype=torch.float32, device=CPU, progress=False)
    assert [tensor.unique().tolist() for tensor in taken] == [[float(index)] for index in range(8)]


def test_what_is_kept_stays_and_groups_may_be_of_several(folder: Path) -> None:
    params, checkpoint = stored(folder)
    taken: list[torch.Tensor] = []
    slots = [ParameterSlot((params[index], params[index + 1]), taken.append) for index in range(0, 8, 2)]
    load(slots, SafetensorsSource(checkpoint, Bounds(0, 0)), dtype=torch.float32, device=CPU, progress=False)
    assert [tensor[[0, -1], 0].tolist() for tensor in taken] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("shard", [Shard("tp"), Shard("tp", dim=1)])
def test_a_rank_reads_only_its_slices(folder: Path, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[tuple[int, int]] = []
    plain = os.preadv

    def noted(descriptor: int, buffers: list[memoryview], start: int) -> int:
        spans.append((start, sum(map(len, buffers))))
        return plain(descriptor, buffers, start)

    monkeypatch.setattr(os, "preadv", noted)
    _, checkpoint = stored(folder)
    param = replace(matrix("w5"), shard=shard)
    taken: list[torch.Tensor] = []
    slot = ParameterSlot((param,), taken.append)
    mesh = Mesh(2, 1, 1)
    load([slot], SafetensorsSource(checkpoint), dtype=torch.float32, device=CPU, progress=False, mesh=mesh)
    assert taken[0].shape == param.local_shape(mesh) and taken[0].unique().tolist() == [5]
    assert sum(length for _, length in spans) == SIZE // 2
    (tensor,) = checkpoint.tensors_of(param)
    first = SIZE // 2 if shard.dim == 0 else COLUMNS * 4 // 2
    assert min(start for start, _ in spans) == tensor.start + first
    assert COLUMNS * 4 // 2 >= PAGE_BYTES, "shorter parts of rows are read with the rest of their page"


def test_a_file_that_ends_too_soon_is_named_with_the_tensor(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w0": torch.ones(ROWS, COLUMNS)}, file)
    param = matrix("w0")
    checkpoint = StoredCheckpoint(tmp_path, [param])
    os.truncate(file, file.stat().st_size - 10)
    slot = ParameterSlot((param,), lambda _: None)
    with pytest.raises(
        SettingsError, match=r"cannot read .*model\.safetensors: tensor w0: the file ends before it does"
    ):
        load([slot], SafetensorsSource(checkpoint), dtype=torch.float32, device=CPU, progress=False)
    with pytest.raises(SettingsError, match=r"model\.safetensors is cut off: it has \d+ bytes, and its tensors end at"):
        StoredCheckpoint(tmp_path, [param])
    header = b'{"w0": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'
    (other := tmp_path / "other").mkdir()
    (other / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(SettingsError, match=r"tensor w0 has 4 bytes, which are not \[2\] of F32"):
        StoredCheckpoint(other, [param])
    file.rename(kept := tmp_path / "kept")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 12\n")
    with pytest.raises(SettingsError, match="not a safetensors file: git has left a pointer in its place; `git lfs"):
        StoredCheckpoint(tmp_path, [param])
    kept.rename(file)
    file.unlink()
    with pytest.raises(SettingsError, match=r"cannot read .*model\.safetensors: tensor w0: No such file"):
        load([slot], SafetensorsSource(checkpoint), dtype=torch.float32, device=CPU, progress=False)


@pytest.mark.parametrize(("name", "scheme"), [("w0.qweight", "GPTQ or AWQ"), ("w0_blocks", "MXFP4")])
def test_tensors_of_quantized_checkpoints_name_their_scheme(tmp_path: Path, name: str, scheme: str) -> None:
    save_file({"w0": torch.ones(ROWS, COLUMNS), name: torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(SettingsError, match=f"tensor {name} does not belong .* quantized with {scheme}, of which"):
        StoredCheckpoint(tmp_path, [matrix("w0")])


def test_the_files_that_are_read(tmp_path: Path) -> None:
    """model.safetensors alone beside others, all parts without an index, none in the publisher's own format."""
    param = matrix("w0")
    save_file({"w0": torch.ones(ROWS, COLUMNS)}, tmp_path / "part-1.safetensors")
    save_file({"layers.0": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert [file.name for file in StoredCheckpoint(tmp_path, [param]).files] == ["part-1.safetensors"]
    (tmp_path / "part-1.safetensors").rename(tmp_path / "model.safetensors")
    save_file({"other": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    assert [file.name for file in StoredCheckpoint(tmp_path, [param]).files] == ["model.safetensors"]


def test_few_buffers_are_asked_for(folder: Path) -> None:
    """On a GPU they are pinned, which takes longer than to fill them."""
    buffers: list[int] = []

    def pinned(num_bytes: int) -> torch.Tensor:
        buffers.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    params, checkpoint = stored(folder)
    taken: list[torch.Tensor] = []
    slots = [ParameterSlot((param,), taken.append) for param in params[:8]]
    source = SafetensorsSource(checkpoint, Bounds(many=3 * SIZE, threads=2, memory=pinned))
    load(slots, source, dtype=torch.bfloat16, device=CPU, progress=False)
    assert sum(buffers) <= 3 * SIZE and [tensor[0, 0].item() for tensor in taken] == list(range(8))


@pytest.mark.parametrize(
    ("dtype", "share_is_contiguous", "target_is_contiguous"),
    [(torch.bfloat16, True, True), (torch.float32, False, True), (torch.float32, True, False)],
)
def test_what_goes_to_a_device_is_converted_and_turned_around_there(
    dtype: torch.dtype, share_is_contiguous: bool, target_is_contiguous: bool
) -> None:
    """torch's copy_() does both on the host, on one thread, and copies from memory that is not pinned then."""
    share, target = MagicMock(torch.Tensor, dtype=dtype), MagicMock(torch.Tensor, dtype=torch.float32)
    share.is_contiguous.return_value, target.is_contiguous.return_value = share_is_contiguous, target_is_contiguous
    copy_share(share, target)
    share.to.assert_called_once_with(target.device)
    target.copy_.assert_called_once_with(share.to.return_value)


def test_what_goes_to_a_device_as_it_is_is_copied_once() -> None:
    share, target = MagicMock(torch.Tensor, dtype=torch.bfloat16), MagicMock(torch.Tensor, dtype=torch.bfloat16)
    copy_share(share, target)
    share.to.assert_not_called()
    target.copy_.assert_called_once_with(share)
