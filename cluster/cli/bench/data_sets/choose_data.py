"""The data set that the flags name, as samples."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path

from tandem.cluster.cli.base.flag_groups import flag_name
from tandem.cluster.cli.base.terminal import say
from tandem.cluster.cli.bench.data_sets import synthetic_data, text_data, timed_traces
from tandem.cluster.cli.bench.data_sets.data_flags import DATA_SETS, DataFlags
from tandem.cluster.cli.bench.data_sets.samples import Sample, SampleText
from tandem.configs.errors import SettingsError

MADE_UP = ("random", "prefix_repetition")
SOME: Mapping[str, Collection[str]] = {
    "input_len": ("random",),
    "output_len": [name for name in DATA_SETS if name != "timed_trace"],
    "no_oversample": ("sharegpt", "custom"),
    "disable_shuffle": ("sharegpt", "custom", "prefix_repetition"),
    "skip_chat_template": ("custom",),
}
"""Flags that some data sets have no use for, and those that have, beside flags that begin with a data set's name."""
PATH = "--dataset-path"


def check_data(flags: DataFlags) -> None:
    """SettingsError when the data set has no file, or a file that it does not use."""
    name, path = flags.dataset_name, flags.dataset_path
    if name in MADE_UP and path is not None:
        raise SettingsError(f"{path}: --dataset-name {name} is made up and reads no file", PATH)
    if name not in MADE_UP and path is None:
        raise SettingsError(f"--dataset-name {name} is read from a file: name it", PATH)
    if path is not None and not Path(path).is_file():
        raise SettingsError(f"{path}: no such file", PATH)
    for one in fields(flags):
        if getattr(flags, one.name) != one.default and name not in _users(one.name):
            raise SettingsError(f"--dataset-name {name} has no use for it", flag_name(one))


def _users(flag: str) -> Collection[str]:
    """The data sets that a flag changes something of."""
    named = [name for name in DATA_SETS if flag.startswith(f"{name}_")]
    return named or SOME.get(flag, DATA_SETS)


def make_samples(flags: DataFlags, text: SampleText, *, as_chat: bool = False, timed: bool = False) -> list[Sample]:
    """Makes the samples of a load. as_chat: the service renders chats itself. timed: they are sent when the trace says.
    SettingsError for a file that is of another kind or has no usable row."""
    check_data(flags)
    try:
        samples = _made_samples(flags, text, as_chat, timed)
    except OSError as error:
        raise SettingsError(f"{flags.dataset_path} cannot be read: {error.strerror}", PATH) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{flags.dataset_path} is not UTF-8", PATH) from error
    if not samples:
        raise SettingsError(f"{flags.dataset_path}: no request that --dataset-name {flags.dataset_name} takes", PATH)
    if len(samples) < flags.num_prompts and flags.dataset_name in ("sharegpt", "custom") and not flags.no_oversample:
        return synthetic_data.many(samples, flags.num_prompts, flags.seed)
    return samples


def _made_samples(flags: DataFlags, text: SampleText, as_chat: bool, timed: bool) -> list[Sample]:
    if flags.dataset_name == "timed_trace":
        samples, empty = timed_traces.timed_trace_samples(flags, text, needs_times=timed)
        if empty:
            say(f"{empty} rows of {flags.dataset_path} have no tokens and are left out")
        return samples
    if flags.dataset_name == "custom":
        return text_data.custom_samples(flags, text, as_chat=as_chat)
    makers = {
        "random": synthetic_data.random_samples,
        "prefix_repetition": synthetic_data.prefix_repetition_samples,
        "burstgpt": synthetic_data.burstgpt_samples,
        "sharegpt": text_data.sharegpt_samples,
    }
    return makers[flags.dataset_name](flags, text)
