"""The folder that is made of a GGUF file's header: config.json, the tokenizer's files, and where tensors stand.

Whoever reads a model reads a folder; for GGUF this is one in the user's cache (cache_folder()), made once for a file as
it is, a few MB and no weights: those are read where they are. Called by model_source.py, on each machine by itself.
Torch-free.
"""

import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from tandem.configs.environment import cache_folder
from tandem.configs.errors import SettingsError
from tandem.parallel.stored.gguf_header import PART, gguf_parts, read_gguf
from tandem.parallel.stored.headers import GGUF_INDEX, write_places
from tandem.workers.gguf.gguf_config import gguf_config
from tandem.workers.gguf.gguf_names import gguf_row, gguf_tensors
from tandem.workers.text.generation_config import FILE as GENERATION
from tandem.workers.text.generation_config import read_file
from tandem.workers.text.vocabulary.gguf_vocabulary import text_files

SUFFIX: Final = ".gguf"
VERSION: Final = 2
"""A number for what is written: folders of others are not read."""
UNUSED_S: Final = 60 * 86400
LOAD_FORMAT: Final = "--load-format"


def chosen_gguf(folder: Path, *, wanted: bool) -> Path | None:
    """Returns the GGUF file that a folder is served from, the first of its parts: the only one, in a folder without
    safetensors, or where it is wanted. None for a folder of other weights. SettingsError for several."""
    names = sorted(path.name for path in folder.iterdir())
    models = [name for name in names if name.endswith(SUFFIX) and not name.startswith("mmproj")]
    first = [name for name in models if (part := PART.fullmatch(name)) is None or int(part["part"]) == 1] or models[:1]
    has_others = any(name.endswith(".safetensors") for name in names)
    if not first and wanted:
        held = "safetensors" if has_others else "no weights"
        raise SettingsError(f"gguf: {folder} holds no GGUF file, but {held}", LOAD_FORMAT)
    if not first or (has_others and not wanted):
        return None
    if len(first) > 1:
        raise SettingsError(
            f"{folder} holds several models in GGUF: {', '.join(first)}; name one, such as {folder / first[0]}", "MODEL"
        )
    return folder / first[0]


def gguf_folder(file: Path) -> Path:
    """Returns the folder that is made of a file, its other parts, and a generation_config.json beside it, whose keys
    go over the header's. SettingsError for one that is not read."""
    files = gguf_parts(file)
    read = [*files, beside] if (beside := file.parent / GENERATION).is_file() else files
    states = [(str(one), state.st_size, state.st_mtime_ns, state.st_ino) for one in read if (state := one.stat())]
    parent = cache_folder() / "gguf"
    folder = parent / blake2b(repr((VERSION, states)).encode(), digest_size=12).hexdigest()
    if (folder / "config.json").is_file():
        with suppress(OSError):  # a cache that can only be read
            os.utime(folder)
        return folder
    headers = [read_gguf(one) for one in files]
    gguf_row(headers[0])
    texts = {"config.json": json.dumps(gguf_config(headers)), **text_files(headers[0].metadata)}
    if said := read_file(beside):
        texts[GENERATION] = json.dumps({**json.loads(texts.get(GENERATION, "{}")), **said})
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_unused(parent)
        made = Path(tempfile.mkdtemp(dir=parent, prefix="new-"))
        for name, text in texts.items():
            (made / name).write_text(text, encoding="utf-8")
        write_places(made / GGUF_INDEX, gguf_tensors(headers))
        with suppress(OSError):  # another process was first
            made.rename(folder)
        shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        words = f"cannot write {error.filename or parent}, where a GGUF file's header is kept: {error.strerror}"
        raise SettingsError(f"{words}; XDG_CACHE_HOME names another folder", "MODEL") from error
    return folder


def _remove_unused(parent: Path) -> None:
    for folder in parent.iterdir():
        with suppress(OSError):
            if folder.stat().st_mtime < time.time() - UNUSED_S:
                shutil.rmtree(folder)
