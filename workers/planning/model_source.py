"""The model's folder from the MODEL argument: the bundled demo, a folder, or a hub id that is downloaded.

Called by LLM (workers/offline/llm.py), and for the verbs of the command line by cluster/deploy/resolved_settings.py, so
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
from tandem.parallel.stored.headers import no_weights
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.hub import TEXT, Wanted, download, revision_flag
from tandem.workers.text.chat_template import chosen_templates
from tandem.workers.text.generation_config import FILE as GENERATION
from tandem.workers.text.generation_config import FROM_MODEL, WITHOUT

DEMO = "demo"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
DIGESTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
)
"""Small files that say what a model's ids mean and how its weights are computed with."""


def resolve_model(model: ModelSettings) -> ModelSettings:
    """Resolves the settings of a model: model and tokenizer are absolute paths of folders, chat_template is one of a
    file, served_model_name is set and revisions are None. Hub ids are downloaded, or found in the hub's cache.

    Raises SettingsError with the flag to change.
    """
    folder = find_model(model.model, model.revision, "MODEL", serving(model))
    tokenizer = None
    if model.tokenizer is not None or model.tokenizer_revision not in (None, model.revision):
        tokenizer = str(find_model(model.tokenizer or model.model, model.tokenizer_revision, "--tokenizer", TEXT))
    resolved: ModelSettings = replace(
        model,
        model=str(folder),
        revision=None,
        tokenizer_revision=None,
        served_model_name=model.served_model_name or (model.model,),
        tokenizer=tokenizer,
        chat_template=_template(model.chat_template, Path(tokenizer or folder)),
        generation_config=_generation_folder(model.generation_config),
    )
    _check_remote_code(folder, resolved)
    return resolved


def serving(model: ModelSettings) -> Wanted:
    """Returns what is downloaded of a model to serve it. Weights come last, when config.json has been found to be of a
    model that is served."""

    def check(folder: Path) -> None:
        load_spec(folder, model.hf_overrides or None)

    return Wanted(TEXT.patterns, weights=model.load_format == "safetensors", check=check)


def model_digest(model: ModelSettings) -> str:
    """16 hex digits that differ for two models: a request made for one is nothing for the other. Of resolved settings.
    Covers the folder (of the hub's cache: also the revision), its config, quantization and tokenizer, and the settings
    that change what is computed; the weights are not read, so others that took their place in the folder are not seen.
    """
    overrides = json.dumps(model.hf_overrides, sort_keys=True)
    dummy = (model.seed or 0) if model.load_format == "dummy" else None
    ends = json.dumps((model.generation_config, model.override_generation_config), sort_keys=True)
    chosen = (model.model, model.revision, overrides, dummy, model.quantization, model.batch_invariant, ends)
    digest = blake2b(repr(chosen).encode(), digest_size=8)
    for folder in dict.fromkeys((model.model, model.tokenizer or model.model)):
        for name in DIGESTED:
            file = Path(folder) / name
            data = file.read_bytes() if file.is_file() else b""
            digest.update(f"{name}|{len(data)}|".encode() + data)
    return digest.hexdigest()


def find_model(name: str, revision: str | None, flag: str, wanted: Wanted = TEXT) -> Path:
    """Finds the folder of a model: the demo's, an existing folder, or a snapshot of the hub that has what is `wanted`.
    Without the hub its cache is used. Raises SettingsError with `flag`."""
    folder = Path(name).expanduser()
    if name == DEMO:  # also where the working folder has a "demo" of its own; ./demo names that one
        folder = DEMO_MODEL
    if folder.is_dir():
        if revision is not None:
            raise SettingsError(f"{name} is a folder; only models of the hub have revisions", revision_flag(flag))
        return folder.resolve()
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if folder.is_file() and folder.suffix in (".gguf", ".bin"):
        raise no_weights(str(folder.parent), [folder.name])
    if folder.is_file():
        raise SettingsError(
            f"{name} is a file; {flag} is the folder that it is in, with config.json and tokenizer", flag
        )
    if looks_like_path or folder.exists() or not HUB_ID.fullmatch(name):
        raise SettingsError(f"{name}: no such folder", flag)
    return download(name, revision, flag, wanted)


def _generation_folder(given: str) -> str:
    """The absolute path of the folder of --generation-config, or its word."""
    if given in (FROM_MODEL, WITHOUT):
        return given
    folder = Path(given).expanduser()
    if not (folder / GENERATION).is_file():
        words = f"{given}: neither {FROM_MODEL} nor {WITHOUT}, nor a folder with a {GENERATION}"
        raise SettingsError(words, "--generation-config")
    return str(folder.resolve())


def _template(given: str | None, text_folder: Path) -> str | None:
    """The absolute path of the chat template, or the name of one in the folder. Raises SettingsError when it is
    neither."""
    if given is None:
        return None
    path = Path(given).expanduser()
    if path.is_file():
        return str(path.resolve())
    chosen_templates(text_folder, given)
    return given


def _check_remote_code(folder: Path, model: ModelSettings) -> None:
    is_model = (folder / "config.json").is_file()  # a folder that is none is told so first
    if is_model and not model.trust_remote_code and any(folder.glob("*.py")):
        raise SettingsError(
            f"{folder} ships Python files; Tandem never runs them, and serves the model with its own code "
            "only when --trust-remote-code is given",
            "--trust-remote-code",
        )
