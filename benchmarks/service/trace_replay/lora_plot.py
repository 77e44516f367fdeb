"""The plot of `trace_replay lora`.

One panel for decode speed over base by active adapters, one for TTFT by adapters in use.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plot(parts: Mapping[str, Any], file: Path) -> None:
    """Plots decode speed over base by active adapters, and TTFT when adapters outnumber the room.

    parts: `speed` and `zipf` as they are recorded; a missing one leaves its panel out.
    """
    from matplotlib import pyplot

    panels = [(draw, parts[name]) for name, draw in (("speed", _speed), ("zipf", _zipf)) if name in parts]
    if not panels:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.5), squeeze=False)
    for axis, (draw, part) in zip(axes[0], panels, strict=True):
        draw(axis, part)
        axis.set_xscale("log", base=2)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _speed(axis: Any, lines: list[dict[str, Any]]) -> None:
    lines = [line for line in lines if line["active"]]
    for batch, rank, modules in sorted({(line["batch"], line["rank"], line["modules"]) for line in lines}):
        own = [line for line in lines if (line["batch"], line["rank"], line["modules"]) == (batch, rank, modules)]
        label = f"batch {batch}, rank {rank} on {modules}"
        (drawn,) = axis.plot([x["active"] for x in own], [x["ratio"] for x in own], "o-", label=label)
        axis.plot([x["active"] for x in own], [x["predicted_ratio"] for x in own], ":", color=drawn.get_color())
    axis.set(title="decode tok/s over base (dotted: by bytes)", xlabel="active adapters", ylim=(0, 1.1))


def _zipf(axis: Any, part: dict[str, Any]) -> None:
    counts = sorted(int(name) for name in part if name.isdigit())
    for name in ("p50", "p99"):
        axis.plot(counts, [part[str(count)]["ttft_ms"][name] for count in counts], "o-", label=f"TTFT {name}")
    axis.set(title="Zipf arrivals at half the capacity", xlabel="adapters", ylabel="ms", ylim=(0, None))
