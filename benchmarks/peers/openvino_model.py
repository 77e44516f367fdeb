"""A checkpoint in OpenVINO's form with weights of 4 bits, by optimum-intel and nncf. Runs in the Python that has them.

    python -m benchmarks.peers.openvino_model FOLDER TARGET

4 bits by groups of 128 inputs in all layers; the embedding and the head by 8 bits, as nncf has it by itself.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nncf
import openvino
from optimum.exporters.openvino import main_export

GROUP = 128


def main() -> None:
    folder, target = map(Path, sys.argv[1:])
    with TemporaryDirectory() as dense:
        main_export(str(folder), dense, task="text-generation-with-past", ov_config=None)
        core = openvino.Core()
        model = core.read_model(Path(dense) / "openvino_model.xml")
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT4_ASYM, group_size=GROUP, ratio=1.0)
        target.mkdir(parents=True, exist_ok=True)
        for file in Path(dense).iterdir():
            if file.name not in ("openvino_model.xml", "openvino_model.bin"):
                (target / file.name).write_bytes(file.read_bytes())
        openvino.save_model(model, target / "openvino_model.xml")


if __name__ == "__main__":
    main()
