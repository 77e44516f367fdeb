"""The configurations of docs/serving/autoscaling.md, as a newcomer pastes them."""

import re
import textwrap
from typing import Any

import yaml

from tests.support.service import REPOSITORY


def scaled_configs() -> list[dict[str, Any]]:
    """Every indented block of the page that has an `autoscaling_config`."""
    page = (REPOSITORY / "docs" / "serving" / "autoscaling.md").read_text()
    blocks = re.findall(r"(?:^    .*\n)+", page, flags=re.MULTILINE)
    return [yaml.safe_load(textwrap.dedent(block)) for block in blocks if "autoscaling_config" in block]
