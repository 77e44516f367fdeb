"""Prompts of the kinds that the demo model knows, for what needs its answers (docs/serving/distilling.md).

python -m tools.demo_model.prompts prompts.jsonl        # 1500 lines, each with `messages` or `prompt`
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tools.demo_model.corpus import draw_exchange
from tools.demo_model.stories import compose_story

STORIES: Final = 0.2
"""The part of prompts that are the first words of a story, to be continued."""


def prompts(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields different prompts, as lines of a .jsonl file have them."""
    rng, seen = random.Random(seed), set[str]()
    while len(seen) < count:
        found: dict[str, Any]
        if rng.random() < STORIES:
            words = compose_story(rng).split()
            found = {"prompt": " ".join(words[: rng.randint(4, 16)])}
        else:
            found = {"messages": [{"role": "user", "content": draw_exchange(rng).question}]}
        if (line := json.dumps(found)) not in seen:
            seen.add(line)
            yield found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lines = (json.dumps(one) + "\n" for one in prompts(options.count, options.seed))
    options.file.write_text("".join(lines), encoding="utf-8")
