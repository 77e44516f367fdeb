"""A model folder's tokenizer, without transformers: text to token ids and back.

Used by the gateway, offline runs and the CLI. Reads tokenizer.json (the `tokenizers` library) or GPT-2's older files,
tokenizer_config.json, special_tokens_map.json and generation_config.json. Immutable after loading, so threads may share
it. detokenizer.py decodes token by token.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tandem.parallel.stored.headers import POINTER, is_pointer
from tandem.workers.messages.errors import ContextLengthExceeded, RequestRefused, SettingsError
from tandem.workers.text.generation_config import (
    FILE,
    GenerationConfig,
    GenerationDefaults,
    generation_config,
    read_file,
)

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

BYTE_LEVEL = (None, "GPT2Tokenizer", "GPT2TokenizerFast")
"""Classes of tokenizers that vocab.json and merges.txt are enough for; others split texts in ways of their own."""
SLOW_FILES = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
MAKE_FAST = (
    "python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('FOLDER').save_pretrained('NEW')\" "
    "(of a tokenizer.model after `pip install sentencepiece`), and serve with --tokenizer NEW"
)


class ModelTokenizer:
    """tokenizer.json with the special tokens and defaults of the other files in its folder."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: frozenset[int],
        defaults: GenerationDefaults,
        config: Mapping[str, Any],
    ) -> None:
        self.backend = tokenizer
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = eos_token_ids
        self.defaults = defaults
        self.config = dict(config)
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.hidden_token_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._max_piece_bytes = max((len(piece.encode("utf-8", "replace")) for piece in vocabulary), default=1)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of `text`. With add_special_tokens the tokenizer's post-processor adds BOS and the
        like. Other threads run meanwhile: of the library's functions only those of batches let go of the interpreter,
        and this one keeps no offsets, which takes half the time."""
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`; unknown ids give no text."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, token_id: int) -> str | None:
        """Returns the vocabulary's spelling of a token, None for an unknown id."""
        piece: str | None = self.backend.id_to_token(token_id)
        return piece

    def token_id(self, piece: str) -> int | None:
        """Returns the id of a vocabulary entry, None for an unknown one."""
        found: int | None = self.backend.token_to_id(piece)
        return found

    def check_bytes(self, text: str, max_tokens: int, param: str) -> None:
        """Refuses a text that cannot fit in `max_tokens` under any tokenization, before it is tokenized.

        ContextLengthExceeded names `param`. A vocabulary entry spells at most `_max_piece_bytes` bytes, which bounds
        the text.
        """
        limit = max_tokens * self._max_piece_bytes
        if len(text) > limit or (len(text) * 4 > limit and len(text.encode()) > limit):
            raise ContextLengthExceeded(
                f"The prompt is longer than the model's context of {max_tokens} tokens can hold "
                f"({len(text)} characters).",
                param,
            )


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuses ids outside the model's vocabulary: RequestRefused names the first one."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise RequestRefused(
            f"Token id {bad} is outside the vocabulary (0 to {vocab_size - 1}).", code="invalid_value", param=param
        )


def last_tokens(token_ids: list[int], keep: int | None, max_model_len: int) -> list[int]:
    """Returns a prompt that is to be embedded, cut as truncate_prompt_tokens (`keep`) says: its last tokens stay, as in
    vLLM. -1: as many as the context holds; None: all."""
    return token_ids if keep is None else token_ids[-(max_model_len if keep == -1 else keep) :]


def load_tokenizer(folder: Path | str, generation: GenerationConfig | None = None) -> ModelTokenizer:
    """Loads the tokenizer of a model folder. generation: defaults, and the ids that end a text beside the tokenizer's
    own EOS; None: as the folder's files say. SettingsError when tokenizer.json is missing or broken."""
    folder = Path(folder)
    config = read_json(folder / "tokenizer_config.json")
    tokenizer = read_backend(folder, config)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special_tokens = _special_tokens(config, read_json(folder / "special_tokens_map.json"))
    _complete_added_tokens(tokenizer, config, special_tokens)
    _apply_bos_eos(tokenizer, config, special_tokens)
    if generation is None:
        generation = generation_config(read_file(folder / FILE), {}, str(folder / FILE))
    ends = generation.eos_token_ids
    if ends is None:
        ends = _listed_ids(read_json(folder / "config.json").get("eos_token_id"))
    return ModelTokenizer(
        tokenizer,
        special_tokens=special_tokens,
        eos_token_ids=_with_own_eos(ends, tokenizer, special_tokens),
        defaults=generation.defaults,
        config=config,
    )


def read_backend(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Reads tokenizer.json, or the vocab.json and merges.txt of GPT-2's kind. config: tokenizer_config.json.
    SettingsError as in find_backend(), and for broken files."""
    path = find_backend(folder, config)
    try:
        return _byte_level(folder, config) if path.name == "vocab.json" else Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise SettingsError(f"{path} cannot be read: {error}", "--tokenizer") from error


def find_backend(folder: Path, config: Mapping[str, Any]) -> Path:
    """Returns the tokenizer.json of a folder, or the vocab.json beside which merges.txt is enough. SettingsError when
    there is neither, which says what to do."""
    path, older = folder / "tokenizer.json", folder / "vocab.json"
    if path.is_file():
        if is_pointer(path):
            raise SettingsError(f"{path}: {POINTER}", "--tokenizer")
        return path
    if older.is_file() and (folder / "merges.txt").is_file() and config.get("tokenizer_class") in BYTE_LEVEL:
        return older
    found = [name for name in SLOW_FILES if (folder / name).is_file()]
    found += sorted(path.name for path in folder.glob("*.tiktoken"))
    if not found:
        raise SettingsError(f"{folder} holds no tokenizer.json", "--tokenizer")
    raise SettingsError(
        f"{folder} holds no tokenizer.json, but {found[0]}, which is not read. Make one of it: {MAKE_FAST}",
        "--tokenizer",
    )


def _byte_level(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Makes the tokenizer of vocab.json, merges.txt and added_tokens.json, as GPT-2's is made of them."""
    tokenizer = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    added = sorted(read_json(folder / "added_tokens.json").items(), key=lambda item: int(item[1]))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, _ in added])
    return tokenizer


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object from a file; {} when there is no file. SettingsError when it is not an object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{path} is not JSON: {error}", "--tokenizer") from error
    if not isinstance(value, dict):
        raise SettingsError(f"{path} does not hold a JSON object", "--tokenizer")
    return value


def _content(token: Any) -> str | None:
    """Returns a special token's text, which is a string or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """Returns the named special tokens (bos_token, ...); tokenizer_config.json wins, as in transformers."""
    found = {}
    for name in NAMED_SPECIAL_TOKENS:
        token = _content(config[name]) if name in config else _content(special_map.get(name))
        if token is not None:
            found[name] = token
    return found


def _complete_added_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Adds tokens that only tokenizer_config.json declares; marks the named special tokens as special."""
    known = tokenizer.get_added_tokens_decoder()
    declared: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    for token_id, spec in sorted(declared.items(), key=lambda item: int(item[0])):
        content = _content(spec)
        if content is None or int(token_id) in known:
            continue
        flags = {key: bool(spec[key]) for key in ("lstrip", "rstrip", "single_word", "normalized") if key in spec}
        special = bool(spec.get("special", False))
        tokenizer.add_tokens([AddedToken(content, special=special, **flags)])
    specials = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    missing = [token for token in dict.fromkeys(special_tokens.values()) if token not in specials]
    extra = [token for token in map(_content, config.get("additional_special_tokens") or []) if token]
    missing += [token for token in extra if token not in specials and token not in missing]
    if missing:
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


def _apply_bos_eos(tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Replaces the file's post-processor where the config sets add_bos_token or add_eos_token."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    bos = special_tokens.get("bos_token") if config.get("add_bos_token") else None
    eos = special_tokens.get("eos_token") if config.get("add_eos_token") else None
    used = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None]
    single = " ".join([*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])])
    pair = " ".join([single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=list(dict.fromkeys(used))
    )


def _listed_ids(value: Any) -> tuple[int, ...]:
    return tuple(one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))


def _with_own_eos(listed: tuple[int, ...], tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> frozenset[int]:
    """Returns the ids that end a text: those listed, and the tokenizer's EOS."""
    eos = special_tokens.get("eos_token")
    own = None if eos is None else tokenizer.token_to_id(eos)
    return frozenset(listed if own is None else (*listed, own))
