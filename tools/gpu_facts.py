"""Prints the facts of a machine with a GPU as a JSON line, for tools/gpu_run.py, then what nvidia-smi says of clocks.

python -m tools.gpu_facts
"""

import json
import subprocess
import sysconfig
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch

from tandem.cluster.deploy.machine_facts import read_facts
from tandem.cluster.deploy.misfits import misfits
from tandem.cluster.service.ray_node import OBJECT_STORE_BYTES

PACKAGES = ("triton", "ray", "transformers", "pytest", "xdist", "aiohttp", "peft")
"""Packages without which a stage says less."""


def main() -> None:
    facts = read_facts()
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    found = {
        **asdict(facts),
        "devices": [
            {"name": one.name, "capability": [one.major, one.minor], "bytes": one.total_memory} for one in gpus
        ],
        "has_python_h": (Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
        "missing": [name for name in PACKAGES if find_spec(name) is None],
        "misfits": misfits(facts, OBJECT_STORE_BYTES),
    }
    print(json.dumps({"case": "facts", **found}), flush=True)
    if gpus:
        subprocess.run(["nvidia-smi", "-q", "-d", "CLOCK,TEMPERATURE,POWER"], check=False)
    print(", ".join(one.name for one in gpus) or "no CUDA device", flush=True)


if __name__ == "__main__":
    main()
