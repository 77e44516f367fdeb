"""Only the table of parameters knows what a layer consists of: no other module names a projection of a checkpoint."""

import re
from pathlib import Path

from tandem.workers.models.spec.families import FAMILIES
from tandem.workers.models.spec.parameter_names import Role

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("cluster", "configs", "offload", "parallel", "workers")
TABLE = "workers/models/spec/"
PROJECTIONS = (Role.QKV, Role.Q, Role.K, Role.V, Role.O, Role.GATE, Role.UP, Role.DOWN)
NAMES = {
    name
    for family in FAMILIES
    for role in PROJECTIONS
    if role in family.names.stems
    for name in [family.names.stems[role].rpartition(".")[2]]
    if "_" in name  # others, such as "w1" and "dense", are words of other things too
}


def test_the_names_are_those_of_the_families() -> None:
    assert {"q_proj", "down_proj", "c_attn", "query_key_value"} <= NAMES


def test_no_module_but_the_table_names_projections() -> None:
    word = re.compile(rf"\b({'|'.join(sorted(NAMES))})\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not str(path.relative_to(ROOT)).startswith(TABLE)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if word.search(line)
    ]
    assert not found, found
