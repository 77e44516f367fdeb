"""Routing of a mixture of experts: which experts compute a token, and with what weights.

All of it in float32, logits included, on every rank alike. T tokens, E experts, K of them per token, G groups of
experts, H hidden size.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from tandem.parallel.checkpoint import ParameterSlot
from tandem.workers.models.spec.arch import ExpertGroups, Moe, Scoring
from tandem.workers.models.spec.parameter_names import Role
from tandem.workers.models.spec.parameters import LayerParams

LEAST_SUM = 1e-20
"""Is added to a sum of weights that may all be 0."""


class Router:
    """The router of one layer, whole on every rank."""

    def __init__(self, spec: Moe, params: LayerParams) -> None:
        self._spec = spec
        self._weight_param = params.weights[Role.ROUTER]
        self._bias_param = params.biases.get(Role.ROUTER)
        self._correction_param = params.weights.get(Role.ROUTER_CORRECTION)
        self._weight_EH: torch.Tensor | None = None
        self._bias_E: torch.Tensor | None = None
        self._correction_E: torch.Tensor | None = None

    def __call__(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights [T, K], float32, and indices [T, K], int64, of each token's experts."""
        assert self._weight_EH is not None, "not loaded"
        logits_TE = F.linear(x_TH.float(), self._weight_EH, self._bias_E)
        return route(logits_TE, self._spec, self._correction_E)

    def slots(self) -> Iterator[ParameterSlot]:
        yield ParameterSlot((self._weight_param,), self._accept_weight)
        if self._bias_param is not None:
            yield ParameterSlot((self._bias_param,), self._accept_bias)
        if self._correction_param is not None:
            yield ParameterSlot((self._correction_param,), self._accept_correction)

    def _accept_weight(self, weight_EH: torch.Tensor) -> None:
        self._weight_EH = weight_EH

    def _accept_bias(self, bias_E: torch.Tensor) -> None:
        self._bias_E = bias_E

    def _accept_correction(self, correction_E: torch.Tensor) -> None:
        self._correction_E = correction_E


def route(
    logits_TE: torch.Tensor, spec: Moe, correction_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights [T, K], float32, and indices [T, K] of each token's experts. correction_E: is added to the
    scores by which experts are chosen, not to their weights."""
    logits_TE = logits_TE.float()
    if spec.scoring is Scoring.TOP_SOFTMAX:
        top_TK, expert_TK = logits_TE.topk(spec.top_k, dim=-1)
        return top_TK.softmax(dim=-1) * spec.scale, expert_TK
    scores_TE = logits_TE.sigmoid() if spec.scoring is Scoring.SIGMOID else logits_TE.softmax(dim=-1)
    choice_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if spec.groups is not None:
        choice_TE = _within_groups(choice_TE, spec.groups)
    expert_TK = choice_TE.topk(spec.top_k, dim=-1).indices
    weight_TK = scores_TE.gather(-1, expert_TK)
    if spec.renormalize:
        weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + LEAST_SUM)
    return weight_TK * spec.scale, expert_TK


def _within_groups(choice_TE: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """Returns the scores with -inf for experts outside of a token's best groups."""
    choice_TGE = choice_TE.unflatten(-1, (groups.count, -1))
    of_group_TG = choice_TGE.topk(groups.best, dim=-1).values.sum(dim=-1)
    is_out_TG = torch.ones_like(of_group_TG, dtype=torch.bool)
    is_out_TG.scatter_(-1, of_group_TG.topk(groups.taken, dim=-1).indices, False)
    return choice_TGE.masked_fill(is_out_TG[..., None], float("-inf")).flatten(-2)
