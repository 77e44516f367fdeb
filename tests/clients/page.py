"""The table of clients: docs/clients.md."""

from collections.abc import Iterable

from tests.clients.lines import Outcome
from tests.support.service import REPOSITORY

PAGE = REPOSITORY / "docs" / "clients.md"
HEAD = """# Clients

Clients of other servers, run unchanged against `tandem serve demo --enable-lora --enable-auto-tool-choice`; coding
agents with a longer context, which their prompts need. `make clients` makes an environment for each under
`out/clients`, tries them, and writes this page; `make clients ARGS="openai anthropic"` tries some. Nothing of
it is part of `make test`, and proxies that lead nowhere keep clients from all but the loopback.

A call counts as working if its answer is what the client's own types and a check of its content ask for, or if what
Tandem does not serve is refused by name. `fields` are the fields of vLLM and of front ends, each sent alone: served,
named in `x-tandem-ignored`, or refused by name.

| client | versions | calls | work | fail by us | fail by client or model |
|---|---|---|---|---|---|
"""


def page(outcomes: Iterable[Outcome]) -> str:
    """The whole page: a row for each client, then each call that failed and each client that was not run."""
    rows, failed, absent = [], [], []
    for out in outcomes:
        if out.not_run:
            absent.append(f"- {out.client}: {_cell(out.not_run)}")
            if not out.tried:
                continue
        ours = sum(one.whose == "ours" for one in out.tried)
        other = sum(not one.works for one in out.tried) - ours
        told = ", ".join(f"{name} {version}" for name, version in out.versions.items())
        works = len(out.tried) - ours - other
        rows.append(f"| {out.client} | {told} | {len(out.tried)} | {works} | {ours} | {other} |")
        failed += [f"- {out.client}, {one.name} ({one.whose}): {_cell(one.reason)}"
                   for one in out.tried if not one.works]  # fmt: skip
    text = HEAD + "\n".join(rows) + "\n"
    for title, lines in (("Calls that fail", failed), ("Not run", absent)):
        if lines:
            text += f"\n## {title}\n\n" + "\n".join(lines) + "\n"
    return text


def _cell(text: str) -> str:
    """One line without marks of Markdown and HTML, and without paths of this machine."""
    plain = text.replace(str(REPOSITORY), "").replace("`", "'").replace("<", "(").replace(">", ")")
    return " ".join(plain.split())[:200]
