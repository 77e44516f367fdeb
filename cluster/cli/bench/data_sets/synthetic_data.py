"""Made-up prompts: random tokens, tokens behind shared prefixes, and BurstGPT's lengths.

The same seed and tokenizer make the prompts of vLLM's data sets of these names, `burstgpt` excepted: which of its rows
are drawn differs.
"""

import csv
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tandem.cluster.cli.bench.data_sets.data_flags import DataFlags
from tandem.cluster.cli.bench.data_sets.samples import Sample, SampleText
from tandem.configs.errors import SettingsError

RATIO = "--random-range-ratio"


def random_samples(flags: DataFlags, text: SampleText) -> list[Sample]:
    """Makes prompts that share --random-prefix-len tokens. Each goes on with consecutive ids of the vocabulary, from a
    random one on. SettingsError for lengths or ratios that make no prompt."""
    import numpy as np

    rng = np.random.default_rng(flags.seed)
    middle = flags.random_input_len if flags.input_len is None else flags.input_len
    shares = _shares(flags.random_range_ratio)
    inputs = _around(max(0, middle - text.num_added), shares[0])
    outputs = tuple(max(1, length) for length in _around(flags.answer_len(flags.random_output_len), shares[1]))
    if flags.random_prefix_len + inputs[0] < 1:
        raise SettingsError(f"{middle}: the shortest prompt would have no token of its own", "--random-input-len")
    count = flags.num_prompts
    input_lens = rng.integers(inputs[0], inputs[1] + 1, size=count)
    output_lens = rng.integers(outputs[0], outputs[1] + 1, size=count)
    offsets = rng.integers(0, text.num_plain, size=count)
    prefix: list[int] = []
    if flags.random_prefix_len:
        drawn = rng.integers(0, len(text.allowed), size=flags.random_prefix_len)
        _, prefix = text.exactly(text.allowed[drawn].tolist(), rng.integers)
    samples = []
    for place in range(count):
        ids = (int(offsets[place]) + place + np.arange(int(input_lens[place]))) % len(text.allowed)
        prompt, tokens = text.exactly([*prefix, *text.allowed[ids].tolist()], rng.integers)
        samples.append(Sample(prompt, len(tokens), int(output_lens[place])))
    return samples


def _around(middle: int, share: float) -> tuple[int, int]:
    return math.floor(middle * (1 - share)), math.ceil(middle * (1 + share))


def _shares(given: str) -> tuple[float, float]:
    """The ratios of input and output. SettingsError unless both are in [0, 1)."""
    try:
        found = json.loads(given)
        both = (found["input"], found["output"]) if isinstance(found, dict) else (found, found)
        shares = float(both[0]), float(both[1])
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f'{given}: neither a number nor {{"input": X, "output": X}}', RATIO) from error
    if not all(0 <= share < 1 for share in shares):
        raise SettingsError(f"{given}: must be at least 0 and below 1", RATIO)
    return shares


def prefix_repetition_samples(flags: DataFlags, text: SampleText) -> list[Sample]:
    """Makes the same number of prompts for each prefix. SettingsError for fewer requests than prefixes."""
    import numpy as np

    draw = np.random.RandomState(flags.seed).randint
    prefixes = flags.prefix_repetition_num_prefixes
    if flags.num_prompts < prefixes:
        raise SettingsError(
            f"{flags.num_prompts}: less than --prefix-repetition-num-prefixes {prefixes}", "--num-prompts"
        )
    samples = []
    for _ in range(prefixes):
        _, prefix = text.exactly(text.random_ids(flags.prefix_repetition_prefix_len, draw), draw)
        for _ in range(flags.num_prompts // prefixes):
            _, suffix = text.exactly(text.random_ids(flags.prefix_repetition_suffix_len, draw), draw)
            ids = prefix + suffix
            samples.append(Sample(text.decode(ids), len(ids), flags.answer_len(flags.prefix_repetition_output_len)))
    if not flags.disable_shuffle:
        random.Random(flags.seed).shuffle(samples)
    return samples


def burstgpt_samples(flags: DataFlags, text: SampleText) -> list[Sample]:
    """Makes prompts with the lengths of BurstGPT's rows of GPT-4 that were answered, drawn at random. SettingsError for
    a file of another kind."""
    assert flags.dataset_path is not None
    lengths = list(_gpt4_lengths(Path(flags.dataset_path)))
    if not lengths:
        raise SettingsError(f"{flags.dataset_path}: no answered request of GPT-4", "--dataset-path")
    draw = random.Random(flags.seed)
    enough = flags.num_prompts <= len(lengths)
    chosen = draw.sample(lengths, flags.num_prompts) if enough else draw.choices(lengths, k=flags.num_prompts)
    samples = []
    for place, (input_len, output_len) in enumerate(chosen):
        ids = [(place + at) % text.num_plain for at in range(input_len)]
        samples.append(Sample(text.decode(ids), input_len, flags.answer_len(output_len)))
    return samples


def _gpt4_lengths(path: Path) -> Iterator[tuple[int, int]]:
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            try:
                if row["Model"] == "GPT-4" and int(row["Response tokens"]) > 0:
                    yield int(row["Request tokens"]), int(row["Response tokens"])
            except (KeyError, ValueError, TypeError) as error:
                raise SettingsError(f"{path}: a row is not BurstGPT's: {dict(row)}", "--dataset-path") from error


def many(samples: list[Sample], count: int, seed: int) -> list[Sample]:
    """Returns the samples and more of them, drawn at random, until there are `count`."""
    draw = random.Random(seed)
    return [*samples, *(replace(draw.choice(samples)) for _ in range(count - len(samples)))]
