"""The pooling of a model's hidden states to an embedding: --pooler-config, else sentence-transformers' files in its
folder, else vLLM's default for decoders, the last token normalized. Torch-free.

Read by the gateway and by LLM, which put it into each request, and by the launcher, so that a wrong one is seen at the
start. What is not supported is refused by name: other kinds of pooling, and modules behind it such as Dense.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tandem.configs.errors import SettingsError, UnsupportedModelError
from tandem.workers.messages.request import Pool

FLAG: Final = "--pooler-config"
Kind = Literal["last", "mean"]
BY_FLAG: Final[Mapping[str, Kind]] = {"LAST": "last", "MEAN": "mean"}
"""vLLM's names of pooling types."""
BY_FILE: Final[Mapping[str, Kind]] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""sentence-transformers' names of pooling modes; in older files each is a key, after pooling_mode_."""
TYPE_KEYS: Final = ("pooling_type", "seq_pooling_type")
NORMALIZE_KEYS: Final = ("normalize", "use_activation")
_DEFAULT: Final[tuple[Kind, bool]] = ("last", True)
MODULES: Final = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFacts:
    """A model's embeddings. size: components, the model's hidden size. dimensions: to how many of them an embedding may
    be cut (Matryoshka representation learning, Kusupati et al. 2022); None: not at all, (): to any number."""

    size: int
    kind: Kind = "last"
    normalize: bool = True
    dimensions: tuple[int, ...] | None = None

    def pool(self, *, dimensions: int | None = None, normalize: bool | None = None) -> Pool:
        """Returns the task of a request; None: as the model does it. Raises ValueError, which says what would be right,
        for a number of dimensions that the model does not have."""
        if dimensions is not None:
            self._check(dimensions)
        given = self.normalize if normalize is None else normalize
        return Pool(kind=self.kind, normalize=given, dimensions=dimensions)

    def _check(self, dimensions: int) -> None:
        if self.dimensions is None:
            raise ValueError(
                f"{dimensions}: this model's embeddings cannot be cut; its config.json has neither is_matryoshka nor "
                "matryoshka_dimensions"
            )
        if self.dimensions and dimensions not in self.dimensions:
            raise ValueError(f"{dimensions}: this model has {', '.join(map(str, self.dimensions))}")
        if not 1 <= dimensions <= self.size:
            raise ValueError(f"{dimensions}: this model has 1 to {self.size}")


def read_pooling(
    folder: Path, size: int, overrides: Mapping[str, Any], given: Mapping[str, Any] | None = None
) -> PoolingFacts:
    """Reads the facts of the model in `folder`. size: its hidden size; overrides: --hf-overrides; given:
    --pooler-config. SettingsError for a file or a flag that cannot be read, UnsupportedModelError for pooling that is
    not supported."""
    config = {**_read(folder / "config.json", dict), **overrides}
    kind, normalize = _DEFAULT if given and _names_kind(given) else _from_modules(folder)
    if given:
        kind, normalize = _from_flag(given, kind, normalize)
    return PoolingFacts(size=size, kind=kind, normalize=normalize, dimensions=_dimensions(config, overrides, size))


def _names_kind(given: Mapping[str, Any]) -> bool:
    return any(given.get(key) is not None for key in TYPE_KEYS)


def _from_flag(given: Mapping[str, Any], kind: Kind, normalize: bool) -> tuple[Kind, bool]:
    for key, value in given.items():
        if value is None:
            continue
        if key in TYPE_KEYS:
            if not isinstance(value, str) or value not in BY_FLAG:
                raise SettingsError(f"{key} {value!r} is not one of {', '.join(BY_FLAG)}", FLAG)
            kind = BY_FLAG[value]
        elif key in NORMALIZE_KEYS:
            if not isinstance(value, bool):
                raise SettingsError(f"{key} {value!r} must be true or false", FLAG)
            normalize = value
        else:
            known = ", ".join((*TYPE_KEYS, *NORMALIZE_KEYS))
            raise SettingsError(f"{key} is not supported; supported: {known}", FLAG)
    return kind, normalize


def _from_modules(folder: Path) -> tuple[Kind, bool]:
    """Return what sentence-transformers would do with the folder; vLLM's default without its files."""
    file = folder / "modules.json"
    if not file.exists():
        return _DEFAULT
    modules = [module for module in _read(file, list) if isinstance(module, dict)]
    names = [str(module.get("type")).rpartition(".")[2] for module in modules]
    for name in names:
        if name not in MODULES:
            raise UnsupportedModelError(
                f"{file}: module {name} is not supported; supported: {', '.join(MODULES)}", FLAG
            )
    if "Pooling" not in names:
        return "last", "Normalize" in names
    path = str(modules[names.index("Pooling")].get("path"))
    return _kind_of(folder / path / "config.json"), "Normalize" in names


def _kind_of(file: Path) -> Kind:
    config = _read(file, dict)
    given = config.get("pooling_mode")
    modes = list(given or ()) if isinstance(given, list | tuple | None) else [given]
    prefix = "pooling_mode_"
    modes += [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in BY_FILE:
        shown = ", ".join(map(str, modes)) or "none"
        raise UnsupportedModelError(
            f"{file}: pooling mode {shown} is not supported; supported is one of lasttoken, mean", FLAG
        )
    return BY_FILE[modes[0]]


def _dimensions(config: Mapping[str, Any], overrides: Mapping[str, Any], size: int) -> tuple[int, ...] | None:
    given = config.get("matryoshka_dimensions")
    if given is None:
        return () if config.get("is_matryoshka") else None
    if not (isinstance(given, list) and given and all(isinstance(d, int) and 1 <= d <= size for d in given)):
        words = f"matryoshka_dimensions {given!r} must be a list of numbers from 1 to {size}"
        if "matryoshka_dimensions" in overrides:
            raise UnsupportedModelError(words, "--hf-overrides")
        raise UnsupportedModelError(f"config.json: {words}", "MODEL")
    return tuple(given)


def _read(file: Path, kind: type) -> Any:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {file}: {error.strerror}", "MODEL") from error
    except ValueError as error:
        raise SettingsError(f"{file} is not JSON: {error}", "MODEL") from error
    if not isinstance(value, kind):
        raise SettingsError(f"{file} is not a JSON {'object' if kind is dict else 'list'}", "MODEL")
    return value
