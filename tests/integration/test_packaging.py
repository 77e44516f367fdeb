"""The package as users get it: built from a zip download, beside packages of the user's own, and from a bare checkout.

The wheel's contents are unpacked in front of everything else (PYTHONPATH), so that nothing comes from this checkout.
"""

import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.service import REPOSITORY, Service, free_port, wait_for

OWN_PACKAGES = ("cluster", "configs", "offload", "parallel", "workers")
OFFLINE = """
from tandem import LLM, SamplingParams
import tandem
assert tandem.__file__.startswith({root!r}), tandem.__file__
if __name__ == "__main__":
    with LLM("demo", tensor_parallel_size=2, device="cpu") as llm:
        (output,) = llm.generate(["Once upon a time"], SamplingParams(max_tokens=8, temperature=0))
        print(len(output.outputs[0].token_ids))
"""


@pytest.fixture(scope="module")
def zip_download(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as a web page offers it, unpacked by a tool that turns links into small files."""
    folder = tmp_path_factory.mktemp("zip")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in names.decode().split("\0")[:-1]:
            path = REPOSITORY / name
            if path.is_symlink():
                archive.writestr(name, os.readlink(path))
            elif path.is_file() and not name.startswith(("tests/", "benchmarks/")):
                archive.write(path, name)
    zipfile.ZipFile(packed).extractall(folder)
    return folder


@pytest.fixture(scope="module")
def installed(zip_download: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the zip download, unpacked."""
    folder, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source") / "tree"
    shutil.copytree(zip_download, source)
    build = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "wheel", "--no-deps"]
    subprocess.run([*build, "--no-build-isolation", "-w", str(folder), str(source)], check=True, timeout=300)
    (wheel,) = folder.glob("tandem_serve-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """A folder with packages of the names that our folders have; importing one of them is an error."""
    for name in OWN_PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('the user's own {name} was imported')\n")
    return tmp_path


def environment(root: Path) -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(root)}


def test_a_wheel_of_a_zip_download_has_every_file(installed: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    tops = ("cluster", "configs", "offload", "parallel", "workers")
    ours = {name for name in listed.decode().split("\0") if name.startswith(tuple(f"{top}/" for top in tops))}
    kinds = {".py", ".c", ".h", ".yaml", ".json", ".safetensors", ".jinja", ".lua"}
    pages, sources = "cluster/gateway/ui/static/", "cluster/gateway/ui/source/"
    wanted = {name for name in ours if Path(name).suffix in kinds or name.startswith(pages)}
    wanted = {name for name in wanted if (REPOSITORY / name).exists() and not name.startswith(sources)}
    found = {
        path.relative_to(installed / "tandem").as_posix()
        for path in (installed / "tandem").rglob("*")
        if path.is_file()
    }
    assert wanted <= found and not any(name.startswith(sources) for name in found)
    assert {f"{pages}index.html", f"{pages}docs.html", f"{pages}LICENSES.txt"} <= wanted
    assert (installed / "tandem" / "py.typed").exists() and not (installed / "configs").exists()


def test_offline_ranks_come_from_the_wheel(installed: Path, users_folder: Path) -> None:
    script = users_folder / "story.py"
    script.write_text(OFFLINE.format(root=str(installed)))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=users_folder,
        env=environment(installed),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.split()[-1:] == ["8"], done.stderr[-3000:]


@pytest.fixture
def served(installed: Path, users_folder: Path) -> Iterator[Service]:
    port = free_port()
    command = [sys.executable, "-P", "-c", "from tandem.cluster.cli.console import main; main()"]
    service = Service(
        [*command, "serve", "demo", "--port", str(port)], port, cwd=users_folder, env={"PYTHONPATH": str(installed)}
    )
    try:
        yield service.wait_ready()
    finally:
        service.clean()


@pytest.mark.cluster
def test_ray_workers_come_from_the_wheel(served: Service, installed: Path) -> None:
    answer = served.post("/v1/completions", {"model": "demo", "prompt": "Once upon a time", "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    ranks = served.titled("tandem rank")
    assert ranks
    libraries = {path for rank in ranks for path in rank.environ().get("PYTHONPATH", "").split(os.pathsep)}
    assert str(installed) in libraries
    wait_for(lambda: "serving demo" in served.output, 60, "the launcher knows that all is up")
    assert served.stop() == 0, served.output
    served.check_gone()


def test_a_checkout_works_without_installation(users_folder: Path) -> None:
    """Only its dependencies are installed: `-S` hides this environment's link to the checkout."""
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    done = subprocess.run(
        [sys.executable, "-S", "-c", "from tandem import LLM, SamplingParams; import tandem; print(tandem.__file__)"],
        cwd=users_folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), packages))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == str(REPOSITORY / "tandem" / "__init__.py"), done.stderr[-3000:]
