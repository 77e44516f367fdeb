"""The chain of logits processors on logits that are there already."""

import torch

from tandem.workers.kernels.sampling_ops import TorchSampling
from tandem.workers.kernels.step_arrays import sending_with
from tandem.workers.sampling.processors.chain import ProcessorChain
from tandem.workers.sampling.processors.logits_processor import History, Ids


def apply_chain(chain: ProcessorChain, logits: torch.Tensor, rows: Ids, positions: Ids, history: History) -> None:
    """Changes the logits as a step would, with torch's operations."""
    send = sending_with(lambda host: host)
    for late in (False, True):
        for change in chain.prepare(rows, positions, history, send, TorchSampling(), late=late):
            change(logits)
