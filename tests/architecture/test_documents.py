"""The documents name what is there: links, paths, benchmark modules, commands and their flags, pages of the site."""

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer
import yaml

from tandem.cluster.cli.main import build_app
from tandem.workers.engine.base.blockers import Blocker
from tests.left_to import CHAOS, PARITY
from tools import house
from tools.check_links import CODE_SPAN, ROOT, broken_links, documents

GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDES += sorted((ROOT / "docs" / "serving").glob("*.md"))
TOPS = ("benchmarks", "cluster", "configs", "docs", "offload", "parallel", "tests", "tools", "workers")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def missing_paths(text: str) -> list[str]:
    """Code spans such as `workers/engine/` that name nothing; those with capitals or * stand for many files."""
    spans = {span.strip("`") for span in CODE_SPAN.findall(text)}
    paths = {span for span in spans if re.fullmatch(rf"({'|'.join(TOPS)})/[a-z0-9_./-]*", span)}
    return sorted(path for path in paths if not (ROOT / path).exists())


def missing_modules(text: str) -> list[str]:
    """Modules that are run with `python -m` and do not exist."""
    modules = re.findall(r"python -m ((?:benchmarks|tools)\.[a-z_.]+)", text)
    return [module for module in modules if not (ROOT / f"{module.replace('.', '/')}.py").exists()]


def found_in(pages: list[Path], look: Callable[[str], list[str]]) -> list[str]:
    return [f"{name(page)}: {wrong}" for page in pages for wrong in look(page.read_text())]


def test_links_lead_somewhere() -> None:
    assert not [line for document in documents() for line in broken_links(document)]


def test_named_paths_exist() -> None:
    assert not found_in(GUIDES, missing_paths)
    assert missing_paths("`workers/engine/`, `workers/NAME/`, `workers/no_room/`, `x/y`") == ["workers/no_room/"]


def test_named_modules_exist() -> None:
    assert not found_in(documents(), missing_modules)
    assert missing_modules("python -m tools.shape; python -m benchmarks.none") == ["benchmarks.none"]


def commands(text: str) -> Iterator[list[str]]:
    """The words of every `tandem VERB ...` in code blocks and code spans, without comments and pipes."""
    lines = re.findall(r"^ *(?:.*\| |[A-Z]+=\$\()?\.venv/bin/tandem (.*)$", text, re.MULTILINE)
    lines += [match for span in CODE_SPAN.findall(text) for match in re.findall(r"`(?:\S*/)?tandem ([a-z].*)`", span)]
    for line in lines:
        yield shlex.split(line.rstrip(")"), comments=True)


@cache
def command_line() -> Any:
    return typer.main.get_command(build_app())


def unknown_commands(text: str) -> list[str]:
    """Verbs and flags of `tandem` that there are not."""
    titles = {"rank", "host-tier", "redis", "reaper"}  # of processes
    wrong = []
    for words in commands(text):
        command, path = command_line(), ["tandem"]
        while hasattr(command, "commands") and words and words[0].split("|")[0] not in titles:
            path.append(words.pop(0).split("|")[0])
            command = command.commands.get(path[-1])
        if command is None:
            wrong.append(" ".join(path))
            continue
        known = {"--help"} | {flag for option in command.params for flag in [*option.opts, *option.secondary_opts]}
        unknown = [word for word in words if re.match(r"--?[a-z]", word) and word not in known]
        wrong += [f"{' '.join(path)} {flag}" for flag in unknown]
    return wrong


def test_named_commands_and_flags_exist() -> None:
    assert not found_in(GUIDES, unknown_commands)
    page = "`tandem serve --port 1 --prot 2`, `tandem tenants add x` and `tandem sevre`, `tandem rank 0`"
    assert unknown_commands(page) == ["tandem serve --prot", "tandem sevre"]


def test_every_page_is_on_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = set(re.findall(r"[\w/-]+\.md", yaml.safe_dump(yaml.safe_load(text)["nav"])))
    there = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert pages == {page.as_posix() for page in there if not page.match("decisions/[0-9]*.md")}
    settings = yaml.safe_load(text)
    assert settings["docs_dir"] == "docs" and settings["not_in_nav"] == "decisions/[0-9]*.md"


def test_the_readme_is_short_and_its_figures_are_measured() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 110
    (speed,) = re.findall(r"## Speed\n(.*?)\n## ", readme, re.DOTALL)
    figures = re.findall(r"(?<=\| )[\d.]+×?(?= \|)", speed)
    performance = (ROOT / "docs" / "performance.md").read_text()
    assert len(figures) == 8
    assert not [figure for figure in figures if f"| {figure} |" not in performance]


def test_what_is_left_to_other_goals_is_there() -> None:
    for test in (*PARITY, *CHAOS):
        file, _, rest = test.partition("::")
        function = rest.partition("[")[0]
        assert not rest or f"def {function}" in (ROOT / "tests" / file).read_text(), test


def test_the_table_of_mutants_names_files_that_there_are() -> None:
    table = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text())
    paths = {path for row in table["modules"].values() for path in (row["path"], *row["tests"])}
    assert not sorted(path for path in paths if not (ROOT / path).is_file())
    assert not {entry["module"] for entry in table["equivalent"]} - table["modules"].keys()


def test_what_quick_tests_leave_out_is_there() -> None:
    (dear,) = re.findall(r"^DEAR := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert not [name for name in dear.replace("\\", " ").split() if not (ROOT / "tests" / "unit" / name).exists()]


def test_the_glossary_has_each_word_once_and_in_order() -> None:
    glossary = (ROOT / "docs" / "architecture.md").read_text().partition("## Glossary")[2]
    words = re.findall(r"^\| ([a-z][^|]*?) \|", glossary, re.MULTILINE)[1:]
    assert 30 <= len(words) <= 60
    assert words == sorted(set(words))


def test_the_page_names_every_blocker_once() -> None:
    """The list below "blocked by one thing at a time"; and no row of a table stands in another one too."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^- `([A-Z]+)`:", page.partition("blocked by one thing")[2], re.MULTILINE)
    assert sorted(listed) == sorted(Blocker.__members__)
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| state | event")]
    assert len(rows) == len(set(rows))


def test_the_link_checker_finds_broken_links(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# A `b`, c\n\n[1](#a-b-c) [2](#d) [3](docs/x.md) [4](docs/y.md#z)\n")
    (tmp_path / "docs" / "y.md").write_text("[5](../README.md) [6](https://example.com/no) `[7](no.md)`\n")
    found = [line for page in documents(tmp_path) for line in broken_links(page, tmp_path)]
    assert [line.split(": ")[1] for line in found] == ["#d", "docs/x.md", "docs/y.md#z", "../README.md"]


def test_the_import_order_is_the_one_that_is_held() -> None:
    """Every room of tools/house.py stands on the page in its order; `*`, the files beside rooms, may be left out."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    _, _, rest = page.partition("## Import order")
    lines = re.split(r"^(?=[a-z][a-z ]*:)", rest.partition("```text")[2].partition("```")[0], flags=re.MULTILINE)
    shown = {line.partition(":")[0]: line.partition(":")[2] for line in lines if ":" in line}
    for scope, order in house.ORDERS.items():
        chain = re.sub(r"\n +messages <- engine.*", "", shown[scope.split("/")[-1]])
        floors = [re.findall(r"[\w/]+", floor.replace(".py", "")) for floor in chain.split("<-")]
        there = [[room for room in floor.split() if is_room(f"{scope}/{room}")] for floor in order]
        held = [floor for floor in there if floor]
        assert floors[: len(held)] == held, scope


def is_room(path: str) -> bool:
    """A folder, or a file that stands alone on its floor."""
    return (ROOT / path).is_dir() or (ROOT / f"{path}.py").is_file()
