"""The screen of `tandem top`: figures as lines, and a terminal that is drawn anew with each reading."""

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from tandem.cluster.cli.base.terminal import table

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Escape codes: to the terminal's other screen without a cursor, and back."""
HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
GROUPS: Final = (
    "group", "state", "running", "waiting", "KV", "prompt tok/s", "tok/s", "step ms", "prefix hits", "drafts",
    "host KV", "ranks",
)  # fmt: skip


def lines_of(figures: Mapping[str, Any], title: str) -> list[str]:
    """The figures as lines of text, without colours."""
    away = f"  Redis {figures['redis_state']}: these are old" if figures["redis_unavailable"] else ""
    held = f"  held {figures['held']}" if figures["held"] else ""
    lines = [f"{title}{away}"]
    lines.append(
        f"running {figures['running']}  waiting {figures['waiting']}{held}  prompt tok/s "
        f"{_number(figures['prompt_tokens_per_s'])}  tok/s {_number(figures['generation_tokens_per_s'])}"
    )
    if (wanted := figures["groups_wanted"]) is not None:
        lines.append(f"groups wanted {wanted['groups']}: {wanted['why']}")
    if figures["losses"] is not None:
        lines.append(figures["losses"])
    lines += ["", *table([list(GROUPS), *map(_group_row, figures["groups"])], num_names=2)]
    if not figures["groups"]:
        lines.append("no group is known")
    for name, head, rows in (
        ("gateways", ("gateway", "in flight", "held", "pid", ""), map(_gateway_row, figures["gateways"])),
        ("adapters", ("adapter", "on devices", "on hosts", "running", ""), map(_adapter_row, figures["adapters"])),
        ("tenants", ("tenant", "running", "waiting", "prompt tok/s", "tok/s"), map(_tenant_row, figures["tenants"])),
    ):
        if figures[name]:
            lines += ["", *table([list(head), *rows])]
    return [line.rstrip() for line in lines]


def _group_row(group: Mapping[str, Any]) -> list[str]:
    state = group["state"]
    if state == "loading" and group["loaded"] is not None:
        state = f"loading {group['loaded']:.0%}"
    elif group["stalled_s"] >= 1:
        state = f"{state}, no step for {group['stalled_s']:.0f} s"
    host = ""
    if group["host_slots"]:
        host = "disk off" if group["disk_disabled"] else f"{group['host_blocks'] / group['host_slots']:.0%}"
    return [
        group["group"],
        state,
        str(group["running"]),
        str(group["waiting"]),
        f"{group['kv_usage']:.0%}",
        *(_number(group[name]) for name in ("prompt_tokens_per_s", "generation_tokens_per_s", "step_ms")),
        *(_percent(group[name]) for name in ("prefix_hits", "drafts_accepted")),
        host,
        str(len(group["ranks"])),
    ]


def _gateway_row(gateway: Mapping[str, Any]) -> list[str]:
    leaving = "leaving" if gateway["leaving"] else ""
    return [gateway["gateway"], *(str(gateway[name]) for name in ("in_flight", "held", "pid")), leaving]


def _adapter_row(adapter: Mapping[str, Any]) -> list[str]:
    counts = [str(adapter[name]) for name in ("on_device", "on_host", "running")]
    return [adapter["name"], *counts, "pinned" if adapter["pinned"] else ""]


def _tenant_row(tenant: Mapping[str, Any]) -> list[str]:
    running = "" if tenant["running"] is None else str(tenant["running"])
    rates = (_number(tenant[name]) for name in ("prompt_tokens_per_s", "generation_tokens_per_s"))
    return [tenant["tenant"], running, str(tenant["waiting"]), *rates]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


@contextmanager
def whole_screen() -> Iterator[None]:
    """The terminal's other screen, until the end; what was there before is there again."""
    sys.stdout.write(ENTER)
    try:
        yield
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()


def draw(lines: Sequence[str]) -> None:
    """Draws lines over those before, as many and as long as there is room for."""
    columns, rows = shutil.get_terminal_size()
    shown = [line[:columns] for line in lines[: max(1, rows - 1)]]
    sys.stdout.write(HOME + "".join(f"{line}{END_OF_LINE}\n" for line in shown) + END_OF_SCREEN)
    sys.stdout.flush()
