"""Whole rows of log probabilities of scored prompts, appended to a file as they are computed.

Prompt log probabilities that travel in messages are of a few tokens; whoever compares two models needs all of them
(workers/evaluation/). Written by the rank that has the logits, before it answers the step.
"""

from pathlib import Path

import numpy as np
import torch


def append_rows(path: str, logprobs_NV: torch.Tensor) -> None:
    """Writes rows of V float32 values, the log probability of each token of the vocabulary, behind what the file has,
    which whoever reads it may have cut off. On a device it waits for them. OSError when the disk is full."""
    rows = np.ascontiguousarray(logprobs_NV.float().cpu().numpy())
    with Path(path).open("ab") as file:
        file.write(rows.data)
