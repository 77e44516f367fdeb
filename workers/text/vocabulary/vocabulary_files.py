"""The file of a folder that holds the vocabulary, and the `tokenizers` tokenizer made of it.

Called by tokenizer.py. Read are tokenizer.json, GPT-2's
vocab.json with merges.txt, SentencePiece's tokenizer.model and Mistral's tekken.json, in this order. A file that is not
read is refused by name, with what to do.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tandem.parallel.stored.headers import POINTER, is_pointer
from tandem.workers.messages.errors import SettingsError
from tandem.workers.text.vocabulary.declared_tokens import NAMED_SPECIAL_TOKENS, content_of, declared_tokens

BYTE_LEVEL = frozenset({"", "GPT2Tokenizer"})
"""Classes of tokenizers that vocab.json and merges.txt are enough for; others split texts in ways of their own."""
SENTENCEPIECE = frozenset({"", "LlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizer", "TokenizersBackend"})
"""Classes whose ids are those of tokenizer.model; others shift them or change texts before."""
UNFRAMED = "GPTNeoXTokenizer"
"""The class whose tokenizers have no tokens around a text, whatever tokenizer.json says."""
UNFRAMED_TYPES = frozenset({"gpt_neox", "mpt", "olmo"})
"""model_types of config.json that mean this class where none is named."""
FRAMED_TYPES = frozenset(
    {"granite", "granitemoe", "ministral", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "stablelm"}
)
"""model_types whose tokenizers are not made by their class, but read from tokenizer.json."""
TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")

CONVERT = (
    "Make one of it: python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}')"
    ".save_pretrained('NEW')\", and serve with --tokenizer NEW"
)
CONVERT_SENTENCEPIECE = f"{CONVERT} (first `pip install sentencepiece`)"
OF_TRANSFORMERS = (
    "which does not say how texts are split. Take the tokenizer.json that the folder in transformers' format has"
)
REFUSAL = "no-tokenizer.txt"
"""Says why the vocabulary of a GGUF file is not read (gguf_vocabulary.py)."""
NOT_READ = {
    "vocab.json": f"which is not read without merges.txt or for its tokenizer_class. {CONVERT}",
    "vocab.txt": f"which is not read. {CONVERT}",
    "spiece.model": f"which is not read. {CONVERT_SENTENCEPIECE}",
    "sentencepiece.bpe.model": f"which is not read. {CONVERT_SENTENCEPIECE}",
    "spm.model": f"which is not read. {CONVERT_SENTENCEPIECE}",
    "tokenizer.model.v*": f"which is not read. {CONVERT_SENTENCEPIECE}",
    "*.tiktoken": OF_TRANSFORMERS,
    "tiktoken.model": OF_TRANSFORMERS,
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer, and what its file says beside it.

    special_tokens: by their names in tokenizer_config.json, which wins.
    config: keys that tokenizer_config.json's come before. is_framed: the tokenizer itself says which tokens stand
    around a text, whatever tokenizer_config.json says of BOS and EOS.
    """

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    is_framed: bool = False


def read_vocabulary(folder: Path, config: Mapping[str, Any], flag: str = "--tokenizer") -> Vocabulary:
    """Reads a folder's vocabulary. config: tokenizer_config.json. flag: what gives the folder. SettingsError as in
    find_vocabulary(), and for broken files."""
    path = find_vocabulary(folder, config, flag)
    try:
        return READERS[path.name](path, config)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error.args[0]}", flag) from error
    except Exception as error:  # the library raises bare Exception
        raise SettingsError(f"{path} cannot be read: {error or type(error).__name__}", flag) from error


def find_vocabulary(folder: Path, config: Mapping[str, Any], flag: str) -> Path:
    """Returns the file of READERS that a folder's vocabulary is read from: the first that is there and is enough.
    SettingsError when there is none, which says what to do."""
    of_class = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if (path := folder / "tokenizer.json").is_file():
        return _no_pointer(path, flag)
    if (path := folder / "vocab.json").is_file() and (folder / "merges.txt").is_file() and of_class in BYTE_LEVEL:
        return path
    if (path := folder / "tokenizer.model").is_file():
        return _no_pointer(_sentencepiece(path, of_class, flag), flag)
    if (path := folder / "tekken.json").is_file():
        return _no_pointer(path, flag)
    if (path := folder / REFUSAL).is_file():
        raise SettingsError(path.read_text(encoding="utf-8"), flag)
    for name, advice in NOT_READ.items():
        if found := sorted(folder.glob(name)):
            raise SettingsError(
                f"{folder} holds no tokenizer.json, but {found[0].name}, {advice.format(folder=folder)}", flag
            )
    advice = "or give a folder that does" if flag == "--tokenizer" else "or pass --tokenizer with a folder that does"
    raise SettingsError(f"{folder} holds no tokenizer.json: copy the tokenizer's files into it, {advice}", flag)


def _no_pointer(path: Path, flag: str) -> Path:
    if is_pointer(path):
        raise SettingsError(f"{path}: {POINTER}", flag)
    return path


def _sentencepiece(path: Path, of_class: str, flag: str) -> Path:
    """Refuses a tokenizer.model that is tiktoken's, as Llama 3's own, and classes that do more than the file says."""
    with path.open("rb") as file:
        tiktoken = TIKTOKEN.match(file.read(1024)) is not None
    if tiktoken:
        raise SettingsError(
            f"{path.parent} holds no tokenizer.json, but {path.name} of tiktoken's kind, {OF_TRANSFORMERS}",
            flag,
        )
    if of_class not in SENTENCEPIECE:
        raise SettingsError(
            f"{path.parent} holds no tokenizer.json, but {path.name}, which is not read for {of_class}. "
            f"{CONVERT_SENTENCEPIECE.format(folder=path.parent)}",
            flag,
        )
    return path


def _tokenizer_json(path: Path, config: Mapping[str, Any]) -> Vocabulary:
    """Reads the file, whose own template adds BOS and EOS, as in transformers 5, not tokenizer_config.json."""
    tokenizer = Tokenizer.from_file(str(path))
    kind = read_json(path.parent / "config.json").get("model_type")
    of_class = str(config.get("tokenizer_class") or (UNFRAMED if kind in UNFRAMED_TYPES else ""))
    if of_class.removesuffix("Fast") == UNFRAMED and kind not in FRAMED_TYPES:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return Vocabulary(tokenizer, is_framed=True)


def _byte_level(path: Path, config: Mapping[str, Any]) -> Vocabulary:
    """Makes the tokenizer of vocab.json, merges.txt and added_tokens.json, as GPT-2's is made of them."""
    tokenizer = Tokenizer(models.BPE.from_file(str(path), str(path.parent / "merges.txt")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    added = sorted(read_json(path.parent / "added_tokens.json").items(), key=lambda item: int(item[1]))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, _ in added])
    return Vocabulary(tokenizer)


def _tokenizer_model(path: Path, config: Mapping[str, Any]) -> Vocabulary:
    """BOS stands before every text unless the config says no: Llama's and Gemma's classes never needed the key."""
    from tandem.workers.text.vocabulary import sentencepiece_model

    model = sentencepiece_model.read_model(path)
    named = sentencepiece_model.named_tokens(model)
    known = {**read_json(path.parent / "special_tokens_map.json"), **config}
    special = [known.get(name, named.get(name)) for name in NAMED_SPECIAL_TOKENS]
    special += known.get("additional_special_tokens") or []
    added = read_json(path.parent / "added_tokens.json")
    declared = declared_tokens(config, added, filter(None, map(content_of, special)))
    tokenizer = sentencepiece_model.to_tokenizer(model, declared, config)
    return Vocabulary(tokenizer, special_tokens=named, config={"add_bos_token": True})


def _tekken(path: Path, config: Mapping[str, Any]) -> Vocabulary:
    from tandem.workers.text.vocabulary.tekken_file import read_tekken

    tokenizer, named = read_tekken(path)
    return Vocabulary(tokenizer, special_tokens=named, config={"add_bos_token": True})


READERS: Mapping[str, Callable[[Path, Mapping[str, Any]], Vocabulary]] = {
    "tokenizer.json": _tokenizer_json,
    "vocab.json": _byte_level,
    "tokenizer.model": _tokenizer_model,
    "tekken.json": _tekken,
}


def read_json(path: Path, flag: str = "--tokenizer") -> dict[str, Any]:
    """Returns a JSON object from a file; {} when there is no file. SettingsError when it is not an object, with `flag`,
    what gives the folder."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{path} is not JSON: {error}", flag) from error
    if not isinstance(value, dict):
        raise SettingsError(f"{path} does not hold a JSON object", flag)
    return value
