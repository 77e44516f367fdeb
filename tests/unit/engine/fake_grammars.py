"""The grammar lanes of ranks without a model: what was compiled, when each answer comes, and which grammars are wrong.

Checks the ranks' side of the contract: a row is bound only while its grammar is compiled. Part of FakeExecutor.
"""

from collections import deque
from collections.abc import Callable

from tandem.workers.messages.transfer import (
    CompileGrammar,
    DropGrammar,
    Failure,
    GrammarOp,
    TransferOp,
    TransferResult,
)


class FakeGrammars:
    """delay: looks at the ranks before a text is compiled; None: it never is. refuses: why a text cannot be compiled;
    None: it can. sent: all orders. compiled: digest to text."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.delay: Callable[[str], int | None] = lambda text: 0
        self.refuses: Callable[[str], Failure | None] = lambda text: None
        self.sent: list[GrammarOp] = []
        self.compiled: dict[str, str] = {}
        self.under_way: dict[int, GrammarOp] = {}
        self._looks: dict[int, int] = {}
        self._awaiting: dict[int, int] = {}
        self._queue: deque[GrammarOp] = deque()

    def send(self, op: GrammarOp) -> None:
        assert op.ticket not in self.under_way
        self.sent.append(op)
        self.under_way[op.ticket] = op
        self._awaiting[op.ticket] = self.num_ranks
        self._queue.append(op)

    def pump(self) -> list[TransferResult]:
        """Every order under way is looked at once; returns the ranks' answers."""
        done: list[TransferResult] = []
        for op in list(self._queue):
            looks = self._looks[op.ticket] = self._looks.get(op.ticket, -1) + 1
            delay = self.delay(op.text) if isinstance(op, CompileGrammar) else 0
            if delay is not None and looks >= delay:
                self._queue.remove(op)
                failure = self._carry_out(op)
                done += [
                    TransferResult(rank=rank, ticket=op.ticket, failure=failure if rank == 0 else None)
                    for rank in range(self.num_ranks)
                ]
        return done

    def taken(self, result: TransferResult) -> None:
        """The engine has taken an answer."""
        self._awaiting[result.ticket] -= 1
        if not self._awaiting[result.ticket]:
            del self.under_way[result.ticket]

    def check_bound(self, digest: str | None) -> None:
        """A row is bound with this grammar."""
        assert digest is None or digest in self.compiled, "a row is bound without its grammar"

    def orders(self, kind: type[TransferOp]) -> list[str]:
        """Digests of the orders of a kind, in their order."""
        return [op.digest for op in self.sent if isinstance(op, kind)]

    def _carry_out(self, op: GrammarOp) -> Failure | None:
        if isinstance(op, DropGrammar):
            assert op.digest in self.compiled, "a grammar is dropped that is not there"
            del self.compiled[op.digest]
            return None
        failure = self.refuses(op.text)
        if failure is None:
            self.compiled[op.digest] = op.text
        return failure
