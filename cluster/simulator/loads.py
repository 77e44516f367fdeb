"""Loads: the requests of a simulation, made from the rows of a trace: its own, or other loads at its arrivals.

A prompt is a few pieces of tokens, so that a load of a million requests fits memory; tokens() spells one out when it is
sent. Equal pieces at the same place are equal tokens, and share KV. All chance comes from the seed.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from tandem.cluster.simulator.simulated_ranks import END, FIRST_TOKEN, VOCAB_SIZE, answer_token

BLOCK: Final = 512
"""Tokens that a generated piece is made of at most, as one hash id of Mooncake's traces."""
SYSTEM_TOKENS: Final = 1024
SHORT_TOKENS: Final = 256
NUM_ADAPTERS: Final = 32
NUM_TENANTS: Final = 16
FLOOD_SHARE: Final = 0.8
TURNS: Final = (2, 8)
THINK_S: Final = 30.0
MAX_TOKENS_FACTOR: Final = 4
"""Clients allow so many times the tokens that answers have: nobody knows in advance."""


class TokenRange(NamedTuple):
    """Consecutive token ids from `first` on, or `length` times the same one."""

    first: int
    length: int
    is_same: bool = False


class TraceRow(NamedTuple):
    """One request of a trace, lengths in tokens. block_ids: names of the blocks of its prompt; equal ids stand for
    equal blocks, and equal ones before them; empty: it shares nothing. block_tokens: of one block."""

    at_s: float
    input_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = BLOCK


class SimulatedRequest(NamedTuple):
    """One request. at_s: when its client sends it. output_len: tokens of its answer, which only the ranks know;
    max_tokens: those that the client allows. seed: of its
    sampling, its own in the load. session: a conversation's name, empty without."""

    at_s: float
    pieces: tuple[TokenRange, ...]
    output_len: int
    max_tokens: int
    seed: int
    tenant: str = "default"
    adapter: str | None = None
    session: str = ""

    @property
    def input_len(self) -> int:
        return sum(piece.length for piece in self.pieces)


def tokens(pieces: Iterable[TokenRange]) -> list[int]:
    """Spells out a prompt."""
    found: list[int] = []
    for first, length, is_same in pieces:
        found += [first] * length if is_same else range(first, first + length)
    return found


def piece_of(name: str, count: int) -> TokenRange:
    """Returns the tokens that stand for a name, always the same ones; two names share none."""
    return TokenRange(random.Random(name).randrange(FIRST_TOKEN, VOCAB_SIZE // 2 - 2**20), count)


Load = Callable[[Sequence[TraceRow], random.Random, str], list[SimulatedRequest]]
"""Makes requests of rows, in their order; the last argument is the seed, for names."""


def of_trace(rows: Sequence[TraceRow], draw: random.Random, seed: str) -> list[SimulatedRequest]:
    """The trace as it is: prompts share the blocks that they share there. Its first block that others do not begin with
    names the session."""
    made = list[SimulatedRequest]()
    for row in rows:
        pieces, left = list[TokenRange](), row.input_len
        for one in row.block_ids:
            count = min(row.block_tokens, left)
            pieces.append(piece_of(f"{seed}:block:{one}", count))
            left -= count
        if left:
            pieces.append(piece_of(f"{seed}:own:{len(made)}", left))
        session = f"session-{row.block_ids[1]}" if len(row.block_ids) > 1 else ""
        made.append(_request(row, pieces, len(made), session=session))
    return made


def uniform(rows: Sequence[TraceRow], draw: random.Random, seed: str) -> list[SimulatedRequest]:
    """Prompts that share nothing, of the trace's lengths."""
    return [_request(row, [_own(row.input_len, seed, place)], place) for place, row in enumerate(rows)]


def system_prompt(rows: Sequence[TraceRow], draw: random.Random, seed: str) -> list[SimulatedRequest]:
    """A system prompt that all have before a short prompt of their own."""
    system = piece_of(f"{seed}:system", SYSTEM_TOKENS)
    return [
        _request(row, [system, _own(min(row.input_len, SHORT_TOKENS), seed, place)], place)
        for place, row in enumerate(rows)
    ]


def adapters(rows: Sequence[TraceRow], draw: random.Random, seed: str) -> list[SimulatedRequest]:
    """Short prompts, each for one of NUM_ADAPTERS adapters; adapter i is asked for 1 / (i + 1) as often as the first
    (Zipf)."""
    names = [f"adapter-{place}" for place in range(NUM_ADAPTERS)]
    chosen = draw.choices(names, [1 / (place + 1) for place in range(NUM_ADAPTERS)], k=len(rows))
    return [
        _request(row, [_own(min(row.input_len, SHORT_TOKENS), seed, place)], place, adapter=name)
        for place, (row, name) in enumerate(zip(rows, chosen, strict=True))
    ]


def flood(rows: Sequence[TraceRow], draw: random.Random, seed: str) -> list[SimulatedRequest]:
    """Prompts that share nothing; one tenant sends FLOOD_SHARE of them, the others the rest."""
    quiet = [f"tenant-{place}" for place in range(1, NUM_TENANTS)]
    return [
        _request(
            row,
            [_own(row.input_len, seed, place)],
            place,
            tenant="tenant-0" if draw.random() < FLOOD_SHARE else draw.choice(quiet),
        )
        for place, row in enumerate(rows)
    ]


def conversations(rows: Sequence[TraceRow], draw: random.Random, seed: str) -> list[SimulatedRequest]:
    """Conversations, of which one begins at every fifth row of the trace. Each turn has all before it, answers
    included, and a question as long as a row's prompt, BLOCK tokens at most; the next comes after THINK_S on
    average."""
    made: list[SimulatedRequest] = []
    for number, row in enumerate(rows[:: sum(TURNS) // 2]):
        at_s, pieces = row.at_s, list[TokenRange]()
        for turn in range(draw.randint(*TURNS)):
            own = draw.choice(rows)
            pieces.append(piece_of(f"{seed}:turn:{number}:{turn}", min(own.input_len, BLOCK)))
            made.append(_request(own._replace(at_s=at_s), pieces, len(made), session=f"session-{number}"))
            pieces += answer(made[-1].seed, own.output_len)
            at_s += draw.expovariate(1 / THINK_S)
    return made


LOADS: Final[Mapping[str, Load]] = MappingProxyType(
    {
        "trace": of_trace,
        "conversations": conversations,
        "system-prompt": system_prompt,
        "adapters": adapters,
        "uniform": uniform,
        "flood": flood,
    }
)


def make_load(name: str, rows: Sequence[TraceRow], seed: int) -> list[SimulatedRequest]:
    """Makes a load of LOADS, in the order of its times. The same rows and seed make the same load."""
    made = LOADS[name](rows, random.Random(f"{seed}:{name}"), str(seed))
    return sorted(made, key=lambda request: request.at_s)


def generated_rows(count: int, rate: float, seed: int) -> list[TraceRow]:
    """Rows for want of a trace: Poisson arrivals at `rate` a second, lengths of a log-normal distribution, and as many
    shared blocks as conversations of a few turns have."""
    draw = random.Random(f"{seed}:rows")
    rows, at_s, open_turns = list[TraceRow](), 0.0, list[tuple[int, ...]]()
    for place in range(count):
        at_s += draw.expovariate(rate)
        goes_on = bool(open_turns) and draw.random() < 0.5
        before = open_turns.pop(draw.randrange(len(open_turns))) if goes_on else (0,)
        ids = (*before, place + 1)
        output_len = 2 + int(draw.lognormvariate(4.0, 0.8))
        rows.append(TraceRow(at_s, len(ids) * BLOCK - draw.randrange(BLOCK // 2), output_len, ids))
        if len(ids) < TURNS[1]:
            open_turns.append(ids)
    return rows


def answer(seed: int, count: int) -> list[TokenRange]:
    """Returns the answer that the simulated ranks give to the request with this seed."""
    return [TokenRange(answer_token(seed), count - 1, is_same=True), TokenRange(END, 1)]


def _own(count: int, seed: str, place: int) -> TokenRange:
    return piece_of(f"{seed}:own:{place}", count)


def _request(
    row: TraceRow,
    pieces: Sequence[TokenRange],
    place: int,
    *,
    tenant: str = "default",
    adapter: str | None = None,
    session: str = "",
) -> SimulatedRequest:
    most = MAX_TOKENS_FACTOR * row.output_len
    return SimulatedRequest(row.at_s, tuple(pieces), row.output_len, most, place, tenant, adapter, session)
