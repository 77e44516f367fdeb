"""Commands of the page docs/serving/launch.md, section by section: what a player runs is what people read."""

import re
from collections.abc import Mapping

from tests.support.service import REPOSITORY

PAGE = REPOSITORY / "docs" / "serving" / "launch.md"
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def blocks(section: str, yours: Mapping[str, str] = {}, page: str | None = None) -> list[str]:
    """The indented blocks of a section. yours: what a reader writes in place of words such as PASSWORD1; KeyError for
    a word that is not there."""
    text = PAGE.read_text() if page is None else (REPOSITORY / page).read_text()
    parts = HEADING.split(text)
    body = dict(zip(parts[1::2], parts[2::2], strict=True))[section]
    for word, value in yours.items():
        if word not in body:
            raise KeyError(f"{word} is not in the section {section!r}")
        body = body.replace(word, value)
    found = re.findall(r"(?:^(?: {4}.*)?\n)+", body, re.MULTILINE)
    return [code for one in found if (code := re.sub(r"^ {4}", "", one, flags=re.MULTILINE).strip("\n"))]
