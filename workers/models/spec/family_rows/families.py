"""The registry of model families, whose rows of data are in family_rows/. Torch-free."""

import difflib
import re
from typing import Any

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.family import Family
from tandem.workers.models.spec.family_rows.expert_families import EXPERT_FAMILIES
from tandem.workers.models.spec.family_rows.gpt_families import GPT_FAMILIES
from tandem.workers.models.spec.family_rows.llama_families import LLAMA_FAMILIES
from tandem.workers.models.spec.parameters import ParameterTable, parameters
from tandem.workers.models.spec.weights.matrix_schemes import with_schemes

FAMILIES: tuple[Family, ...] = (*LLAMA_FAMILIES, *EXPERT_FAMILIES, *GPT_FAMILIES)


TASK = re.compile("(For[A-Z].*|LMHeadModel|Model)$")
"""Endings of the names of classes."""
WORD = re.compile("[A-Z]+(?![a-z])|[A-Z][a-z]+")
"""First words of them: Llama, GPT, Smol."""


def supported_architectures() -> tuple[str, ...]:
    """Returns the names of all families."""
    return tuple(family.architecture for family in FAMILIES)


def family_of(architecture: str) -> Family:
    """The row of an architecture. Raises UnsupportedModelError with the nearest name."""
    for family in FAMILIES:
        if architecture in (family.architecture, *family.aliases):
            return family
    nearest = f"the nearest that is: {name}; " if (name := _nearest(architecture)) else ""
    raise UnsupportedModelError(
        f"architecture {architecture!r} is not supported; {nearest}supported are {short_names()}", "MODEL"
    )


def short_names() -> str:
    """Returns the names of all families, for errors: those of classes without the task that they end with."""
    return ", ".join(TASK.sub("", name) for name in supported_architectures())


def _nearest(architecture: Any) -> str | None:
    """Returns the architecture whose name is most like another, of whatever task, among those of the same first word;
    None when none is like it."""
    if not isinstance(architecture, str):
        return None
    given = TASK.sub("", architecture).casefold()
    names = {
        TASK.sub("", name).casefold(): name
        for name in supported_architectures()
        if (word := WORD.match(name)) and given.startswith(word[0].casefold())
    }
    close = difflib.get_close_matches(given, names, n=1)
    return names[close[0]] if close else None


def parameters_of(spec: ArchSpec) -> ParameterTable:
    """Returns the table of a model's parameters, under its family's names, with the schemes of its matrices."""
    return with_schemes(parameters(spec, family_of(spec.architecture).names), spec.weights)
