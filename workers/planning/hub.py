"""Downloads a model from the hub: of its files only those that are needed, and its weights only when the rest is fine.

Called by model_source.py. huggingface_hub keeps the files in its cache, shows the progress on standard error, and goes
on with a download that broke off. Without the hub, files are taken from that cache.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.configs.errors import SettingsError
from tandem.parallel.stored.headers import INDEX, find_weights, no_weights, weight_names

INSTEAD = "give the folder of a model, or fill that cache where the hub can be reached (`hf download`)"
BESIDE_WEIGHTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "tekken.json", "vocab.txt", "spiece.model",
    "*.tiktoken", "chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja", "modules.json",
    "*_Pooling/config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json", "LICENSE*",
)  # fmt: skip


def _is_fine(folder: Path) -> None:
    """Takes any folder."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The choice of what is downloaded: files that fit the patterns, and then the weights, if `check` takes the folder
    that has the others. It raises SettingsError."""

    patterns: tuple[str, ...]
    weights: bool = False
    check: Callable[[Path], None] = _is_fine


TEXT = Wanted(BESIDE_WEIGHTS)
"""All but weights."""


def download(name: str, revision: str | None, flag: str, wanted: Wanted) -> Path:
    """Returns the folder of a model of the hub, in the hub's cache. Raises SettingsError with `flag`."""
    folder = _snapshot(name, revision, flag, wanted.patterns)
    if not wanted.weights:
        return folder
    if (folder / "config.json").exists():
        wanted.check(folder)
    names = _names(name, revision)
    if names is None:  # not looked up: whatever the cache has
        if not any(folder.glob("*.safetensors")):
            raise SettingsError(f"{name} has no weights in the hub's cache, and is not looked up: {INSTEAD}", flag)
        return folder
    if INDEX in names:
        files = [file.name for file in find_weights(_snapshot(name, revision, flag, (INDEX,)))[0]]
    elif not (files := weight_names(names)):
        raise no_weights(name, names)
    return _snapshot(name, revision, flag, files)


def revision_flag(flag: str) -> str:
    """Returns the flag of the revision beside that of a name."""
    return "--tokenizer-revision" if flag == "--tokenizer" else "--revision"


def _names(name: str, revision: str | None) -> list[str] | None:
    """Returns the files in the repository's root; None where the hub does not say."""
    from huggingface_hub import HfApi

    with suppress(Exception):  # of many kinds, by the HTTP client; the download that follows says what is wrong
        return [file for file in HfApi().list_repo_files(name, revision=revision) if "/" not in file]
    return None


def _snapshot(name: str, revision: str | None, flag: str, patterns: Sequence[str]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(patterns))).resolve()
    except GatedRepoError as error:
        raise SettingsError(
            f"{name} is gated: accept its conditions on the hub, and set HF_TOKEN to a token that may read it", flag
        ) from error
    except RepositoryNotFoundError as error:
        raise SettingsError(
            f"{name} is neither a folder here nor a model on the hub; for a private one set HF_TOKEN", flag
        ) from error
    except RevisionNotFoundError as error:
        raise SettingsError(f"{name} has no revision {revision} on the hub", revision_flag(flag)) from error
    except LocalEntryNotFoundError as error:
        raise SettingsError(_not_in_cache(name, error), flag) from error
    except Exception as error:  # of many kinds, by the HTTP client that the hub's library has
        raise SettingsError(f"{name} cannot be downloaded: {_first_line(error)}", flag) from error


def _not_in_cache(name: str, error: Exception) -> str:
    """The words for a hub id that is not here, or not all of it, and that the hub's library did not look up."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    where = f"{name} is no folder here, and not complete in the hub's cache {constants.HF_HUB_CACHE}"
    if isinstance(error.__cause__, OfflineModeIsEnabled):
        return f"{where}; HF_HUB_OFFLINE forbids to download it: unset that, or {INSTEAD}"
    reason = "" if error.__cause__ is None else f" ({_first_line(error.__cause__)})"
    return f"{where}; the hub cannot be reached to download it{reason}: {INSTEAD}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
