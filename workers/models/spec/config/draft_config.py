"""The draft model of speculative decoding: that its ids mean what the model's ids mean. See config_reader.py.

Torch-free. Called by workers/planning/resolve.py in every process of a group.
"""

import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from tandem.configs.errors import SettingsError
from tandem.configs.json_flags import SPECULATIVE_CONFIG
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.config.head_config import HEADS, HeadSpec

TOKENIZER = "tokenizer.json"


@lru_cache(maxsize=8)
def read_draft(
    folder: str, quantization: Any, overrides: str, method: str, draft: str, of_draft: Any
) -> ArchSpec | HeadSpec:
    """Returns the spec of the draft model in a folder, or of a head, for the model in another. quantization, of_draft:
    as load_spec() takes them for each; overrides: those of the model, as JSON; method: of --speculative-config.
    SettingsError for a draft that cannot be served, and for one with another vocabulary than the model's."""
    spec = load_spec(Path(folder), json.loads(overrides) or None, quantization)
    try:
        if (read := HEADS.get(method)) is not None:
            return read(Path(draft), spec, of_draft)
        found = load_spec(Path(draft), None, of_draft)
    except SettingsError as error:
        raise type(error)(f"model: {error.args[0]}{_method_hint(Path(draft), method)}", SPECULATIVE_CONFIG) from error
    if found.vocab_size != spec.vocab_size:
        sizes = f"{draft} has a vocabulary of {found.vocab_size} tokens, {folder} one of {spec.vocab_size}"
        raise SettingsError(f"model: {sizes}: a draft model guesses ids of the model's own", SPECULATIVE_CONFIG)
    if (token := _other_token(Path(folder), Path(draft))) is not None:
        words = f"{draft} means another token by id {token} than {folder}: a draft model needs the model's vocabulary"
        raise SettingsError(f"model: {words}", SPECULATIVE_CONFIG)
    return found


def _method_hint(draft: Path, method: str) -> str:
    """Returns the method that a head needs which was given with another one."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        config = json.loads((draft / "config.json").read_text())
        named = "".join(config.get("architectures") or ())
        kinds = {"medusa": "medusa_num_heads" in config, "eagle3": "Eagle3" in named, "eagle": "Eagle" in named}
        needed = next((kind for kind, is_it in kinds.items() if is_it), method)
        return f"; it is a head: give method {needed}" if needed != method else ""
    return ""


def _other_token(folder: Path, draft: Path) -> int | None:
    """Returns an id by which two tokenizer.json mean different tokens; None where there is none, or where one of the
    folders has no such file."""
    files = [path / TOKENIZER for path in (folder, draft)]
    if not all(file.is_file() for file in files):
        return None
    texts = [file.read_bytes() for file in files]
    if texts[0] == texts[1]:
        return None
    one, other = (_tokens(json.loads(text)) for text in texts)
    return next((token for token in sorted(one.keys() & other.keys()) if one[token] != other[token]), None)


def _tokens(tokenizer: dict[str, Any]) -> dict[int, str]:
    """Returns the tokens of a tokenizer.json by id. A vocabulary is a mapping, or (Unigram) a list of pairs."""
    vocab = tokenizer.get("model", {}).get("vocab", {})
    named = vocab.items() if isinstance(vocab, dict) else ((pair[0], place) for place, pair in enumerate(vocab))
    added = {token["id"]: token["content"] for token in tokenizer.get("added_tokens", ())}
    return {token: word for word, token in named} | added
