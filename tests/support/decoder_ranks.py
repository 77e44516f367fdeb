"""A few gloo rank processes that stay alive and run decoder cases of any TP x PP degree, one after another.

The fixture `ranks` has them for a whole run. Each process runs one thread; a case starts a fresh process group on a
port that no other test is given, and closes it.
"""

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.groups import GLOO, init_parallel
from tandem.parallel.mesh import layer_range
from tandem.parallel.pipeline import StageLink
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.models.decoder import Decoder, attention_of, build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.paged_rows import PagedRows
from tests.support.service import free_port

CPU = torch.device("cpu")
TIMEOUT_S = 120.0
Work = list[tuple[int, list[int]]]


@dataclass(frozen=True, slots=True)
class DecoderCase:
    """One model, cut tp x pp; `steps` are the rows' tokens of each step. Every step's last-token logits come back.

    `streamed`: layers, counted from 0 on each rank, that stream from host memory."""

    folder: Path
    tp_size: int
    pp_size: int
    steps: list[Work]
    num_rows: int
    max_len: int
    dtype: torch.dtype = torch.float32
    load_format: str = "safetensors"
    kv_dtype: torch.dtype | None = None
    streamed: tuple[int, ...] = ()
    expert_parallel: bool = False
    quantization: str | None = None


def run_case(case: DecoderCase, context: ParallelContext) -> torch.Tensor | None:
    """Runs every step on this rank; on the last stage all steps' logits [sum of S, V], None elsewhere."""
    context = replace(context, mesh=replace(context.mesh, expert_parallel=case.expert_parallel))
    spec = load_spec(case.folder, quantization=case.quantization)
    local = range(len(layer_range(spec.num_layers, context.pp_rank, context.pp_size)))
    decoder = build_decoder(
        spec,
        context,
        folder=case.folder,
        dtype=case.dtype,
        platform=CpuPlatform(),
        attention=attention_of(spec, CpuPlatform(), case.dtype, case.kv_dtype),
        load_format=case.load_format,  # type: ignore[arg-type]
        streamed=[layer for layer in case.streamed if layer in local],
    )
    rows = PagedRows(decoder, case.num_rows, case.max_len, case.dtype, kv_dtype=case.kv_dtype)
    link = StageLink(context, spec.hidden_size, case.dtype, CPU)
    outputs = [_run_step(decoder, rows, link, context, work) for work in case.steps]
    link.flush()
    decoder.close()
    if not context.is_last_stage:
        return None
    count = sum(len(work) for work in case.steps)
    return told_to_all(torch.cat(outputs), count, context)


def told_to_all(logits_SV: torch.Tensor, count: int, context: ParallelContext) -> torch.Tensor:
    """What the first rank of the stage has; the others have none."""
    if context.tp_size == 1:
        return logits_SV
    assert len(logits_SV) == (count if context.tp_rank == 0 else 0)
    whole_SV = logits_SV.new_zeros((count, logits_SV.shape[1]))
    whole_SV[: len(logits_SV)] = logits_SV
    return context.tp.group.all_reduce(whole_SV)


@torch.inference_mode()
def _run_step(decoder: Decoder, rows: PagedRows, link: StageLink, context: ParallelContext, work: Work) -> torch.Tensor:
    batch = rows.batch(work)
    hidden_TH = None if context.is_first_stage else link.receive(batch.num_tokens)[0].hidden_TH
    with same_collectives(context, batch):
        output = decoder.forward(batch, rows.kv, hidden_TH)
    if not context.is_last_stage:
        link.send(output)
    return output


@contextmanager
def same_collectives(context: ParallelContext, batch: ForwardBatch) -> Iterator[None]:
    """A step that asserts the same collectives as the step before: on them relies a rank that runs out of memory."""
    tp, before = context.tp, context.tp._exchanges
    tp._exchanges = None
    tp.begin(batch.num_tokens, len(batch.logits_rows_S))
    yield
    tp.end()
    assert (tp.num_done > 0) == (context.tp_size > 1)
    assert before in (None, tp._exchanges)


class RankProcesses:
    """Up to `count` processes, each started when it is first needed; `call` runs a function on the first world_size of
    them, each with a ParallelContext."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def _start_one(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(len(self._processes), theirs), daemon=True)
        process.start()
        theirs.close()
        self._connections.append(ours)
        self._processes.append(process)

    def call(self, function: Callable[..., Any], tp_size: int, pp_size: int, *arguments: Any) -> list[Any]:
        """function(*arguments, context) on every rank; the results in rank order. Asserts that none raised."""
        port = free_port()
        world_size = tp_size * pp_size
        assert world_size <= self._count
        while len(self._processes) < world_size:
            self._start_one()
        connections = self._connections[:world_size]
        for connection in connections:
            connection.send((function, tp_size, pp_size, port, arguments))
        answers = []
        for rank, connection in enumerate(connections):
            assert connection.poll(TIMEOUT_S), f"rank {rank} does not answer"
            answers.append(connection.recv())
        for rank, (failure, _) in enumerate(answers):
            assert failure is None, f"rank {rank}: {failure}"
        return [result for _, result in answers]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, connection: Connection) -> None:
    """A rank's life: calls until the pipe closes."""
    torch.set_num_threads(1)
    while True:
        try:
            function, tp_size, pp_size, port, arguments = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            context = init_parallel(rank, tp_size * pp_size, tp_size, pp_size, "127.0.0.1", port, GLOO)
            try:
                connection.send((None, function(*arguments, context)))
            finally:
                context.close()
        except Exception:
            connection.send((traceback.format_exc(), None))
