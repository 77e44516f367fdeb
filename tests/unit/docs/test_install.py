"""docs/install.md agrees with pyproject.toml, constraints.txt and the Makefile: versions, file names, order of steps.

The commands themselves fill an empty environment, which takes minutes: no test runs them.
"""

import re
import tomllib
from pathlib import Path

import pytest

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
    assert "install -c constraints.txt torch && $(PIP) install -c constraints.txt -e ." in makefile
