"""The tokens that a folder declares beside its vocabulary, with their ids and flags.

Called by vocabulary_files.py and tokenizer.py. They stand in tokenizer_config.json (`added_tokens_decoder`) or, older,
in added_tokens.json, as transformers reads them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tandem.workers.messages.errors import SettingsError

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def content_of(token: Any) -> str | None:
    """Returns a special token's text, which is a string or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def in_config(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Returns tokenizer_config.json's `added_tokens_decoder` by id."""
    found = {}
    declared: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    for token_id, spec in sorted(declared.items(), key=lambda item: int(item[0])):
        if (content := content_of(spec)) is not None:
            flags = {key: bool(spec[key]) for key in FLAGS if key in spec}
            found[int(token_id)] = AddedToken(content, special=bool(spec.get("special", False)), **flags)
    return found


def declared_tokens(
    config: Mapping[str, Any], added: Mapping[str, int], special: Iterable[str]
) -> dict[int, AddedToken]:
    """Returns the declared tokens by id. added: of added_tokens.json, which counts where the config has none.
    special: those of its tokens that are special."""
    if found := in_config(config):
        return found
    names = frozenset(special)
    return {
        int(token_id): AddedToken(token, special=token in names, normalized=token not in names)
        for token, token_id in sorted(added.items(), key=lambda item: int(item[1]))
    }


def add_declared(tokenizer: Tokenizer, declared: Mapping[int, AddedToken]) -> None:
    """Adds tokens in the order of their ids. SettingsError when the library gives one another id: the model's row of
    that id is what it means."""
    for token_id in sorted(declared):
        token = declared[token_id]
        tokenizer.add_tokens([token])
        given = tokenizer.token_to_id(token.content)
        if given != token_id:
            raise SettingsError(
                f"token {token.content!r} is declared with id {token_id}, but the vocabulary gives it {given}",
                "--tokenizer",
            )
