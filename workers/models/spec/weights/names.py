"""Patterns of the layers that a quantization_config names, each producer in its own way. Torch-free."""

import re
from collections.abc import Iterable
from typing import Final

from tandem.parallel.params import Scheme
from tandem.parallel.quantization.weight_plan import ANY, Rule

KV_SCALES: Final = (
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale"),
    *(f".{name}_proj.output_{kind}" for name in "qkv" for kind in ("scale", "zero_point")),
    *(".k_zero_point", ".v_zero_point", ".q_zero_point"),
)
"""Endings of the names of scales for KV caches, and of what else is measured of attention."""
KV_SCALES_UNUSED: Final = (
    "the checkpoint's scales for KV caches are not used: --kv-cache-dtype int8 and fp8 have a scale for each token and "
    "head, which is finer"
)


def rules_but_for(dense: Iterable[str], scheme: Scheme) -> tuple[Rule, ...]:
    """Returns the rules by which layers that patterns match are dense and all others have the scheme."""
    return (*(Rule(pattern, None) for pattern in dense), Rule(ANY, scheme))


def by_transformers(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the patterns of transformers' modules_to_not_convert: from the start to the end of a part of the name, as
    an expression too, or the name's end."""
    plain = [name.removeprefix("re:") for name in names]
    return tuple(f"(?:{as_expression(name)})(?:(?<=\\.)|(?=\\.|$)).*|.*{re.escape(name)}" for name in plain)


def containing(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the patterns of layers whose names contain one of these, as AutoAWQ leaves out."""
    return tuple(f".*{re.escape(name)}.*" for name in names)


def beginning(expression: str) -> str:
    """Returns the pattern of layers whose names begin with what an expression matches."""
    return f"(?:{as_expression(expression)}).*"


def with_stars(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the patterns of names with * for any text, as ModelOpt has them; those of layers within them too."""
    return tuple(f"{'.*'.join(map(re.escape, name.split('*')))}(?:\\..*)?" for name in names)


CLASSES: Final = ("Linear", "LinearBase")
"""compressed-tensors' targets that are all linear layers."""


def targeted(target: str) -> str:
    """Returns the pattern of one of compressed-tensors' targets or ignored layers: a class, a name, or an expression
    behind re:."""
    if target.startswith("re:"):
        return beginning(target.removeprefix("re:"))
    return ANY if target in CLASSES else re.escape(target)


def by_precision(target: str) -> int:
    """Returns the place of a target among others: compressed-tensors takes names before expressions before classes."""
    return 2 if target in CLASSES else 1 if target.startswith("re:") else 0


def as_expression(text: str) -> str:
    """Returns the text as an expression; itself, escaped, where it is none."""
    try:
        re.compile(text)
    except re.error:
        return re.escape(text)
    return text
