"""The public names of `tandem` and their signatures are those of public_names.txt beside this file.

python -m tests.unit.docs.test_public_names     # writes the file
"""

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

import tandem

FROZEN = Path(__file__).parent / "public_names.txt"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "api.md"
ADVICE = """The public names of `tandem` differ from {file}. A name or parameter that went, or changed its meaning,
breaks programs: docs/compatibility.md says when that may be. If the change is meant, run
`python -m tests.unit.docs.test_public_names`, and tell users in CHANGELOG.md."""


def signature(name: str, function: Any) -> str:
    """`name(parameters) -> result` on one line, with types by their last names."""
    shown = str(inspect.signature(function)).replace("(self, ", "(").replace("(self)", "()")
    shown = re.sub(r"\b(?:[A-Za-z_]\w*\.)+([A-Za-z_]\w*)", r"\1", shown)
    return name + re.sub(r"Optional\[(Literal\[[^]]*\])\]", r"\1 | None", shown)  # as later Pythons write it


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    """The functions of a class that users may call."""
    for name, member in sorted(vars(kind).items()):
        if inspect.isfunction(member) and not name.startswith("_"):
            yield name, member


def structs_in(types: Any) -> Iterator[type]:
    """The structs of Tandem in a type, also as arguments of other types."""
    if isinstance(types, type) and issubclass(types, msgspec.Struct):
        yield types
    for argument in get_args(types):
        yield from structs_in(argument)


def public_classes() -> dict[str, type]:
    """What `tandem` exports, and the structs that it takes and returns."""
    found = {name: getattr(tandem, name) for name in tandem.__all__ if name != "__version__"}
    waiting = list(found.values())
    while waiting:
        kind = waiting.pop()
        owners = [kind] if issubclass(kind, msgspec.Struct) else [function for _, function in methods(kind)]
        for hint in (hint for owner in owners for hint in get_type_hints(owner).values()):
            new = {struct.__name__: struct for struct in structs_in(hint) if struct.__name__ not in found}
            found |= new
            waiting += new.values()
    return found


def lines() -> list[str]:
    """One line for each public class and each of its methods."""
    found = public_classes()
    exported = set(tandem.__all__)
    public = [f"tandem.{name}" if name in exported else name for name in found]
    classes = [
        f"{name}: {', '.join(f'{one.name} = {one.value}' for one in kind)}"
        if issubclass(kind, Enum)
        else signature(name, kind)
        for name, kind in zip(public, found.values(), strict=True)
    ]
    calls = [signature(f"{kind.__name__}.{name}", call) for kind in found.values() for name, call in methods(kind)]
    return sorted(classes + calls)


def test_they_are_as_promised() -> None:
    now, promised = lines(), FROZEN.read_text().splitlines()
    gone, new = sorted(set(promised) - set(now)), sorted(set(now) - set(promised))
    shown = "\n".join([f"- {line}" for line in gone] + [f"+ {line}" for line in new])
    assert now == promised, f"{ADVICE.format(file=FROZEN.name)}\n\n{shown}"


def test_the_reference_has_what_is_exported_and_returned() -> None:
    named = {entry.rsplit(".", 1)[1] for entry in re.findall(r"^::: (\S+)", PAGE.read_text(), re.MULTILINE)}
    assert named == set(public_classes()), "docs/api.md lists the public classes"
    (members,) = re.findall(r"members: \[(.*)\]", PAGE.read_text())
    assert set(members.split(", ")) == {name for name, _ in methods(tandem.LLM)}


if __name__ == "__main__":
    FROZEN.write_text("\n".join(lines()) + "\n")
