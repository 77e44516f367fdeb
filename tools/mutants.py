"""Small defects of a module, one at a time: mutmut's operators, and calls left out. Used by mutate.py.

Comparisons, signs, and/or, not, is, in, break, continue, True and False, inside functions and classes. What only checks
is left out: asserts, `strict=`, check_invariants.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import operator_keywords, operator_name, operator_remove_unary_ops, operator_swap_op

LEFT_OUT = (cst.Assert, cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)
Identity = tuple[str, str, str]
"""Function, line without the mutation, line with it."""
Key = tuple[str, str, str, int]
"""The same, and which of those that are alike."""


@dataclass(frozen=True)
class Mutant:
    """function, line and mutant say which it is (line numbers drift); text is the whole module with it."""

    module: str
    function: str
    number: int
    line: str
    mutant: str
    nth: int
    text: str

    @property
    def identity(self) -> Identity:
        return self.function, self.line, self.mutant

    @property
    def key(self) -> Key:
        return *self.identity, self.nth

    def __str__(self) -> str:
        return f"{self.module}:{self.number} {self.function}\n    {self.line}\n    {self.mutant}"


def _left_out_call(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """`f(x)` as a statement, awaited or not, becomes `pass`."""
    if isinstance(node, cst.Expr):
        call = node.value.expression if isinstance(node.value, cst.Await) else node.value
        if isinstance(call, cst.Call):
            yield cst.Pass()


OPERATORS = (operator_swap_op, operator_keywords, operator_name, _left_out_call)


def mutants_of(name: str, text: str) -> list[Mutant]:
    wrapper = MetadataWrapper(cst.parse_module(text))
    found = _Finder(wrapper)
    wrapper.visit(found)
    mutants: list[Mutant] = []
    before = text.splitlines()
    for function, number, old, new in found.changes:
        changed = wrapper.module.deep_replace(old, new).code  # type: ignore[arg-type]
        diff = [line for line in difflib.ndiff(before, changed.splitlines()) if line[:2] in ("- ", "+ ")]
        line, mutant = (" ".join(d[2:].strip() for d in diff if d[0] == sign) for sign in "-+")
        nth = sum(other.identity == (function, line, mutant) for other in mutants)
        mutants.append(Mutant(name, function, number, line, mutant, nth, changed))
    return mutants


class _Finder(cst.CSTVisitor):
    """All changes inside functions and classes: where, what and into what."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, wrapper: MetadataWrapper) -> None:
        super().__init__()
        self.changes: list[tuple[str, int, cst.CSTNode, cst.CSTNode]] = []
        self._inside: list[str] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, LEFT_OUT) or (
            isinstance(node, cst.Arg) and node.keyword and node.keyword.value == "strict"
        ):
            return False
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            if node.name.value == "check_invariants":
                return False
            self._inside.append(node.name.value)
        if self._inside:
            number = self.get_metadata(PositionProvider, node).start.line
            for new in self._changed(node):
                self.changes.append((".".join(self._inside), number, node, new))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef) and original_node.name.value != "check_invariants":
            self._inside.pop()

    def _changed(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        if isinstance(node, cst.UnaryOperation):
            yield from operator_remove_unary_ops(node)
        for operator in OPERATORS:
            if operator is not operator_name or isinstance(node, cst.Name):
                yield from operator(node)  # type: ignore[arg-type]
