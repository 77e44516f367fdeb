"""A model folder's tokenizer, without transformers: text to token ids and back.

Used by the gateway, offline runs and the CLI. Reads the vocabulary (vocabulary/), tokenizer_config.json,
special_tokens_map.json and generation_config.json. Immutable after loading, so threads may share it. detokenizer.py
decodes token by token.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from tandem.workers.messages.errors import ContextLengthExceeded, RequestRefused
from tandem.workers.text.generation_config import (
    FILE,
    GenerationConfig,
    GenerationDefaults,
    generation_config,
    read_file,
)
from tandem.workers.text.vocabulary.declared_tokens import NAMED_SPECIAL_TOKENS, add_declared, content_of, in_config
from tandem.workers.text.vocabulary.vocabulary_files import read_json, read_vocabulary


class ModelTokenizer:
    """A vocabulary with the special tokens and defaults of the other files in its folder."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: frozenset[int],
        defaults: GenerationDefaults,
        config: Mapping[str, Any],
        remarks: tuple[str, ...] = (),
    ) -> None:
        self.backend = tokenizer
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = eos_token_ids
        self.defaults = defaults
        self.config = dict(config)
        self.remarks = remarks  # lines for the start
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


def check_text_ids(tokenizer: ModelTokenizer, token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuses a text's ids outside the model's vocabulary: RequestRefused names the first one, and why there is one."""
    if tokenizer.vocab_size > vocab_size and token_ids and max(token_ids) >= vocab_size:
        bad = next(i for i in token_ids if i >= vocab_size)
        raise RequestRefused(
            f"The text has the token {tokenizer.piece(bad)!r} with id {bad}, for which the model has no row: its "
            f"tokenizer has {tokenizer.vocab_size} tokens, more than the model's vocabulary of {vocab_size}.",
            code="invalid_value",
            param=param,
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


def load_tokenizer(
    folder: Path | str, generation: GenerationConfig | None = None, flag: str = "--tokenizer"
) -> ModelTokenizer:
    """Loads the tokenizer of a model folder. generation: defaults, and the ids that end a text beside the tokenizer's
    own EOS; None: as the folder's files say. flag: what gives the folder. SettingsError when the vocabulary is missing,
    broken or not read."""
    folder = Path(folder)
    config = read_json(folder / "tokenizer_config.json", flag)
    vocabulary = read_vocabulary(folder, config, flag)
    tokenizer = vocabulary.tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special_map = read_json(folder / "special_tokens_map.json", flag)
    special_tokens = _special_tokens(config, special_map, vocabulary.special_tokens)
    _complete_added_tokens(tokenizer, config, special_tokens)
    remarks: tuple[str, ...] = ()
    if vocabulary.is_framed:
        remarks = tuple(_unread(tokenizer, config, special_tokens))
    else:
        _apply_bos_eos(tokenizer, {**vocabulary.config, **config}, special_tokens)
    if generation is None:
        generation = generation_config(read_file(folder / FILE), {}, str(folder / FILE))
    ends = generation.eos_token_ids
    if ends is None:
        ends = _listed_ids(read_json(folder / "config.json", flag).get("eos_token_id"))
    return ModelTokenizer(
        tokenizer,
        special_tokens=special_tokens,
        eos_token_ids=_with_own_eos(ends, tokenizer, special_tokens),
        defaults=generation.defaults,
        config=config,
        remarks=remarks,
    )


def _special_tokens(
    config: Mapping[str, Any], special_map: Mapping[str, Any], vocabulary: Mapping[str, str]
) -> dict[str, str]:
    """Returns the named special tokens (bos_token, ...); tokenizer_config.json wins, as in transformers, then comes
    special_tokens_map.json, then what the vocabulary's own file says."""
    found = {}
    for name in NAMED_SPECIAL_TOKENS:
        token = next((content_of(one[name]) for one in (config, special_map, vocabulary) if name in one), None)
        if token is not None:
            found[name] = token
    return found


def _complete_added_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Adds tokens that only tokenizer_config.json declares; marks the named special tokens as special. SettingsError
    when one would get another id than it is declared with."""
    known = tokenizer.get_added_tokens_decoder()
    add_declared(tokenizer, {i: token for i, token in in_config(config).items() if i not in known})
    specials = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    missing = [token for token in dict.fromkeys(special_tokens.values()) if token not in specials]
    extra = [token for token in map(content_of, config.get("additional_special_tokens") or []) if token]
    missing += [token for token in extra if token not in specials and token not in missing]
    if missing:
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


def _apply_bos_eos(tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Makes a tokenizer add BOS and EOS as the config says, where that sets add_bos_token or add_eos_token."""
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


def _unread(tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for add_bos_token and add_eos_token of the config where the tokenizer does otherwise."""
    ids = tokenizer.encode("a").ids
    for key, name, place in (("add_bos_token", "bos_token", 0), ("add_eos_token", "eos_token", -1)):
        token, stated = special_tokens.get(name), config.get(key)
        adds = token is not None and ids[place : place + 1 or None] == [tokenizer.token_to_id(token)]
        if isinstance(stated, bool) and stated != adds:
            yield (
                f"tokenizer_config.json: {key} {json.dumps(stated)} does not count beside tokenizer.json, as in "
                f"transformers: its template gives texts {'a' if adds else 'no'} {name[:3].upper()}"
            )


def _listed_ids(value: Any) -> tuple[int, ...]:
    return tuple(one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))


def _with_own_eos(listed: tuple[int, ...], tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> frozenset[int]:
    """Returns the ids that end a text: those listed, and the tokenizer's EOS."""
    eos = special_tokens.get("eos_token")
    own = None if eos is None else tokenizer.token_to_id(eos)
    return frozenset(listed if own is None else (*listed, own))
