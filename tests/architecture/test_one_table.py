"""Only the table of parameters knows what a layer consists of: no other module names a projection of a checkpoint."""

import re
from pathlib import Path

from tandem.workers.models.spec.family_rows.families import FAMILIES
from tandem.workers.models.spec.parameter_names import Role
from tools.sources import Source, lines_with, sources

FILES = sources(Path(__file__).resolve().parents[2])
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


def test_no_module_but_the_table_names_projections() -> None:
    assert {"q_proj", "down_proj", "c_attn", "query_key_value"} <= NAMES
    word = re.compile(rf"\b({'|'.join(sorted(NAMES))})\b")
    assert not lines_with(word, [file for file in FILES if not file.name.startswith(TABLE)])
    assert lines_with(word, [Source("a.py", "x = 1\ny = 'model.q_proj.weight'\n")]) == [
        "a.py:2: y = 'model.q_proj.weight'"
    ]
