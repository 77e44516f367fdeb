"""The model's folder from the MODEL argument: the bundled demo, a folder, or a hub id that is downloaded.

The launcher calls resolve_settings() before it changes its working folder, cluster/app.py for `serve run`.
"""

import re
from pathlib import Path

from msgspec.structs import replace

from tandem.cluster.adapters.sources import resolved as resolved_adapters
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.errors import SettingsError
from tandem.configs.schema import EngineSettings, ModelSettings, ServiceSettings

DEMO = "demo"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "LICENSE*"]


def resolve_settings(settings: ServiceSettings) -> ServiceSettings:
    """Resolves settings: every path is absolute (model, tokenizer, template, log, disk, state, certificates, adapters),
    the model is a folder, served_model_name is set and revision is None. Raises SettingsError with the flag to change.
    """
    model = settings.engine.model
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
    step_log = str(Path(settings.engine.step_log).absolute()) if settings.engine.step_log is not None else None
    cache = settings.engine.cache
    if cache.kv_disk_path is not None:
        cache = replace(cache, kv_disk_path=str(Path(cache.kv_disk_path).expanduser().absolute()))
    engine: EngineSettings = replace(settings.engine, model=resolved, step_log=step_log, cache=cache)
    gateway = replace(
        settings.gateway,
        state_dir=_absolute(settings.gateway.state_dir),
        ssl_certfile=_absolute(settings.gateway.ssl_certfile),
        ssl_keyfile=_absolute(settings.gateway.ssl_keyfile),
        ssl_ca_certs=_absolute(settings.gateway.ssl_ca_certs),
    )
    return replace(settings, engine=engine, gateway=gateway, adapters=resolved_adapters(settings.adapters))


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def find_model(name: str, revision: str | None, flag: str, files: list[str] = FILES) -> Path:
    """Finds the folder of a model: the demo's, an existing folder, or a snapshot of the hub that has the `files`
    (patterns). Offline, the hub's cache is used. Raises SettingsError with `flag`."""
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


def _download(name: str, revision: str | None, flag: str, files: list[str]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=files)).resolve()
    except RepositoryNotFoundError as error:
        raise SettingsError(f"{name} is neither a folder here nor a model on the hub", flag) from error
    except LocalEntryNotFoundError as error:
        raise SettingsError(f"{name} is no folder here, and the hub cannot be reached to download it", flag) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise SettingsError(f"{name} cannot be downloaded: {str(error).splitlines()[0]}", flag) from error


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
