"""The files for people who come to the repository name what is there, and nothing that is downloaded."""

import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


def test_owners_are_of_rooms_that_exist() -> None:
    lines = (ROOT / ".github" / "CODEOWNERS").read_text().splitlines()
    paths = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert not [path for path in paths if not (ROOT / path.lstrip("/")).exists()]
    rooms = {
        f"/{room.parent.name}/{room.name}/" for top in ("cluster", "workers") for room in (ROOT / top).glob("[a-z]*/")
    }
    assert not [room for room in rooms if room not in paths and any((ROOT / room.strip("/")).glob("*.py"))]


def test_the_bug_template_asks_for_the_machine() -> None:
    texts = {path.stem: path.read_text() for path in TEMPLATES}
    assert set(texts) == {"bug", "feature"}
    page = (ROOT / "docs" / "reporting.md").read_text()
    for wanted in ("tandem doctor --json", "tandem doctor --cluster --json", "tandem check-config FILE", "SECURITY.md"):
        assert wanted in " ".join(texts["bug"].split()) and wanted in page
    asked = {field.get("id") for field in yaml.safe_load(texts["bug"])["body"]}
    assert {"what", "how", "machine", "config", "logs", "version"} <= asked
    for text in texts.values():
        form = yaml.safe_load(text)
        assert {"name", "description", "body"} <= set(form)
        assert all(field["attributes"].get("label") or field["type"] == "markdown" for field in form["body"])


def test_hooks_are_local_and_those_of_make_check() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    (check,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    checked = re.findall(r"\$\(BIN\)/(ruff format|ruff check|mypy)", check)
    assert [re.sub(r"\.venv/bin/| --.*", "", hook["entry"]) for hook in repository["hooks"]] == checked
    assert all(hook["language"] == "system" for hook in repository["hooks"])


def test_the_container_has_what_make_dev_needs() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    recipe = (ROOT / ".devcontainer" / container["build"]["dockerfile"]).read_text()
    assert set(container["build"]["args"]) == {"IMAGE"} and re.match(
        r"(#.*\n)*ARG IMAGE=\S+\nFROM \$\{IMAGE\}\n", recipe
    )
    assert {"gcc", "libc6-dev", "git", "make", "python3-venv"} <= set(recipe.split())
    assert container["postCreateCommand"] == "make dev"
