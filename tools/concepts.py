"""Counts the classes of a checkout whose methods run, and its files whose code runs, while one prompt is answered in
process.

    PYTHONPATH=CHECKOUT python tools/concepts.py

Prints one line of JSON: by part (building the `LLM` and generating, generating alone) the two counts. It is run as a
file, so that a checkout without it can be counted too.
"""

import functools
import json
import sys
import threading
from pathlib import Path
from types import FrameType

Seen = tuple[set[tuple[str, str]], set[str]]
"""Classes, each with its file, and files."""


class Watch:
    """Profiler that notes whose code is called; `part` is where it notes."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._real = functools.cache(lambda name: str(Path(name).resolve()))
        self.part: Seen = (set(), set())

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code.co_filename.startswith("<"):  # of no file: frozen into the interpreter
            return
        path = self._real(frame.f_code.co_filename)
        is_ours = path.startswith(self._root) and "/.venv/" not in path and "/lib/python" not in path
        if not is_ours or path == __file__:
            return
        owner, dot, _ = frame.f_code.co_qualname.partition(".")
        self.part[1].add(path)
        if dot and owner.lstrip("_")[:1].isupper():
            self.part[0].add((path, owner))

    def listen(self) -> None:
        """Notes calls of this thread and of threads that start from now on; imports of libraries end it."""
        threading.setprofile(self.note)
        sys.setprofile(self.note)


def count() -> dict[str, tuple[int, int]]:
    """Classes and files of one `LLM("demo").generate`."""
    import torch  # noqa: F401  (its import takes a profiler away)

    import tandem

    watch = Watch(Path(tandem.__file__).resolve().parents[1])
    built, generated = watch.part, (set[tuple[str, str]](), set[str]())
    watch.listen()
    from tandem import LLM, SamplingParams

    watch.listen()
    with LLM("demo") as llm:
        watch.part = generated
        watch.listen()
        llm.generate(["Once upon a time"], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    sys.setprofile(None)
    return {
        "built and generated": (len(built[0] | generated[0]), len(built[1] | generated[1])),
        "generated": (len(generated[0]), len(generated[1])),
    }


if __name__ == "__main__":
    print(json.dumps(count()))
