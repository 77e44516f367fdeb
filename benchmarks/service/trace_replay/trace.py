"""Traces of requests: multi-turn conversations, recorded or generated, and independent requests for adapters (Zipf).

A row of a conversation trace has a time, an input length and the ids of its prefix blocks; an id stands for a block and
all before it. Blocks shrink from 512 tokens to BLOCK, and a block's tokens are a function of its id, so two prompts
share exactly the prefix that they share in the trace.
"""

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.engine_run import greedy_request
from benchmarks.workload import Job, random_prompt
from tandem.workers.messages.request import AdapterRef, GenerationRequest

BLOCK = 16
TRACE_BLOCK = 512
LONGEST_OUTPUT = 32
LORA_PROMPT = 32


@dataclass(frozen=True)
class Arrival:
    """One request and the time when it is due, in seconds from the start of the replay."""

    due_s: float
    request: GenerationRequest


# ---- conversations ----


@dataclass(frozen=True)
class Row:
    """One request of a trace; lengths in the trace's tokens."""

    time_s: float
    input_length: int
    output_length: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """One request to send. place: of its arrival in the span of all, 0 to 1. seen_tokens: prompt tokens in full blocks
    that earlier turns had too, the hits of a cache without end."""

    place: float
    job: Job
    seen_tokens: int


@dataclass(frozen=True)
class Conversations:
    """Turns in order of arrival, and the number of distinct blocks of all their prompts."""

    source: str
    turns: list[Turn]
    num_conversations: int
    num_blocks: int
    longest_blocks: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(turn.job.prompt) for turn in self.turns)

    @property
    def seen_tokens(self) -> int:
        return sum(turn.seen_tokens for turn in self.turns)

    def arrivals(self, span_s: float) -> list[Arrival]:
        """All turns within span_s seconds."""
        return [
            Arrival(turn.place * span_s, greedy_request(f"turn-{index}", turn.job))
            for index, turn in enumerate(self.turns)
        ]


def read_trace(file: Path) -> list[Row]:
    """Reads a trace in Mooncake's form: timestamp (ms), input_length, output_length, hash_ids."""
    with file.open() as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Row(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"])) for row in rows
    ]


def generate_trace(conversations: int, *, turns: int = 4, seed: int = 0) -> list[Row]:
    """Conversations that share their first block (a system prompt) and grow by a question and an answer each turn."""
    draw = random.Random(seed)
    rows: list[Row] = []
    next_id = 1
    for _ in range(conversations):
        time_s, ids = draw.uniform(0.0, 600.0), [0]
        for _ in range(draw.randint(2, turns)):
            added = 1 + int(draw.expovariate(1 / 6))
            ids += range(next_id, next_id + added)
            next_id += added
            output = int(draw.lognormvariate(5.5, 0.7)) + 1
            length = (len(ids) - 1) * TRACE_BLOCK + draw.randint(1, TRACE_BLOCK)
            rows.append(Row(time_s, length, output, tuple(ids)))
            time_s += draw.expovariate(1 / 60)
    return sorted(rows, key=lambda row: row.time_s)


def choose(rows: list[Row], source: str, vocab_size: int, count: int, longest_blocks: int, seed: int) -> Conversations:
    """At least `count` turns: whole conversations of two turns or more with prompts of at most longest_blocks.

    They began one after the other, so that as many are under way at once as in the trace; `seed` chooses the first. The
    first block is common to all rows of a trace; rows that share the second too are one conversation.
    """
    by_second: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if len(row.block_ids) > 1:
            by_second[row.block_ids[1]].append(row)
    fitting = [c for c in by_second.values() if len(c) > 1 and max(len(r.block_ids) for r in c) <= longest_blocks]
    begin = random.Random(seed).randrange(max(1, len(fitting) - count // 2))
    chosen: list[Row] = []
    num_conversations = 0
    for conversation in fitting[begin:]:
        chosen += conversation
        num_conversations += 1
        if len(chosen) >= count:
            break
    chosen.sort(key=lambda row: row.time_s)
    return Conversations(
        source=source,
        turns=_turns(chosen, vocab_size),
        num_conversations=num_conversations,
        num_blocks=len({block_id for row in chosen for block_id in row.block_ids}),
        longest_blocks=max(len(row.block_ids) for row in chosen),
    )


def _turns(rows: list[Row], vocab_size: int) -> list[Turn]:
    start, span = rows[0].time_s, max(1e-9, rows[-1].time_s - rows[0].time_s)
    seen: set[int] = set()
    turns = []
    for row in rows:
        prompt = [token for block_id in row.block_ids for token in block_tokens(block_id, vocab_size)]
        last = row.input_length - (len(row.block_ids) - 1) * TRACE_BLOCK
        prompt = prompt[: (len(row.block_ids) - 1) * BLOCK + max(1, min(BLOCK, last * BLOCK // TRACE_BLOCK))]
        findable = row.block_ids[: (len(prompt) - 1) // BLOCK]
        known = next((place for place, block_id in enumerate(findable) if block_id not in seen), len(findable))
        seen.update(row.block_ids[: len(prompt) // BLOCK])
        output = max(2, min(LONGEST_OUTPUT, row.output_length * BLOCK // TRACE_BLOCK))
        turns.append(Turn((row.time_s - start) / span, Job(prompt, output), known * BLOCK))
    return turns


def block_tokens(block_id: int, vocab_size: int) -> list[int]:
    """The BLOCK tokens that stand for a block of the trace."""
    return random_prompt(random.Random(block_id), BLOCK, vocab_size)


# ---- adapters ----


def adapter_arrivals(
    refs: Sequence[AdapterRef], rate: float, count: int, vocab_size: int, tag: str = "zipf"
) -> list[Arrival]:
    """Poisson arrivals at `rate` requests per second; adapter i has weight 1 / (i + 1).

    Times and lengths are the same for every number of adapters.
    """
    times, lengths, picks = random.Random(3), random.Random(4), random.Random(5)
    weights = [1 / (place + 1) for place in range(len(refs))]
    due_s, arrivals = 0.0, []
    for place in range(count):
        due_s += times.expovariate(rate)
        output_len = lengths.randint(8, 48)
        job = Job(random_prompt(lengths, LORA_PROMPT, vocab_size), output_len)
        (ref,) = picks.choices(refs, weights)
        arrivals.append(Arrival(due_s, greedy_request(f"{tag}-{place}", job, ref)))
    return arrivals
