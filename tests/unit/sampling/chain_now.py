"""The chain of logits processors on logits that are there already."""

from typing import NamedTuple

import torch

from tandem.workers.kernels.sampling_ops import TorchSampling
from tandem.workers.kernels.step_arrays import sending_with
from tandem.workers.sampling.processors.chain import ProcessorChain
from tandem.workers.sampling.processors.device_tokens import DeviceTokens
from tandem.workers.sampling.processors.logits_processor import History, Ids


def apply_chain(chain: ProcessorChain, logits: torch.Tensor, rows: Ids, positions: Ids, history: History) -> None:
    """Changes the logits as a step would, with torch's operations."""
    send = sending_with(lambda host: host)
    for late in (False, True):
        for change in chain.prepare(rows, positions, history, send, TorchSampling(), late=late):
            change(logits)


class Ahead(NamedTuple):
    """What a device has that is ahead of the host: all rows' tokens, int32 [N, L], and the true position of each place.
    On the host: lengths of the prompts, the numbers of tokens it has read, the least and the most that positions may
    be, int64 [S]."""

    tokens_NL: torch.Tensor
    positions_S: torch.Tensor
    prompt_len_S: Ids
    read_S: Ids
    least_S: Ids
    most_S: Ids


def apply_on_device(chain: ProcessorChain, logits: torch.Tensor, rows: Ids, ahead: Ahead, history: History) -> None:
    """The same by the processors' forms for devices, whatever the host has not read. history: of what it has."""
    send = sending_with(lambda host: host)
    tokens = DeviceTokens(ahead.prompt_len_S, ahead.read_S, ahead.most_S)
    changes = chain.prepare(rows, ahead.least_S, history, send, TorchSampling(), late=False, tokens=tokens)
    tokens.arrive(ahead.tokens_NL, ahead.positions_S)
    for change in changes:
        change(logits)
