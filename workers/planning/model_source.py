"""The model's folder from the MODEL argument: the bundled demo, a folder, or a hub id that is downloaded.

Called by LLM (workers/offline.py), and for the verbs of the command line by cluster/deploy/resolved_settings.py, so
that all of them take the same names. Torch-free.
"""

import json
import re
from hashlib import blake2b
from pathlib import Path

from msgspec.structs import replace

from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.errors import SettingsError
from tandem.configs.schema import ModelSettings

DEMO = "demo"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "LICENSE*")
DIGESTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
"""What a model's ids mean and how its weights are computed with, in small files."""
INSTEAD = "give the folder of a model, or fill that cache where the hub can be reached (`hf download`)"


def resolve_model(model: ModelSettings) -> ModelSettings:
    """Resolves the settings of a model: model and tokenizer are absolute paths of folders, chat_template is one of a
    file, served_model_name is set and revision is None. Hub ids are downloaded, or found in the hub's cache.

    Raises SettingsError with the flag to change.
    """
    folder = find_model(model.model, model.revision, "MODEL")
    resolved: ModelSettings = replace(
        model,
        model=str(folder),
        revision=None,
        served_model_name=model.served_model_name or (model.model,),
        tokenizer=str(find_model(model.tokenizer, None, "--tokenizer")) if model.tokenizer is not None else None,
        chat_template=_template(model.chat_template),
    )
    _check_remote_code(folder, resolved)
    return resolved


def model_digest(model: ModelSettings) -> str:
    """16 hex digits that differ for two models: a request made for one is nothing for the other. Of resolved settings.
    Covers the folder (of the hub's cache: also the revision), its config, quantization and tokenizer, and the settings
    that change what is computed; the weights are not read, so others that took their place in the folder are not seen.
    """
    overrides = json.dumps(model.hf_overrides, sort_keys=True)
    dummy = model.seed if model.load_format == "dummy" else None
    chosen = (model.model, model.revision, overrides, dummy, model.quantization)
    digest = blake2b(repr(chosen).encode(), digest_size=8)
    for folder in dict.fromkeys((model.model, model.tokenizer or model.model)):
        for name in DIGESTED:
            file = Path(folder) / name
            data = file.read_bytes() if file.is_file() else b""
            digest.update(f"{name}|{len(data)}|".encode() + data)
    return digest.hexdigest()


def find_model(name: str, revision: str | None, flag: str, files: tuple[str, ...] = FILES) -> Path:
    """Finds the folder of a model: the demo's, an existing folder, or a snapshot of the hub that has the `files`
    (patterns). Without the hub its cache is used. Raises SettingsError with `flag`."""
    folder = Path(name).expanduser()
    if name == DEMO:  # also where the working folder has a "demo" of its own; ./demo names that one
        folder = DEMO_MODEL
    if folder.is_dir():
        if revision is not None:
            raise SettingsError(f"{name} is a folder; only models of the hub have revisions", "--revision")
        return folder.resolve()
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_path or folder.exists() or not HUB_ID.fullmatch(name):
        raise SettingsError(f"{name}: no such folder", flag)
    return _download(name, revision, flag, files)


def _download(name: str, revision: str | None, flag: str, files: tuple[str, ...]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(files))).resolve()
    except GatedRepoError as error:
        raise SettingsError(
            f"{name} is gated: accept its conditions on the hub, and set HF_TOKEN to a token that may read it", flag
        ) from error
    except RepositoryNotFoundError as error:
        raise SettingsError(
            f"{name} is neither a folder here nor a model on the hub; for a private one set HF_TOKEN", flag
        ) from error
    except RevisionNotFoundError as error:
        raise SettingsError(f"{name} has no revision {revision} on the hub", "--revision") from error
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


def _template(given: str | None) -> str | None:
    """The absolute path of the chat template. Raises SettingsError when there is no such file."""
    if given is None:
        return None
    path = Path(given).expanduser()
    if not path.is_file():
        raise SettingsError(f"{given}: no such file", "--chat-template")
    return str(path.resolve())


def _check_remote_code(folder: Path, model: ModelSettings) -> None:
    if not model.trust_remote_code and any(folder.glob("*.py")):
        raise SettingsError(
            f"{folder} ships Python files; Tandem never runs them, and serves the model with its own code "
            "only when --trust-remote-code is given",
            "--trust-remote-code",
        )
