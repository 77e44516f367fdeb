"""docs/install.md agrees with pyproject.toml, constraints.txt and the Makefile: versions, file names, order of steps.

The commands themselves fill an empty environment, which takes minutes: `make release` runs them, and no test.
"""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tools import install_torch

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "install.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
INSTALLS = re.findall(r"^    \S+/pip install (.*)$", PAGE, re.MULTILINE)


def test_the_versions_are_those_of_the_project() -> None:
    (bounds,) = [need for need in PROJECT["dependencies"] if need.startswith("torch")]
    low, high = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", bounds).groups()  # type: ignore[union-attr]
    assert f"pins {PINS['torch']}, and Tandem\ntakes 2.{low} to 2.{int(high) - 1}." in PAGE
    wheel = f"{PROJECT['name'].replace('-', '_')}-{PROJECT['version']}-py3-none-any.whl"
    assert set(re.findall(r"\S+\.whl", PAGE)) == {wheel}
    assert PROJECT["requires-python"] == ">=3.11" and "Python 3.11 or newer" in PAGE
    assert "s3fs" in PINS and any(need.startswith("s3fs") for need in PROJECT["optional-dependencies"]["s3"])


@pytest.mark.parametrize("section", ["Without make", "From a wheel"])
def test_torch_goes_first_and_everything_is_pinned(section: str) -> None:
    torch, tandem = re.findall(r"^    \S+/pip install (.*)$", SECTIONS[section], re.MULTILINE)
    assert torch.startswith("-c constraints.txt torch --extra-index-url ")
    assert re.fullmatch(r"-c constraints\.txt (\.|\S+\.whl)", tandem)


def test_only_torchs_own_index_is_named() -> None:
    hosts = re.findall(r"https?://([^/\s)]+)(/\S*)?", PAGE)
    assert {host for host, _ in hosts} == {"download.pytorch.org", "pytorch.org"}
    builds = [install.rsplit("/", 1)[1] for install in INSTALLS if "download.pytorch.org" in install]
    assert builds == ["cpu", "cpu", "cu130"]


def test_make_does_the_same_steps() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "tools/install_torch.py $(TORCH) && $(PIP) install -c constraints.txt -e ." in makefile
    planned = ["make", "--dry-run", "install", "TORCH=cpu"]
    assert (
        "install_torch.py cpu" in subprocess.run(planned, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )


NONE: tuple[str, ...] = ()
CPU = "torch==2.13.0+cpu"


@pytest.mark.parametrize(
    ("asked", "installed", "driver", "offers_cpu", "arguments", "said"),
    [
        ("", None, False, True, (CPU,), "the CPU build of torch 2.13.0 .*: there is no NVIDIA driver here"),
        ("", None, False, False, ("torch==2.13.0,!=2.13.0+cpu",), "CUDA build.*2.6 GB.*make install TORCH=cpu"),
        ("", None, True, True, ("torch==2.13.0,!=2.13.0+cpu",), "CUDA build.*driver is here.*TORCH=cpu"),
        ("", "2.13.0+cu130", False, True, NONE, r"2.13.0\+cu130 is there and stays"),
        ("", "2.12.0", False, True, (CPU,), "CPU build"),
        ("cpu", "2.13.0+cu130", True, True, (CPU,), "CPU build.*: TORCH=cpu"),
        ("cpu", None, False, False, (CPU, "--extra-index-url", install_torch.CPU_INDEX), "offers none"),
        ("cuda", "2.13.0+cpu", False, True, ("torch==2.13.0,!=2.13.0+cpu",), "CUDA build.*: TORCH=cuda"),
    ],
)
def test_the_build_of_torch_follows_the_driver_the_configuration_and_what_is_asked(
    asked: str, installed: str | None, driver: bool, offers_cpu: bool, arguments: tuple[str, ...], said: str
) -> None:
    def choose(*, has_builds: bool) -> install_torch.Choice:
        return install_torch.choose(
            asked, "2.13.0", installed, driver, lambda wanted: offers_cpu and wanted == CPU, has_builds=has_builds
        )

    choice = choose(has_builds=True)
    assert choice.arguments == arguments and re.search(said, choice.words)
    assert choice.is_large == ("!=" in "".join(arguments))
    assert choose(has_builds=False) == (("torch",), "", False)


def test_an_unknown_build_is_refused_by_name_and_the_pin_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert install_torch.main("rocm") == 2 and "TORCH=rocm: there are cpu and cuda" in capsys.readouterr().err
    assert install_torch.pinned((ROOT / "constraints.txt").read_text()) == PINS["torch"]


def test_a_driver_is_found_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert not install_torch.has_driver(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert install_torch.has_driver(tmp_path)
