"""Merges of BPE from files that only rank whole pieces: SentencePiece's and tiktoken's kinds.

Such files say which piece is better, not of which two it is made. The `tokenizers` library wants pairs, best first: all
ways to cut a piece into two others. Called by sentencepiece_model.py and tekken_file.py. Pure.
"""

from collections.abc import Collection, Iterator


def cuts(piece: str, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields the ways to cut a piece into two known ones, the shortest left one first."""
    for at in range(1, len(piece)):
        left = piece[:at]
        if left in known and (right := piece[at:]) in known:
            yield left, right


def merges_by_rank(ids: dict[str, int]) -> list[tuple[str, str]]:
    """Returns the merges of a vocabulary in which a lower id is better, as tiktoken's are."""
    merges: list[tuple[str, str]] = []
    for piece in sorted(ids, key=ids.__getitem__):
        merges += sorted(cuts(piece, ids), key=lambda cut: (ids[cut[0]], ids[cut[1]]))
    return merges


def merges_by_score(scores: dict[str, float], whole: Collection[str]) -> list[tuple[str, str]]:
    """Returns the merges of a vocabulary in which a higher score is better, as SentencePiece's are. whole: pieces that
    only merge to others of these, as those that a user defined.

    Of pieces with equal scores SentencePiece merges the leftmost pair, which no order of merges can say. Longer left
    parts come first, as in transformers: so runs of one character, as spaces are, grow from the left as there.
    """
    ranked = [
        (-score, -len(left), -len(right), left, right)
        for piece, score in scores.items()
        for left, right in cuts(piece, scores)
        if piece in whole or not (left in whole or right in whole)
    ]
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in ranked]
