"""Sources of adapters: --lora-modules, --lora-root and --lora-watch-dir, and what a client may name.

Called by the launcher (every path becomes absolute before it changes folder), the gateway and `tandem adapters`. Looks
at paths only; what lies there is checked by cluster/adapters/checks.py.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from tandem.cluster.adapters.entries import NAME_RULE, is_name
from tandem.configs.errors import SettingsError
from tandem.configs.schema import AdapterSettings
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import is_url

FILES = ("adapter_config.json", "adapter_model.safetensors")


class Module(NamedTuple):
    """One --lora-modules."""

    name: str
    source: str


def absolute(source: str) -> str:
    """A folder's absolute path as it was named, links kept; a URL as it is."""
    return source if is_url(source) else str(Path(source).expanduser().absolute())


def resolved(settings: AdapterSettings) -> AdapterSettings:
    """The same with every path absolute. SettingsError for a --lora-watch-dir or --lora-root that is no folder."""
    modules = tuple(f"{name}={absolute(source)}" for name, _, source in (m.partition("=") for m in settings.modules))
    for flag, folders in (("--lora-root", settings.roots), ("--lora-watch-dir", _some(settings.watch_dir))):
        for folder in folders:
            if is_url(folder) and flag == "--lora-root":
                continue
            if is_url(folder):
                raise SettingsError(f"{folder}: only a folder of this machine can be watched", flag)
            if not Path(folder).expanduser().is_dir():
                raise SettingsError(f"{folder}: no such folder", flag)
    watch_dir = absolute(settings.watch_dir) if settings.watch_dir is not None else None
    return replace(settings, modules=modules, roots=tuple(map(absolute, settings.roots)), watch_dir=watch_dir)


def modules_of(settings: AdapterSettings, bases: Iterable[str]) -> list[Module]:
    """--lora-modules. SettingsError for a name that no adapter can have."""
    taken = set(bases)
    found = []
    for text in settings.modules:
        name, _, source = text.partition("=")
        if not is_name(name):
            raise SettingsError(f"{name!r} is no name for an adapter: {NAME_RULE}", "--lora-modules")
        if name in taken:
            raise SettingsError(f"{name} is the name of the model itself", "--lora-modules")
        found.append(Module(name, source))
    return found


def modules_digest(base: str, modules: Sequence[Module]) -> str:
    """Names --lora-modules beside a base model: their names and where they come from, not what lies there."""
    text = json.dumps([base, *sorted(modules)])
    return hashlib.sha256(text.encode()).hexdigest()


def roots_of(settings: AdapterSettings) -> tuple[str, ...]:
    """The folders and URLs that a client may load from: --lora-root, by default the parents of --lora-modules."""
    if settings.roots:
        return settings.roots
    sources = (text.partition("=")[2] for text in settings.modules)
    return tuple(dict.fromkeys(source.rstrip("/").rpartition("/")[0] or "/" for source in sources))


def allowed_source(path: str, roots: Collection[str]) -> str:
    """The source that a client named, when it lies under a root: a folder, links resolved, with the files that count,
    or a URL. RequestRefused in the same words whether it lies elsewhere or nowhere."""
    words = "lora_path must be the absolute path of a folder, or a URL, under --lora-root."
    if not roots:
        words = "Nothing may be loaded over HTTP: the service was started without --lora-root."
    refused = RequestRefused(words, code="invalid_value", param="lora_path")
    if is_url(path):
        prefixes = [root.rstrip("/") + "/" for root in roots if is_url(root)]
        if not any(path.startswith(prefix) and _is_plain(path.removeprefix(prefix)) for prefix in prefixes):
            raise refused
        return path.rstrip("/")
    try:
        real_roots = [Path(root).resolve() for root in roots if not is_url(root)]
        if not Path(path).is_absolute():
            raise refused
        folder = Path(path).resolve()
        inside = [folder, *((folder / name).resolve() for name in FILES)]
        if not folder.is_dir() or not all(any(p.is_relative_to(root) for root in real_roots) for p in inside):
            raise refused
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, a circle of links, a name too long
        raise refused from error
    return str(folder)


def _is_plain(rest: str) -> bool:
    """True when every client of a file system reads it as steps down: no escapes, queries, chains or ways up."""
    if not rest.isprintable() or "::" in rest or any(character in rest for character in "%?#\\"):
        return False
    return not {".", ".."} & {*rest.split("/")}


def _some(value: str | None) -> tuple[str, ...]:
    return () if value is None else (value,)
