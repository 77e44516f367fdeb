"""The tokenizer and the texts' facts of a GGUF file's metadata, as the files of a model's folder.

Called by workers/gguf/gguf_folder.py, which writes them. `gpt2` is BPE on bytes, whose texts are split as
tokenizer.ggml.pre names; `llama` is SentencePiece's BPE by scores. Others are refused, with what to do.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tandem.workers.messages.errors import SettingsError
from tandem.workers.text.vocabulary import sentencepiece_model as pieces
from tandem.workers.text.vocabulary.declared_tokens import add_declared
from tandem.workers.text.vocabulary.vocabulary_files import REFUSAL

LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2: Final = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TEKKEN: Final = _WORDS % ("", "", "")
GPT4O: Final = _WORDS % (_ENDS, _ENDS, "{1,3}")
GPT2, DIGITS = "", "digits"
"""Texts are split as GPT-2 splits them; and digits apart from each other."""
SPLITS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "smaug-bpe", "lfm2"), LLAMA3
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jina-es", "jina-de", "roberta-bpe"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
}
"""The ways to split texts, by tokenizer.ggml.pre: an expression, or one of the two words (llama-vocab.cpp)."""
WHOLE_WORDS: Final = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
"""Splits whose words are tokens, where the vocabulary has them, whatever merges say."""
COMPOSED: Final = ("qwen2", "deepseek-r1-qwen", "megrez")
"""Splits of models that compose texts (NFC) first, as tokenizer.json of their folders says."""
NAMES: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ENDS: Final = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Tokens that end a turn whatever the metadata says, as in llama.cpp."""
OTHER: Final = "serve with --tokenizer and the folder, or hub id, of the model that the file was made of"
SAMPLING: Final = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Makes the tokenizer. SettingsError for one that is not read."""
    kind, tokens = metadata.get("tokenizer.ggml.model"), _tokens(metadata)
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
        adds_bos = metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS
    elif kind == "llama":
        tokenizer, adds_bos = _by_scores(metadata, tokens), True
    else:
        raise SettingsError(f"GGUF: a tokenizer of the kind {kind!r} is not read; {OTHER}", "--tokenizer")
    named = _named(metadata, tokens)
    bos = named.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None
    eos = named.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if bos or eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(filter(None, (bos, "$A", eos))),
            pair=" ".join(filter(None, (bos, "$A", eos, bos and f"{bos}:1", "$B:1", eos and f"{eos}:1"))),
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token],
        )
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tokenizer_config.json's keys, chat templates among them."""
    found: dict[str, Any] = _named(metadata, _tokens(metadata))
    template = "tokenizer.chat_template"
    named = {key.removeprefix(f"{template}."): text for key, text in metadata.items() if key.startswith(f"{template}.")}
    if template in metadata:
        named["default"] = metadata[template]
    if named:
        found["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    return found


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns generation_config.json's keys: the tokens that end a text, and what the file says of sampling."""
    tokens, kinds = _tokens(metadata), metadata.get("tokenizer.ggml.token_type") or ()
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends += [i for i, token in enumerate(tokens) if token in ENDS and i < len(kinds) and kinds[i] == pieces.CONTROL]
    sampling = {
        name: metadata[f"general.sampling.{key}"]
        for key, name in SAMPLING.items()
        if f"general.sampling.{key}" in metadata
    }
    return {"eos_token_id": list(dict.fromkeys(i for i in ends if isinstance(i, int))), **sampling}


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise SettingsError(f"GGUF: it holds no tokenizer; {OTHER}", "--tokenizer")
    return tokens


def _named(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in NAMES.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    pre, merges = str(metadata.get("tokenizer.ggml.pre")), metadata.get("tokenizer.ggml.merges") or ()
    if pre not in SPLITS:
        raise SettingsError(f"GGUF: how texts are split, {pre!r}, is not known; {OTHER}", "--tokenizer")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in WHOLE_WORDS))
    split = SPLITS[pre]
    first: list[Any] = []
    if split == DIGITS:
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif split != GPT2:
        first = [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    own = split in (GPT2, DIGITS)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)]
    )
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    marks = {
        i: AddedToken(tokens[i], special=kind == pieces.CONTROL, normalized=False)
        for i, kind in enumerate(kinds[: len(tokens)])
        if kind in (pieces.CONTROL, pieces.USER_DEFINED)
    }
    add_declared(tokenizer, marks)
    return tokenizer


def _by_scores(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """Makes the tokenizer of what SentencePiece's file would hold."""
    model = pieces.new_model()
    kinds = metadata.get("tokenizer.ggml.token_type") or [pieces.NORMAL] * len(tokens)
    scores = metadata.get("tokenizer.ggml.scores") or [-float(i) for i in range(len(tokens))]
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        spelled = pieces.SPACE * len(token) if token and not token.strip(" ") else token
        model.pieces.add(piece=spelled, score=score, type=kind)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is None:
        unknown = next((i for i, kind in enumerate(kinds) if kind == pieces.UNKNOWN), 0)
    model.trainer.model_type, model.trainer.unk_id = pieces.BPE, unknown
    model.trainer.byte_fallback = pieces.BYTE in kinds
    model.normalizer.add_dummy_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    model.normalizer.remove_extra_whitespaces = metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)
    return pieces.to_tokenizer(model, {}, {})


def text_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the files about texts of a model's folder, by name: all but the vocabulary, whose refusal is the content
    of REFUSAL, where it is not read."""
    try:
        found = {"tokenizer.json": gguf_tokenizer(metadata).to_str()}
        found["tokenizer_config.json"] = json.dumps(tokenizer_config(metadata))
        found["generation_config.json"] = json.dumps(generation_config(metadata))
    except SettingsError as error:
        return {REFUSAL: str(error.args[0])}
    except Exception as error:  # the library raises bare Exception
        return {REFUSAL: f"GGUF: its tokenizer cannot be read: {error or type(error).__name__}; {OTHER}"}
    return found
