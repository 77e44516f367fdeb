"""MedusaStudent: a head for each place over the target's last hidden state (Cai et al. 2024, Medusa).

A head is a block, x + silu(linear(x)) as often as it has layers, and a vocabulary table. It begins as the target's own
head. The place's number is all that tells what stands between: no head sees the guesses before its own.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tandem.workers.distill.distill_settings import DistillSettings
from tandem.workers.distill.student import rate_of, shifted
from tandem.workers.distill.target_model import AnswerStates, TargetModel


class _Block(nn.Module):
    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + functional.silu(layer(x))
        return x


class _Heads(nn.Module):
    """Named as vLLM names them."""

    def __init__(self, head_VH: torch.Tensor, heads: int, layers: int) -> None:
        super().__init__()
        vocab_size, size = head_VH.shape
        self.blocks = nn.ModuleList(_Block(size, layers) for _ in range(heads))
        self.lm_heads = nn.ModuleList(nn.Linear(size, vocab_size, bias=False) for _ in range(heads))
        with torch.no_grad():
            for head in self.lm_heads.parameters():
                head.copy_(head_VH)


class MedusaStudent:
    """Implements Student. The head of place j guesses token s + 1 + j from what the target had behind token s - 1,
    which is all that it has computed when s is sampled."""

    taps: tuple[int, ...] = ()
    ids: torch.Tensor | None = None

    def __init__(self, target: TargetModel, settings: DistillSettings) -> None:
        self._spec, self._settings = target.spec, settings
        everything = torch.arange(target.spec.vocab_size, device=target.platform.device)
        with torch.inference_mode():
            rows_VH = target.decoder.head_rows(everything)
        self._heads = _Heads(rows_VH.clone().cpu(), settings.places, settings.layers)
        self.module: nn.Module = self._heads
        self.trained_places = settings.places
        self.learning_rate = rate_of(1e-3, 256, target.spec.hidden_size)

    def hidden(self, states: AnswerStates, places: int) -> list[torch.Tensor]:
        """Implements Student."""
        before_BWH = shifted(states.final_BWH, -1)
        return [self._heads.blocks[place](before_BWH) for place in range(places)]

    def logits(self, hidden_NH: torch.Tensor, place: int) -> torch.Tensor:
        """Implements Student."""
        logits_NV: torch.Tensor = self._heads.lm_heads[place](hidden_NH)
        return logits_NV

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Implements Student."""
        return self.module.state_dict()

    def config(self) -> Mapping[str, Any]:
        """Implements Student. vLLM reads biases of blocks only where medusa_fc_bias says that there are some."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "vocab_size": self._spec.vocab_size,
            "truncated_vocab_size": self._spec.vocab_size,
            "hidden_size": self._spec.hidden_size,
            "medusa_num_heads": self._settings.places,
            "medusa_num_layers": self._settings.layers,
            "medusa_fc_bias": True,
            "max_seq_len": self._spec.max_position_embeddings,
        }
