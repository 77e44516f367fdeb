"""docs/tour.md leads through files that exist, and names what is in them; docs/vllm-words.md has each word once."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_each_stop_is_a_file_with_what_its_title_names() -> None:
    stops = re.findall(r"^## (\d+)\. `(\S+\.py)`: (.*)$", (ROOT / "docs" / "tour.md").read_text(), re.MULTILINE)
    assert [int(number) for number, *_ in stops] == list(range(1, 11))
    missing = []
    for _, path, names in stops:
        text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        words = [word for name in re.findall(r"`([^`]+)`", names) for word in name.split(".")]
        missing += [
            f"{path}: {word}" for word in words if not re.search(rf"^ *(?:class|def) {word}\b", text, re.MULTILINE)
        ]
    assert not missing, "docs/tour.md names what is elsewhere now"


def test_names_of_ours_beside_vllms_exist() -> None:
    rows = re.findall(r"^\| (?!here|-)(.*?) \| .* \|$", (ROOT / "docs" / "vllm-words.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows)) > 30
    sources = "\n".join(
        path.read_text() for top in ("cluster", "offload", "parallel", "workers") for path in (ROOT / top).rglob("*.py")
    )
    classes = set(re.findall(r"^class (\w+)", sources, re.MULTILINE))
    named = {name.split(".")[0] for row in rows for name in re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", row)}
    assert not named - classes, "docs/vllm-words.md names classes that have gone"
