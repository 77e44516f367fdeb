"""Tensors that outlive a step of the decoder: the memory of captured steps, and what heads read of a step."""

from typing import NamedTuple

import torch


class StepRoom(NamedTuple):
    """Memory of captured steps: the residual stream, what the last layer adds (on earlier stages their sum), logits;
    what the stage's own taps hear."""

    residual_TH: torch.Tensor
    branch_TH: torch.Tensor
    logits_SV: torch.Tensor
    taps: tuple[torch.Tensor, ...] = ()


class Heard(NamedTuple):
    """Rests of a step, of all its tokens, until the next one: what the last layer adds, the residual stream, and the
    stream before each of the layers that Decoder.listen() was told, as far as these are of this stage or one before it;
    [T, H] each."""

    branch_TH: torch.Tensor
    residual_TH: torch.Tensor
    taps: tuple[torch.Tensor, ...]
