"""Tiers below the device that cannot be had: a warning that names the flag, and the engine answers without them."""

from pathlib import Path
from typing import Any

import pytest

from tandem import LLM, SamplingParams
from tandem.offload.copies.host_slab import HostSlab


def answer(**flags: Any) -> tuple[str, bool, bool]:
    """Outputs of a small engine, and whether it has a host tier and a disk tier."""
    with LLM("demo", dtype="float32", max_num_seqs=2, num_gpu_blocks_override=64, **flags) as llm:
        offload = llm._engine.offload
        text = llm.generate("What is 2 + 3?", SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)[0].text
        return text, offload is not None, offload is not None and offload._store.disk is not None


@pytest.fixture(scope="module")
def plain() -> str:
    return answer()[0]


def test_a_disk_path_that_is_a_file(plain: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    flags = {"kv_offloading_size": 0.01, "kv_disk_path": str(tmp_path / "file"), "kv_disk_size": 0.01}
    assert answer(**flags) == (plain, True, False)
    (line,) = [line for line in caplog.messages if "serving without" in line]
    assert line.startswith(f"--kv-disk-path {tmp_path / 'file'} cannot be used")
    assert line.endswith("; serving without the disk tier")


def test_more_host_memory_than_there_is(plain: str, caplog: pytest.LogCaptureFixture) -> None:
    assert answer(kv_offloading_size=10**6) == (plain, False, False)
    (line,) = [line for line in caplog.messages if "serving without" in line]
    assert line.startswith("--kv-offloading-size: 1e+06 GiB is more than the ")
    assert line.endswith("; serving without tiers below the device")


def test_host_memory_that_cannot_be_reserved(
    plain: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> HostSlab:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HostSlab, "allocate", fail)
    assert answer(kv_offloading_size=0.01) == (plain, False, False)
    (line,) = [line for line in caplog.messages if "serving without" in line]
    assert line.startswith("--kv-offloading-size: ") and "No space left on device" in line
