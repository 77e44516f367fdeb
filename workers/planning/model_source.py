"""The model's folder from the MODEL argument: the bundled demo, a folder, or a hub id that is downloaded.

Two steps. pin_model() says once which model is meant, in words that hold on every machine: a hub id and its commit, an
absolute path. model_here() finds or downloads that on one machine; gateways, coordinators and ranks each call it, and
of those on one node one downloads, as the hub's cache has locks. resolve_model() is both, for one machine. Torch-free.
"""

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from msgspec.structs import replace

from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.errors import SettingsError
from tandem.configs.json_flags import SPECULATIVE_CONFIG
from tandem.configs.schema import EngineSettings, ModelSettings
from tandem.parallel.stored.headers import no_weights
from tandem.workers.gguf.gguf_folder import LOAD_FORMAT, SUFFIX, chosen_gguf, gguf_folder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.weights.weight_config import plan_of_folder
from tandem.workers.planning.hub import TEXT, OnBytes, Wanted, download, ignored, is_cached, revision_flag
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
    """Resolves the settings of a model for this machine: pin_model() and model_here(). Raises SettingsError with the
    flag to change."""
    return model_here(pin_model(model))


def pin_model(model: ModelSettings) -> ModelSettings:
    """Returns the settings of a model as they hold on every machine: model and tokenizer are hub ids, with the commits
    that are meant as their revisions, or absolute paths, or the demo's name; chat_template is an absolute path if it is
    a file; served_model_name is set. Of a hub's model all but the weights is here then. Raises SettingsError with the
    flag to change.
    """
    given = _gguf_within(model)
    folder = find_model(given, model.revision, "MODEL", serving(model, weights=False))
    name, revision = _pinned(given, folder)
    tokenizer, tokenizer_revision, text_folder = None, None, folder
    if model.tokenizer is not None or model.tokenizer_revision not in (None, model.revision):
        named = model.tokenizer or model.model
        text_folder = find_model(named, model.tokenizer_revision, "--tokenizer", TEXT)
        tokenizer, tokenizer_revision = _pinned(named, text_folder)
    pinned: ModelSettings = replace(
        model,
        model=name,
        revision=revision,
        tokenizer=tokenizer,
        tokenizer_revision=tokenizer_revision,
        served_model_name=model.served_model_name or (model.model,),
        chat_template=_template(model.chat_template, text_folder),
        generation_config=_generation_folder(model.generation_config),
        draft=of_draft(pin_model, model.draft),
    )
    _check_remote_code(folder, pinned)
    return pinned


def of_draft(call: Callable[[ModelSettings], ModelSettings], draft: ModelSettings | None) -> ModelSettings | None:
    """Returns what a call makes of the settings of a draft model; None without one. Its SettingsErrors name
    --speculative-config."""
    if draft is None:
        return None
    try:
        return call(draft)
    except SettingsError as error:
        raise SettingsError(f"model: {error.args[0]}", SPECULATIVE_CONFIG) from error


def model_here(model: ModelSettings, *, weights: bool = True, on_bytes: OnBytes = ignored) -> ModelSettings:
    """Returns pinned settings with this machine's folders for model and tokenizer, without revisions. What this machine
    lacks of a hub's model is downloaded, weights only if asked for. on_bytes(done, total): called now and then while
    they are, from another thread. Raises SettingsError with the flag to change."""
    folder = find_model(model.model, model.revision, "MODEL", serving(model, weights=weights), on_bytes)
    tokenizer = model.tokenizer
    if tokenizer is not None:
        tokenizer = str(find_model(tokenizer, model.tokenizer_revision, "--tokenizer", TEXT))
    draft = of_draft(lambda draft: model_here(draft, weights=weights, on_bytes=on_bytes), model.draft)
    own = {"model": str(folder), "revision": None, "tokenizer": tokenizer, "tokenizer_revision": None}
    here: ModelSettings = replace(model, **own, draft=draft)
    return here


def engine_here(settings: EngineSettings, *, weights: bool = True) -> EngineSettings:
    """Returns the settings of an engine with model_here() of its model."""
    here: EngineSettings = replace(settings, model=model_here(settings.model, weights=weights))
    return here


def has_model(model: ModelSettings) -> bool:
    """True if the files of a pinned model, and of its draft, are on this machine: for a folder, that it is there. Asks
    no hub."""
    if model.draft is not None and not has_model(model.draft):
        return False
    if model.revision is None:
        return model.model == DEMO or Path(model.model).exists()
    return is_cached(model.model, model.revision, weights=model.load_format != "dummy")


@contextmanager
def named_node(address: str) -> Iterator[None]:
    """Names this machine in the SettingsErrors of what is done meanwhile: others of the cluster may have what it lacks.
    address: of the machine in the cluster; on loopback there is only one machine, and nothing is named."""
    try:
        yield
    except SettingsError as error:
        if address.startswith("127."):
            raise
        raise type(error)(f"node {socket.gethostname()} ({address}): {error}", error.flag) from error


def _gguf_within(model: ModelSettings) -> str:
    """Returns the model's name, or in place of a folder's the GGUF file in it that is served. SettingsError where
    --load-format asks for one that is not there."""
    path, wanted = Path(model.model).expanduser(), model.load_format == "gguf"
    if model.model != DEMO and path.is_dir():
        file = chosen_gguf(path.resolve(), wanted=wanted)
        return model.model if file is None else str(file)
    if wanted and not (path.is_file() and path.suffix == SUFFIX):
        raise SettingsError(f"gguf: {model.model} is no GGUF file, and no folder that holds one", LOAD_FORMAT)
    return model.model


def _pinned(name: str, folder: Path) -> tuple[str, str | None]:
    """The name of a model that was found in `folder`, as every machine understands it, and its revision."""
    if name == DEMO:
        return name, None
    if (path := Path(name).expanduser()).exists():
        return str(path.resolve()), None
    return name, folder.name  # of the hub's cache, whose snapshots are named by their commits


def serving(model: ModelSettings, *, weights: bool = True) -> Wanted:
    """Returns what is downloaded of a model to serve it. Weights, if any, come last, when config.json has been found to
    be of a model that is served."""

    def check(folder: Path) -> None:
        load_spec(folder, model.hf_overrides or None, model.quantization)

    return Wanted(TEXT.patterns, weights=weights and model.load_format != "dummy", check=check)


def model_digest(model: ModelSettings) -> str:
    """16 hex digits that differ for two models: a request made for one is nothing for the other. Of pinned settings.
    Covers the hub id and its commit, or the folder, its config, quantization and tokenizer, and the settings that
    change what is computed; the weights are not read, so others that took their place in the folder are not seen. It
    reads this machine's files.
    """
    here = model_here(model, weights=False)
    overrides = json.dumps(model.hf_overrides, sort_keys=True)
    dummy = (model.seed or 0) if model.load_format == "dummy" else None
    ends = json.dumps((model.generation_config, model.override_generation_config), sort_keys=True)
    is_elsewhere = model.revision is not None or model.model.endswith(SUFFIX)  # here.model is this machine's cache
    name = model.model if is_elsewhere else here.model
    plan = plan_of_folder(Path(here.model), model.hf_overrides, model.quantization).digest()
    chosen = (name, model.revision, overrides, dummy, plan, model.batch_invariant, ends)
    digest = blake2b(repr(chosen).encode(), digest_size=8)
    for folder in dict.fromkeys((here.model, here.tokenizer or here.model)):
        for listed in DIGESTED:
            file = Path(folder) / listed
            data = file.read_bytes() if file.is_file() else b""
            digest.update(f"{listed}|{len(data)}|".encode() + data)
    return digest.hexdigest()


def find_model(name: str, revision: str | None, flag: str, wanted: Wanted = TEXT, on_bytes: OnBytes = ignored) -> Path:
    """Finds the folder of a model: the demo's, an existing folder, or a snapshot of the hub that has what is `wanted`.
    Without the hub its cache is used. on_bytes: as of model_here(). Raises SettingsError with `flag`."""
    folder = Path(name).expanduser()
    if name == DEMO:  # also where the working folder has a "demo" of its own; ./demo names that one
        folder = DEMO_MODEL
    if folder.is_dir():
        if revision is not None:
            raise SettingsError(f"{name} is a folder; only models of the hub have revisions", revision_flag(flag))
        file = chosen_gguf(folder.resolve(), wanted=False)
        return folder.resolve() if file is None else gguf_folder(file)
    looks_like_path = folder.suffix == SUFFIX or name.startswith((".", "/", "~")) or name.count("/") > 1
    if folder.is_file() and folder.suffix == SUFFIX:
        return gguf_folder(folder.resolve())
    if folder.is_file() and folder.suffix == ".bin":
        raise no_weights(str(folder.parent), [folder.name])
    if folder.is_file():
        raise SettingsError(
            f"{name} is a file; {flag} is the folder that it is in, with config.json and tokenizer", flag
        )
    if looks_like_path or folder.exists() or not HUB_ID.fullmatch(name):
        raise SettingsError(f"{name}: no such {'file' if folder.suffix == SUFFIX else 'folder'}", flag)
    return download(name, revision, flag, wanted, on_bytes)


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
    from tandem.workers.text.chat_template import chosen_templates  # jinja2, which ranks need not load

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
