"""Names of samples in Prometheus text, and of those that the dashboard asks for, and that the reference has not."""

import re

from tools import dashboards
from tools.reference import FOLDER


def sample_names(text: str, prefix: str = "tandem") -> set[str]:
    """Returns the names of the samples of families with a prefix, without it."""
    names = (line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if line and line[0] != "#")
    return {name.removeprefix(f"{prefix}:") for name in names if name.startswith(f"{prefix}:")}


def not_served(text: str, *rows: str) -> dict[str, set[str]]:
    """Returns the names that panels of the dashboard's rows ask for and a service's metrics lack, by row."""
    served = sample_names(text)
    return {row: absent for row in rows if (absent := dashboards.families(row) - served)}


def not_in_the_reference(text: str, prefix: str = "tandem") -> set[str]:
    """Returns the families of a text that docs/reference/metrics.md has not."""
    known = re.findall(r"^\| `(\w+)`", (FOLDER / "metrics.md").read_text(), re.MULTILINE)
    return set(re.findall(rf"^# TYPE {prefix}:(\w+)", text, re.MULTILINE)) - set(known)
