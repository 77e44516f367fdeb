"""The registry of model families, whose rows of data are in family_rows/. Torch-free."""

import difflib

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.family import Family
from tandem.workers.models.spec.family_rows.expert_families import EXPERT_FAMILIES
from tandem.workers.models.spec.family_rows.gpt_families import GPT_FAMILIES
from tandem.workers.models.spec.family_rows.llama_families import LLAMA_FAMILIES
from tandem.workers.models.spec.parameters import ParameterTable, parameters

FAMILIES: tuple[Family, ...] = (*LLAMA_FAMILIES, *EXPERT_FAMILIES, *GPT_FAMILIES)


def supported_architectures() -> tuple[str, ...]:
    """Returns the names of all families."""
    return tuple(family.architecture for family in FAMILIES)


def family_of(architecture: str) -> Family:
    """The row of an architecture. Raises UnsupportedModelError with the nearest name."""
    for family in FAMILIES:
        if architecture in (family.architecture, *family.aliases):
            return family
    names = [name for family in FAMILIES for name in (family.architecture, *family.aliases)]
    close = difflib.get_close_matches(architecture, names, n=1) if isinstance(architecture, str) else []
    nearest = f"the nearest that is: {close[0]}; " if close else ""
    raise UnsupportedModelError(
        f"architecture {architecture!r} is not supported; {nearest}docs/models.md has all {len(FAMILIES)}", "MODEL"
    )


def parameters_of(spec: ArchSpec) -> ParameterTable:
    """Returns the table of a model's parameters, under its family's names."""
    return parameters(spec, family_of(spec.architecture).names)
