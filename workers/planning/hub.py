"""Downloads a model from the hub: of its files only those that are needed, and its weights only when the rest is fine.

Called by model_source.py. huggingface_hub keeps the files in its cache, shows the progress on standard error, and goes
on with a download that broke off. Without the hub, files are taken from that cache, and of a commit that is there whole
the hub is not asked. Processes that want one file wait for each other by its locks.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.configs.errors import SettingsError
from tandem.parallel.stored.headers import INDEX, SINGLE, find_weights, no_weights, weight_names

OnBytes = Callable[[int, int], None]
"""Takes the bytes that are there, and those there will be."""
PROGRESS_S = 1.0
INSTEAD = "give the folder of a model, or fill that cache where the hub can be reached (`hf download`)"
BESIDE_WEIGHTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "tekken.json", "vocab.txt", "spiece.model",
    "*.tiktoken", "chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja", "modules.json",
    "*_Pooling/config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json", "LICENSE*",
)  # fmt: skip


def _is_fine(folder: Path) -> None:
    """Takes any folder."""


def ignored(done: int, total: int) -> None:
    """Takes news of a download that nobody waits for."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The choice of what is downloaded: files that fit the patterns, and then the weights, if `check` takes the folder
    that has the others. It raises SettingsError."""

    patterns: tuple[str, ...]
    weights: bool = False
    check: Callable[[Path], None] = _is_fine


TEXT = Wanted(BESIDE_WEIGHTS)
"""All but weights."""


def download(name: str, revision: str | None, flag: str, wanted: Wanted, on_bytes: OnBytes = ignored) -> Path:
    """Returns the folder of a model of the hub, in the hub's cache. on_bytes: called from another thread, while weights
    are downloaded. Raises SettingsError with `flag`."""
    folder = _snapshot(name, revision, flag, wanted.patterns)
    if not wanted.weights:
        return folder
    if (folder / "config.json").exists():
        wanted.check(folder)
    if revision == folder.name and _has_weights(folder):
        return folder
    sizes = _sizes(name, revision)
    if sizes is None:  # not looked up: whatever the cache has
        if not any(folder.glob("*.safetensors")):
            raise SettingsError(f"{name} has no weights in the hub's cache, and is not looked up: {INSTEAD}", flag)
        return folder
    if INDEX in sizes:
        files = [file.name for file in find_weights(_snapshot(name, revision, flag, (INDEX,)))[0]]
    elif not (files := weight_names(sizes)):
        raise no_weights(name, sizes)
    with _watched(folder, {file: sizes.get(file, 0) for file in files}, on_bytes):
        return _snapshot(name, revision, flag, files)


def is_cached(name: str, commit: str, *, weights: bool) -> bool:
    """True if a commit's config.json, and its weights if asked for, are in this machine's cache. Asks no hub."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json", revision=commit)
    return isinstance(config, str) and (not weights or _has_weights(Path(config).parent))


def revision_flag(flag: str) -> str:
    """Returns the flag of the revision beside that of a name."""
    return "--tokenizer-revision" if flag == "--tokenizer" else "--revision"


def _has_weights(folder: Path) -> bool:
    """True if all files with weights are there that the index of a commit names, or the one where there is no index."""
    if not any((folder / name).exists() for name in (INDEX, SINGLE)):
        return False
    return all(file.exists() for file in find_weights(folder)[0])


def _sizes(name: str, revision: str | None) -> dict[str, int] | None:
    """Returns the files in the repository's root with their bytes; None where the hub does not say."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    with suppress(Exception):  # of many kinds, by the HTTP client; the download that follows says what is wrong
        tree = HfApi().list_repo_tree(name, revision=revision)
        return {file.path: file.size for file in tree if isinstance(file, RepoFile)}
    return None


@contextmanager
def _watched(folder: Path, sizes: Mapping[str, int], on_bytes: OnBytes) -> Iterator[None]:
    """Tells how much of the files is there, each second from now on. folder: the snapshot, beside whose `blobs` the
    hub's library writes. Other downloads of the same model count too, up to the total."""
    blobs, total = folder.parent.parent / "blobs", sum(sizes.values())
    there = sum(size for name, size in sizes.items() if (folder / name).exists())
    before, ended = _bytes_in(blobs), threading.Event()

    def tell() -> None:
        while not ended.wait(PROGRESS_S):
            on_bytes(min(total, there + _bytes_in(blobs) - before), total)

    thread = threading.Thread(target=tell, name="download progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bytes_in(folder: Path) -> int:
    """The bytes that files in a folder take, of which some may come and go."""
    total = 0
    for file in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError):
            total += file.stat().st_blocks * 512
    return total


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
