"""The flags that choose the prompts of a load, spelled as vLLM's bench spells them."""

from dataclasses import dataclass
from typing import Final

from tandem.cluster.cli.base.flag_groups import setting

DATA_SETS: Final = ("random", "sharegpt", "burstgpt", "custom", "prefix_repetition", "timed_trace")


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """The data set, how many prompts of it, and its own flags."""

    dataset_name: str = setting("Data set.", default="random", choices=DATA_SETS)
    dataset_path: str | None = setting("Its file. Not for random and prefix_repetition, which are made up.")
    num_prompts: int = setting("Requests to send.", default=1000, least=1)
    seed: int = setting("Seed of prompts, lengths and times: the same seed sends the same.", default=0, least=0)
    no_oversample: bool = setting("Send fewer requests rather than some of a small file twice.", default=False)
    disable_shuffle: bool = setting("Keep the order of the file.", default=False)
    skip_chat_template: bool = setting(
        "Send texts of --dataset-name custom to the completions route as they are.", default=False
    )
    input_len: int | None = setting("Short for --random-input-len.", least=1)
    output_len: int | None = setting("Longest answer, for every data set but timed_trace.", least=1)
    random_input_len: int = setting("Tokens of a random prompt.", default=1024, least=0)
    random_output_len: int = setting("Tokens of its answer.", default=128, least=1)
    random_range_ratio: str = setting(
        'Lengths are drawn from this share around both, 0.5 or {"input": 0.3, "output": 0.5}.', default="0.0"
    )
    random_prefix_len: int = setting("Tokens before them that all random prompts share.", default=0, least=0)
    sharegpt_output_len: int | None = setting("Longest answer. Default: as long as the file's.", least=1)
    custom_output_len: int = setting("Longest answer; -1: the row's output_tokens.", default=256, least=-1)
    prefix_repetition_prefix_len: int = setting("Tokens of each prefix.", default=256, least=1)
    prefix_repetition_suffix_len: int = setting("Tokens behind it, of each request.", default=256, least=1)
    prefix_repetition_num_prefixes: int = setting("Different prefixes.", default=10, least=1)
    prefix_repetition_output_len: int = setting("Longest answer.", default=128, least=1)
    timed_trace_chunk_hash_size: int = setting(
        "Tokens that one of a row's hash_ids stands for, 512 in Mooncake's traces.", default=16, least=1
    )
    timed_trace_sec_multiplier: float = setting(
        "Seconds of a unit of the trace's times, 0.001 for milliseconds; smaller plays it faster.", default=1.0, above=0
    )
    timed_trace_length_scale: float = setting(
        "Multiplies all lengths, for models with a short context.", default=1.0, above=0
    )
    timed_trace_label_timestamp: str | None = setting("The field of times. Default: as known traces call it.")
    timed_trace_label_input_length: str | None = setting("The field of prompts' lengths. Default: likewise.")
    timed_trace_label_output_length: str | None = setting("The field of answers' lengths. Default: likewise.")
    timed_trace_label_hash_ids: str = setting("The field of ids of shared blocks.", default="hash_ids")

    def answer_len(self, own: int) -> int:
        """The longest answer: --output-len, else the data set's own."""
        return own if self.output_len is None else self.output_len
