"""The checkpoint in a model's folder, checked against the model's table of parameters. Torch-free.

Called by the ranks, which read it, and before any rank starts by whoever would start them.
"""

from pathlib import Path

from tandem.parallel.stored.stored_checkpoint import StoredCheckpoint
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.families import family_of, parameters_of


def open_checkpoint(folder: Path, spec: ArchSpec) -> StoredCheckpoint:
    """Returns the folder's tensors. SettingsError, with the file and the tensor, when they are not the model's."""
    names = family_of(spec.architecture).names
    behind = range(spec.num_layers, spec.num_layers + spec.extra_layers)
    unread = tuple(names.layer_prefix.format(layer=layer) for layer in behind)
    return StoredCheckpoint(folder, parameters_of(spec), names.ignored_suffixes, names.base_prefix, unread)
