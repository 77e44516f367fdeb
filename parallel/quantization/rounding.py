"""round_to_codes(): a dense weight as the nearest codes of a scheme, for weights that are made up or made at load.

By group: scale = largest |weight| / largest value of a code; with zeros the range from the least to the largest weight
is divided evenly. O outputs, I inputs, G groups.
"""

import torch

from tandem.parallel.params import Span
from tandem.parallel.quantization.code_tables import table_of
from tandem.parallel.quantization.coded_weight import CodedWeight
from tandem.parallel.quantization.schemes import Coded


def round_to_codes(weight_OI: torch.Tensor, scheme: Coded, columns: Span) -> CodedWeight:
    """Returns the codes of this rank's part of a matrix. columns: its inputs; groups that ranks share are rounded by
    each rank's part alone."""
    wide_OI, ends_G = weight_OI.float(), group_ends(scheme, columns)
    starts = [0, *ends_G[:-1].tolist()]
    parts = [wide_OI[:, start:end] for start, end in zip(starts, ends_G.tolist(), strict=True)]
    table = table_of(scheme)
    if table is None:
        found = [_between(part, 2**scheme.bits - 1) for part in parts]
    else:
        found = [_nearest(part, table.to(weight_OI.device)) for part in parts]
    codes, scales, zeros = zip(*found, strict=True)
    is_regular = not scheme.ordered and starts == [
        place * (scheme.group or columns.length) for place in range(len(starts))
    ]
    return CodedWeight(
        torch.cat(codes, 1),
        torch.stack(scales, 1),
        scheme.bits,
        scheme.group or columns.length,
        torch.stack(zeros, 1) if scheme.zeros else None,
        None if table is None else table.to(weight_OI.device),
        None if is_regular else ends_G.to(weight_OI.device),
        torch.arange(columns.length, device=weight_OI.device) if scheme.ordered else None,
    )


def group_ends(scheme: Coded, columns: Span) -> torch.Tensor:
    """Returns where each group ends among a rank's inputs, int32 [G]: the groups that Coded.parts() counts."""
    if scheme.group is None:
        return torch.tensor([columns.length], dtype=torch.int32)
    last = columns.start + columns.length
    count = scheme.num_groups(columns.total)
    groups = range(count) if scheme.ordered else range(columns.start // scheme.group, -(-last // scheme.group))
    ends = [min(max((group + 1) * scheme.group, columns.start), last) - columns.start for group in groups]
    return torch.tensor(ends, dtype=torch.int32)


def _nearest(part_OI: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns codes, scales and zeros (0) of one group."""
    numbers = (~table.isnan()).nonzero()[:, 0]
    values, order = table[numbers].sort()
    places = numbers[order]
    largest_O = part_OI.abs().amax(1) if part_OI.shape[1] else part_OI.new_zeros(len(part_OI))
    scale_O = largest_O / values[-1].abs()
    wanted_OI = torch.where(scale_O[:, None] > 0, part_OI / scale_O[:, None], 0)
    middles = (values[1:] + values[:-1]) / 2
    return places[torch.bucketize(wanted_OI, middles)].to(torch.uint8), scale_O, torch.zeros_like(scale_O)


def _between(part_OI: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns codes, scales and zeros, which are codes too, of one group."""
    padded_OI = torch.nn.functional.pad(part_OI, (0, 1))  # 0 is a value of each group
    least_O, largest_O = padded_OI.amin(1), padded_OI.amax(1)
    scale_O = (largest_O - least_O) / steps
    safe_O = torch.where(scale_O > 0, scale_O, 1)
    zero_O = (-least_O / safe_O).round()
    codes_OI = ((part_OI / safe_O[:, None]).round() + zero_O[:, None]).clamp_(0, steps)
    return codes_OI.to(torch.uint8), scale_O, zero_O
