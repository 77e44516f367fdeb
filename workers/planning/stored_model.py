"""The checkpoint in a model's folder, checked against the model's table of parameters. Torch-free.

Called by the ranks, which read it, and before any rank starts by whoever would start them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.configs.errors import SettingsError
from tandem.parallel.stored.stored_checkpoint import StoredCheckpoint
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import OVERRIDES, load_spec
from tandem.workers.models.spec.family_rows.families import family_of, parameters_of


def open_checkpoint(folder: Path, spec: ArchSpec, overrides: Mapping[str, Any] | None = None) -> StoredCheckpoint:
    """Returns the folder's tensors. overrides: what the user gave beside config.json to make the spec. SettingsError,
    with the file and the tensor, when they are not the model's; it names the flag of overrides where they are those of
    config.json alone."""
    described_by = f"config.json with {OVERRIDES}" if overrides else "config.json"
    try:
        return _open(folder, spec, described_by)
    except SettingsError as error:
        if not overrides or not _fits_alone(folder):
            raise
        raise SettingsError(
            f"{str(error).removeprefix('MODEL: ')}; config.json alone fits the weights", OVERRIDES
        ) from error


def _fits_alone(folder: Path) -> bool:
    """True if the tensors are those of the model of config.json alone."""
    try:
        _open(folder, load_spec(folder), "config.json")
    except SettingsError:
        return False
    return True


def _open(folder: Path, spec: ArchSpec, described_by: str) -> StoredCheckpoint:
    names = family_of(spec.architecture).names
    behind = range(spec.num_layers, spec.num_layers + spec.extra_layers)
    unread = tuple(names.layer_prefix.format(layer=layer) for layer in behind)
    return StoredCheckpoint(
        folder,
        parameters_of(spec),
        (*names.ignored_suffixes, *spec.weights.ignored),
        names.base_prefix,
        unread,
        described_by,
        spec.weights.idle,
    )
