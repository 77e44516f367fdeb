"""Flags that `tandem quantize` and `tandem distill` share: a model, and how a run over it computes and reports."""

from typing import Annotated, Any, Final

import typer

from tandem.configs.errors import SettingsError
from tandem.workers.planning.hub import TEXT, Wanted

WEIGHTS: Final = Wanted(TEXT.patterns, weights=True)
"""The files of a model that such a run reads."""


def own_flag(flag: str, metavar: str, words: str) -> Any:
    """Returns a flag of one verb, whose help names the default."""
    return typer.Option(flag, metavar=metavar, help=words, show_default=False)


def model_argument(name: str) -> Any:
    """Returns the argument that names a model."""
    return typer.Argument(metavar=name, help="Folder, GGUF file, hub id, or `demo` (the bundled model).")


Revision = Annotated[str | None, own_flag("--revision", "TEXT", "Branch, tag or commit of a hub id.")]
CpuThreads = Annotated[int | None, own_flag("--cpu-threads", "N", "Threads to compute with. Default: all cores.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON; progress goes to stderr.")]


def check_threads(cpu_threads: int | None) -> None:
    """Raises SettingsError for fewer than one."""
    if cpu_threads is not None and cpu_threads < 1:
        raise SettingsError(f"{cpu_threads}: at least 1", "--cpu-threads")
