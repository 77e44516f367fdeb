"""docs/reference is what the code makes and has all of a service; the site shows a version and no invented link."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.metric_names import not_in_the_reference
from tests.unit.cluster.fleet.test_metrics_text import reports, served
from tools import reference_metrics, site_facts
from tools.reference import FOLDER, PAGES
from tools.reference_rest import type_words

DOCS = FOLDER.parent


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_makes(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run `make reference`"
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


def test_metrics_are_those_of_a_service_with_everything() -> None:
    text = served(reports())
    assert not not_in_the_reference(text) and not_in_the_reference(text + "# TYPE tandem:odd gauge\n") == {"odd"}
    shown = {one.name: one for rows in reference_metrics.families().values() for one in rows}
    assert sum(map(len, reference_metrics.families().values())) == len(shown), "each stands once"
    for family in text_string_to_metric_families(text):
        name = family.name.removeprefix("tandem:")
        one = shown.get(name) or shown[f"{name}_total"]
        assert (one.kind, one.help) == (family.type, family.documentation)
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert labels <= {frozenset(one.labels)}, name


def test_types_are_in_words() -> None:
    text = {"anyOf": [{"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31}}]}
    assert type_words(text) == "list of (integer, at least 0)"
    choice = {"anyOf": [{"enum": ["a", "b"]}, {"$ref": "#/components/schemas/ChatBody"}, {"type": "null"}]}
    assert type_words(choice) == "`a` or `b` or [ChatBody](#chatbody)"


def test_the_site_has_the_version_and_a_repository_only_if_there_is_one(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nversion = "1.2.3"\nlicense = "MIT"\n')
    assert site_facts.facts(project) == {"copyright": "Tandem 1.2.3, MIT"}
    project.write_text(project.read_text() + '[project.urls]\nRepository = "https://tandem.invalid/x"\n')
    assert site_facts.facts(project)["repo_url"] == "https://tandem.invalid/x"
    assert site_facts.facts()["copyright"].startswith("Tandem ")


def test_code_on_the_first_page_is_not_cut_off() -> None:
    """A block of the site's first page has room for some 70 characters."""
    lines = re.findall(r"^    .*$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert lines and max(map(len, lines)) <= 68
