"""The file of times: what is not to be believed is passed over, with one line in the log."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tandem.workers.tuning.trials import Trial
from tandem.workers.tuning.tuning_file import add_trials, read_trials, source_digest
from tests.support.fake_tuner import DEVICE

FAILED = Trial((3, 4), why="OutOfResources: shared memory")
TRIALS = {"x": (Trial((1, 2), {"a": 3.5, "b": 1.0}), FAILED, Trial((5, 6), {"a": 7.5, "b": 1.0}))}
OTHER = msgspec.structs.replace(DEVICE, gpu="Fake 200")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tandem" / "tuning"


def test_trials_are_kept_beside_others_of_the_device(folder: Path) -> None:
    assert read_trials(DEVICE) == {}
    path = add_trials(DEVICE, TRIALS)
    assert path is not None and path.parent == folder and path.stat().st_mode & 0o077 == 0
    assert add_trials(DEVICE, {"y": ()}) == path and list(folder.iterdir()) == [path]
    assert read_trials(DEVICE) == TRIALS | {"y": ()} and read_trials(OTHER) == {}
    assert add_trials(DEVICE, {"x": ()}) and read_trials(DEVICE) == {"x": (), "y": ()}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def of_another_device(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"Fake 100", b"Fake 101"))


def of_text(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"3.5", b'"fast"'))


def of_no_time(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"3.5", b"-3.5"))


def of_other_loads(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"a": 7.5', b'"c": 7.5'))


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [cut, of_another_device, of_text, of_no_time, of_other_loads, open_to_all, a_folder])
def test_a_file_that_cannot_be_believed_is_passed_over(
    damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = add_trials(DEVICE, TRIALS)
    assert path is not None
    damage(path)
    with caplog.at_level(logging.INFO):
        assert read_trials(DEVICE) == {}
    (line,) = caplog.records
    assert "times of kernels are not read: " in line.message and str(path) in line.message
    if not path.is_dir():
        assert add_trials(DEVICE, TRIALS) == path and read_trials(DEVICE) == TRIALS


def test_a_folder_that_cannot_be_written_costs_a_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.mkdir()
    folder.write_text("no folder")
    assert add_trials(DEVICE, TRIALS) is None
    assert [record.levelname for record in caplog.records if "not kept" in record.message] == ["WARNING"]


def test_other_sources_versions_and_devices_have_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    before = source_digest([tmp_path])
    (tmp_path / "a.py").write_text("x = 2")
    assert before != source_digest([tmp_path]) and source_digest() == source_digest()
    kinds = [msgspec.structs.replace(DEVICE, **{name: "other"}) for name in DEVICE.__struct_fields__]
    assert len({kind.path for kind in (DEVICE, *kinds)}) == 1 + len(DEVICE.__struct_fields__)
    assert os.fspath(DEVICE.path).endswith(".json")
