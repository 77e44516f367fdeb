"""Mistral's tekken.json as a tokenizer of the `tokenizers` library.

Called by vocabulary_files.py. The file says all that is needed: how texts are split, pieces of bytes by rank, and the
special tokens, whose ids come first. Files from before special tokens stood in them are refused.
"""

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from tandem.workers.text.vocabulary.bpe_merges import merges_by_rank
from tandem.workers.text.vocabulary.byte_alphabet import byte_level_alphabet

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
FILLER = "<SPECIAL_{}>"
CHARACTERS = dict(enumerate(byte_level_alphabet()))


def read_tekken(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Returns the tokenizer of a file, and its special tokens by their names in tokenizer_config.json. ValueError for a
    file that is not understood, KeyError for one without what every file has."""
    file: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    special = _special_tokens(file)
    ids = {token: i for i, token in enumerate(special)}
    ranks = {_spelled(entry["token_bytes"]): rank for rank, entry in enumerate(_kept(file, len(special)))}
    if clash := ids.keys() & ranks.keys():
        raise ValueError(f"{sorted(clash)[0]!r} is a special token and a piece of text")
    vocabulary = ids | {piece: rank + len(special) for piece, rank in ranks.items()}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges_by_rank(ranks), fuse_unk=False, ignore_merges=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(file["config"]["pattern"]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer, {name: token for name, token in NAMED.items() if token in ids}


def _special_tokens(file: dict[str, Any]) -> list[str]:
    """Returns the special tokens by id, with fillers up to the number that the file reserves."""
    listed: list[dict[str, Any]] | None = file.get("special_tokens")
    if listed is None:
        raise ValueError("it names no special tokens, as files of its first version")
    found = {int(entry["rank"]): str(entry["token_str"]) for entry in listed}
    if sorted(found) != list(range(len(listed))):
        raise ValueError("the ranks of its special tokens have gaps")
    size = file["config"].get("default_num_special_tokens") or len(found)
    return [found.get(i) or FILLER.format(i) for i in range(max(size, len(found)))]


def _kept(file: dict[str, Any], specials: int) -> list[dict[str, Any]]:
    """Returns the pieces that the model knows, best first."""
    size = file["config"].get("default_vocab_size")
    pieces: list[dict[str, Any]] = file["vocab"]
    if any(int(entry.get("rank", i)) != i for i, entry in enumerate(pieces)):
        raise ValueError("its pieces are not in the order of their ranks")
    return pieces if size is None else pieces[: size - specials]


def _spelled(token_bytes: str) -> str:
    """Returns a piece's bytes in GPT-2's characters."""
    return base64.b64decode(token_bytes, validate=True).decode("latin-1").translate(CHARACTERS)
