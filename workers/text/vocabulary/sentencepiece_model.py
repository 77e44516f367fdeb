"""SentencePiece's tokenizer.model as a tokenizer of the `tokenizers` library.

Called by vocabulary_files.py. The file is a protobuf of pieces with scores, and of how texts are normalized (Kudo and
Richardson, 2018); Llama 1 and 2, Mistral 7B, Mixtral, Gemma and Phi-3 mini have one. What cannot be said to the library
is refused. Needs neither SentencePiece nor torch, and runs nothing of the file.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tandem.workers.messages.errors import SettingsError
from tandem.workers.text.vocabulary.bpe_merges import merges_by_score
from tandem.workers.text.vocabulary.declared_tokens import add_declared

SPACE = "\u2581"
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
NEVER = -1e5
"""A score far below those of pieces that a text may match."""

FIELDS = {
    "Piece": ((1, "piece", "STRING", ""), (2, "score", "FLOAT", "0"), (3, "type", "INT32", "1")),
    "Trainer": (
        (3, "model_type", "INT32", "1"), (24, "treat_whitespace_as_suffix", "BOOL", "false"),
        (35, "byte_fallback", "BOOL", "false"), (40, "unk_id", "INT32", "0"), (41, "bos_id", "INT32", "1"),
        (42, "eos_id", "INT32", "2"), (43, "pad_id", "INT32", "-1"),
    ),
    "Normalizer": (
        (2, "precompiled_charsmap", "BYTES", ""), (3, "add_dummy_prefix", "BOOL", "true"),
        (4, "remove_extra_whitespaces", "BOOL", "true"), (5, "escape_whitespaces", "BOOL", "true"),
    ),
}  # fmt: skip
"""Number, name, type and default of the fields that are read (sentencepiece_model.proto)."""
PARTS = (("pieces", 1, "Piece"), ("trainer", 2, "Trainer"), ("normalizer", 3, "Normalizer"), ("back", 5, "Normalizer"))


@cache
def _message() -> Any:
    """Makes the protobuf message. Unknown fields are skipped."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="pieces.proto", package="pieces", syntax="proto2")
    kind = descriptor_pb2.FieldDescriptorProto
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for number, field, of, default in fields:
            of_type = kind.Type.Value(f"TYPE_{of}")
            message.field.add(name=field, number=number, type=of_type, label=1, default_value=default)
    whole = file.message_type.add(name="Model")
    for part, number, of in PARTS:
        label = kind.LABEL_REPEATED if part == "pieces" else kind.LABEL_OPTIONAL
        whole.field.add(name=part, number=number, type=kind.TYPE_MESSAGE, type_name=f".pieces.{of}", label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pieces.Model"))


def new_model() -> Any:
    """Returns the protobuf of a file that holds nothing yet."""
    return _message()()


def read_model(path: Path) -> Any:
    """Returns the protobuf of a file: pieces, trainer, normalizer, and `back`, which normalizes what is decoded.
    Raises ValueError for one that is not SentencePiece's or cannot be said to the `tokenizers` library."""
    from google.protobuf.message import DecodeError

    model = _message()()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ValueError(f"not a protobuf of SentencePiece ({error})") from error
    if not model.pieces:
        raise ValueError("not a protobuf of SentencePiece: it holds no pieces")
    asked = {
        f"model_type {model.trainer.model_type}": model.trainer.model_type not in (UNIGRAM, BPE),
        "treat_whitespace_as_suffix": model.trainer.treat_whitespace_as_suffix,
        "escape_whitespaces false": not model.normalizer.escape_whitespaces,
        "a denormalizer": bool(model.back.precompiled_charsmap),
        "unused pieces": any(piece.type == UNUSED for piece in model.pieces),
        "no unknown piece": not 0 <= model.trainer.unk_id < len(model.pieces),
    }
    if wrong := [name for name, found in asked.items() if found]:
        raise ValueError(f"it has {', '.join(wrong)}, which is not read")
    return model


def named_tokens(model: Any) -> dict[str, str]:
    """Returns the special tokens that the file names, by their names in tokenizer_config.json."""
    ids = {name: getattr(model.trainer, f"{name}_id") for name in ("bos", "eos", "unk", "pad")}
    return {f"{name}_token": model.pieces[i].piece for name, i in ids.items() if 0 <= i < len(model.pieces)}


def to_tokenizer(model: Any, declared: Mapping[int, AddedToken], config: Mapping[str, Any]) -> Tokenizer:
    """Makes the tokenizer of a file. declared: the folder's added tokens by id; one in the place of a piece that is no
    text renames it. config: tokenizer_config.json. SettingsError for ids that contradict the file's."""
    pieces = _renamed(model, declared)
    bytes_too = model.trainer.byte_fallback
    prefix, legacy = config.get("add_prefix_space"), config.get("legacy")
    prefix = model.normalizer.add_dummy_prefix if prefix is None else bool(prefix)
    tokenizer = Tokenizer((_unigram if model.trainer.model_type == UNIGRAM else _bpe)(model, pieces))
    first_only = prefix and legacy is not None and not legacy
    steps = _normalizers(model.normalizer) + ([] if first_only else [normalizers.Prepend(SPACE)] * prefix)
    tokenizer.normalizer = normalizers.Sequence([*steps, *([] if first_only else [normalizers.Replace(" ", SPACE)])])
    if first_only:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    undone = [decoders.Replace(SPACE, " "), *([decoders.ByteFallback()] if bytes_too else []), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undone, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    marks = {
        i: AddedToken(pieces[i], special=piece.type == CONTROL, normalized=False)
        for i, piece in enumerate(model.pieces)
        if piece.type in (CONTROL, USER_DEFINED) and set(piece.piece) != {SPACE}  # spaces merge, as the best of pieces
    }
    add_declared(tokenizer, marks | dict(declared))
    return tokenizer


def _renamed(model: Any, declared: Mapping[int, AddedToken]) -> list[str]:
    """Returns the pieces by id, placeholders under their declared names."""
    pieces = [piece.piece for piece in model.pieces]
    for token_id, token in declared.items():
        if token_id < len(pieces) and pieces[token_id] != token.content:
            if model.pieces[token_id].type not in (CONTROL, USER_DEFINED) or token.content in pieces:
                raise SettingsError(
                    f"token {token.content!r} is declared with id {token_id}, which is {pieces[token_id]!r} in the "
                    "vocabulary",
                    "--tokenizer",
                )
            pieces[token_id] = token.content
    return pieces


def _bpe(model: Any, pieces: list[str]) -> models.BPE:
    ids = {piece: i for i, piece in enumerate(pieces)}
    kinds = [piece.type for piece in model.pieces]
    tab = ids.get("<0x09>")
    if tab is not None and "\t" not in ids and any("\t" in piece for piece in ids):  # "\t\t" merges, as in old Gemma's
        ids["\t"], kinds[tab] = ids.pop("<0x09>"), NORMAL
    scores = {piece: model.pieces[i].score for piece, i in ids.items() if kinds[i] in (NORMAL, USER_DEFINED)}
    whole = frozenset(piece for piece, i in ids.items() if kinds[i] == USER_DEFINED)
    return models.BPE(
        vocab=ids,
        merges=merges_by_score(scores, whole),
        unk_token=pieces[model.trainer.unk_id],
        fuse_unk=True,
        byte_fallback=model.trainer.byte_fallback,
    )


def _unigram(model: Any, pieces: list[str]) -> models.Unigram:
    """The library tries every piece on a text: bytes such as "<0x0A>", which score 0 in the file, get the lowest."""
    scored = [
        (name, NEVER if piece.type == BYTE else piece.score) for name, piece in zip(pieces, model.pieces, strict=True)
    ]
    return models.Unigram(scored, unk_id=model.trainer.unk_id, byte_fallback=model.trainer.byte_fallback)


def _normalizers(spec: Any) -> list[Any]:
    """Returns what is done to a text before spaces are marked."""
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    return steps
