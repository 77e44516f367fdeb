"""Operations of a mixture of experts around its products: a Protocol and its torch twin.

    route            logits in float32, then the experts of each token and their weights
    group            the pairs (token, expert) sorted by expert, and counts of them
    clamped_swiglu   the activation of gpt-oss's experts
    combine          sum over a token's experts of weight * output, + the output of an expert that all tokens pass

The products themselves are an ExpertMethod (parallel/expert_methods.py). Called by workers/models/layers. T tokens, E
experts, K of them per token, P = T * K pairs, G groups of experts, H hidden size.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import EachExpert, ExpertMethod, ExpertParams, Groups
from tandem.parallel.linear_methods import MakeMethod, Place
from tandem.workers.models.spec.arch import ClampedSwiglu, ExpertGroups, Moe, Scoring

LEAST_SUM = 1e-20
"""Is added to a sum of weights that may all be 0."""


class RouterWeights(NamedTuple):
    """A router's weights, float32. correction_E: is added to the scores by which experts are chosen, not to their
    weights."""

    weight_EH: torch.Tensor
    bias_E: torch.Tensor | None = None
    correction_E: torch.Tensor | None = None


class ExpertOps(Protocol):
    """An implementation for one layer's device, dtype and form of weights."""

    def method(self, experts: Sequence[ExpertParams], context: ParallelContext) -> ExpertMethod:
        """Returns the method of one projection of this rank's experts."""
        ...

    def loads(self, num_experts: int) -> torch.Tensor:
        """Returns counters loads_E, int64 and 0, for `group`."""
        ...

    def route(self, x_TH: torch.Tensor, router: RouterWeights, spec: Moe) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights [T, K], float32, and indices [T, K], int64, of each token's experts."""
        ...

    def group(self, expert_TK: torch.Tensor, here: range, loads_E: torch.Tensor) -> Groups:
        """Sorts pairs by expert and adds to loads_E, int64, how many each has. here: the experts of this rank."""
        ...

    def clamped_swiglu(self, spec: ClampedSwiglu, gate_up_PM: torch.Tensor) -> torch.Tensor:
        """Returns the activation [P, M] of rows [gate | up], 2 M wide."""
        ...

    def combine(
        self,
        y_PH: torch.Tensor,
        weight_TK: torch.Tensor,
        groups: Groups,
        base_TH: torch.Tensor | None = None,
        gate_T1: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns [T, H]: this rank's experts' outputs by their weights, added in float32, + base * sigmoid(gate) where
        they are given. y_PH: in the order of the groups."""
        ...


class TorchExperts:
    """The twin, for any device, dtype and form of weights. make: linear methods. device: None for the host."""

    def __init__(self, make: MakeMethod, place: Place, device: torch.device | None = None) -> None:
        self._make = make
        self._place = place
        self._device = device

    def method(self, experts: Sequence[ExpertParams], context: ParallelContext) -> ExpertMethod:
        return EachExpert(self._make, experts, context, self._place)

    def loads(self, num_experts: int) -> torch.Tensor:
        return torch.zeros(num_experts, dtype=torch.int64, device=self._device)

    def route(self, x_TH: torch.Tensor, router: RouterWeights, spec: Moe) -> tuple[torch.Tensor, torch.Tensor]:
        logits_TE = F.linear(x_TH.float(), router.weight_EH, router.bias_E)
        return choose(logits_TE, spec, router.correction_E)

    def group(self, expert_TK: torch.Tensor, here: range, loads_E: torch.Tensor) -> Groups:
        expert_P = expert_TK.flatten()
        loads_E.index_add_(0, expert_P, torch.ones_like(expert_P))
        is_here_P = (expert_P >= here.start) & (expert_P < here.stop)
        local_P = torch.where(is_here_P, expert_P - here.start, len(here))
        sorted_P, order_P = local_P.sort(stable=True)
        place_P = torch.empty_like(order_P)
        place_P[order_P] = torch.arange(len(order_P), device=order_P.device)
        experts_E = torch.arange(len(here), device=sorted_P.device)
        ends_E = torch.searchsorted(sorted_P, experts_E, right=True, out_int32=True)
        return Groups(order_P.int(), place_P.int(), ends_E, expert_TK.shape[1])

    def clamped_swiglu(self, spec: ClampedSwiglu, gate_up_PM: torch.Tensor) -> torch.Tensor:
        gate_PM, up_PM = gate_up_PM.float().chunk(2, dim=-1)
        gate_PM = gate_PM.clamp(max=spec.limit)
        up_PM = up_PM.clamp(-spec.limit, spec.limit)
        return (gate_PM * (gate_PM * spec.alpha).sigmoid() * (up_PM + 1)).to(gate_up_PM.dtype)

    def combine(
        self,
        y_PH: torch.Tensor,
        weight_TK: torch.Tensor,
        groups: Groups,
        base_TH: torch.Tensor | None = None,
        gate_T1: torch.Tensor | None = None,
    ) -> torch.Tensor:
        place_TK = groups.place_P.view(weight_TK.shape)
        y_TKH = y_PH[place_TK].float().masked_fill((place_TK >= groups.ends_E[-1])[..., None], 0)
        out_TH = (y_TKH * weight_TK[..., None]).sum(1)
        if base_TH is not None:
            out_TH += base_TH.float() if gate_T1 is None else base_TH.float() * gate_T1.float().sigmoid()
        return out_TH.to(y_PH.dtype)


def choose(
    logits_TE: torch.Tensor, spec: Moe, correction_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights [T, K], float32, and indices [T, K] of each token's experts. correction_E: as in
    RouterWeights."""
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
