"""Lanes that compile grammars on a rank, beside its steps. Opened by loading.py. The coordinator decides which grammars
are compiled and dropped (workers/engine/waiting/grammar_cache.py)."""

import logging

from tandem.offload.copies.accelerator import Accelerator
from tandem.workers.messages.transfer import CompileGrammar, DropGrammar, Failure, GrammarOp
from tandem.workers.rank.transfers.lanes import ALL_MOVED, Lanes, Moved
from tandem.workers.structured.grammar_store import GrammarRefused, GrammarStore, TokenizerUnusable

log = logging.getLogger(__name__)
GRAMMAR_LANES = 2
"""So that a grammar that takes long to compile does not hold up all others."""


class GrammarLane:
    """Compiles grammars into the store; without one, as on ranks that do not sample, it has nothing to do."""

    def __init__(self, store: GrammarStore | None) -> None:
        self._store = store

    def move(self, op: GrammarOp) -> Moved:
        if self._store is None:
            return ALL_MOVED
        if isinstance(op, DropGrammar):
            self._store.drop(op.digest, op.ticket)
            return ALL_MOVED
        return self._compile(self._store, op)

    def close(self) -> None:
        """The rows own their grammars."""

    @staticmethod
    def _compile(store: GrammarStore, op: CompileGrammar) -> Moved:
        try:
            store.compile(op.digest, op.text, op.ticket)
        except GrammarRefused as refusal:
            return Moved([], Failure("content", str(refusal)))
        except TokenizerUnusable as problem:
            log.warning("no grammar can be compiled: %s", problem)
            return Moved([], Failure("source", str(problem)))
        return ALL_MOVED


def open_grammar_lanes(lanes: Lanes, store: GrammarStore | None, accelerator: Accelerator) -> None:
    """Opens the lanes for grammars, which have no threads before the first. store: None on ranks that do not sample."""
    count = 1 if store is None else GRAMMAR_LANES

    def open_lanes() -> None:
        lanes.open("grammar", accelerator, *(GrammarLane(store) for _ in range(count)))

    lanes.open_later("grammar", open_lanes)
