"""Finds broken relative links and anchors in the repository's Markdown documents.

    python -m tools.check_links

Anchors are those that GitHub makes of headings. Links to other hosts are not followed. Pages below docs/ may link
only to files below docs/, because the site (mkdocs.yml) holds nothing else. Needs the standard library only.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE_BLOCK = re.compile(r"^    .*$", re.MULTILINE)
CODE_SPAN = re.compile(r"`[^`\n]*`")


def documents(root: Path = ROOT) -> list[Path]:
    """The Markdown files whose links are checked."""
    return [*sorted(root.glob("*.md")), *sorted(root.glob("docs/**/*.md")), *sorted(root.glob("benchmarks/**/*.md"))]


def slug(heading: str) -> str:
    """The anchor of a heading: lower case, words joined by dashes, other signs left out."""
    text = re.sub(r"[*`]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def anchors(document: Path) -> set[str]:
    """The anchors of all headings; a heading that comes again gets a number, as on GitHub."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", document.read_text())):
        name, count = slug(heading), 0
        while (anchor := f"{name}-{count}" if count else name) in found:
            count += 1
        found.add(anchor)
    return found


def links(document: Path) -> Iterator[str]:
    """Targets of inline links and images outside code."""
    text = document.read_text()
    for code in (FENCE, CODE_BLOCK, CODE_SPAN):
        text = code.sub("", text)
    yield from LINK.findall(text)


def broken_links(document: Path, root: Path = ROOT) -> Iterator[str]:
    """One line for each relative link of the document that leads nowhere."""
    docs = root / "docs"
    for link in links(document):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        where = f"{document.relative_to(root)}: {link}"
        if not target.exists():
            yield f"{where}: no such file"
        elif document.is_relative_to(docs) and not target.is_relative_to(docs):
            yield f"{where}: outside docs/, so not on the site"
        elif anchor and anchor not in anchors(target):
            yield f"{where}: no such heading"


def main() -> int:
    lines = [line for document in documents() for line in broken_links(document)]
    print("\n".join(lines) or f"{len(documents())} documents, no broken links")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
