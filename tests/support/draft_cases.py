"""The cases of tests/parity/test_speculation.py: methods, and what happens to requests with drafts. The table in
docs/serving/drafts-tested.md is made of them (tools/draft_matrix.py)."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 5, "suffix_decoding_max_spec_factor": 2.0}
CROWD = {"num_gpu_blocks_override": 24, "kv_offloading_size": 0.05}
CODED = {"quantization": "int8", "kv_cache_dtype": "int8"}
EXACT: Final = {"dtype": "bfloat16", "batch_invariant": True}
FOUND, SWAPPED = frozenset({"found"}), frozenset({"preempted", "found", "loaded"})


class DraftCase(NamedTuple):
    """What an engine is opened with. happens: to a crowd of requests, at least. parity: a case of make parity, as ranks
    in processes of their own take long to start."""

    method: str
    flags: Mapping[str, Any]
    happens: frozenset[str] = FOUND
    parity: bool = True

    @property
    def is_exact(self) -> bool:
        """True if log probabilities are equal to the last bit, as logits are (--batch-invariant)."""
        return EXACT.items() <= self.flags.items()


CASES: Final[Mapping[str, DraftCase]] = {
    "room for all": DraftCase("ngram", {}, parity=False),
    "preemption": DraftCase(
        "ngram", {"num_gpu_blocks_override": 24, "enable_prefix_caching": False}, frozenset({"preempted"}), False
    ),
    "offload": DraftCase("ngram", CROWD, SWAPPED, False),
    "small chunks": DraftCase("ngram", {"max_num_batched_tokens": 24}, parity=False),
    "tp2": DraftCase("ngram", {"tensor_parallel_size": 2}, parity=False),
    "pp2": DraftCase("ngram", {"pipeline_parallel_size": 2, **CROWD}, SWAPPED, False),
    "bfloat16": DraftCase("ngram", EXACT, parity=False),
    "coded": DraftCase("ngram", {**CODED, **CROWD}, SWAPPED),
    "suffix, coded": DraftCase("suffix", {**CODED, **CROWD}, SWAPPED),
    "suffix, tp2": DraftCase("suffix", {"tensor_parallel_size": 2}),
    "suffix, pp2": DraftCase("suffix", {"pipeline_parallel_size": 2}),
    "suffix, bfloat16": DraftCase("suffix", EXACT),
    "draft model": DraftCase("draft_model", {}, parity=False),
    "draft model, offload": DraftCase("draft_model", {"kv_cache_dtype": "int8", **CROWD}, SWAPPED, False),
    "draft model, coded": DraftCase("draft_model", CODED),
    "draft model, tp2": DraftCase("draft_model", {"tensor_parallel_size": 2}),
    "draft model, pp2": DraftCase("draft_model", {"pipeline_parallel_size": 2}),
    "draft model, bfloat16": DraftCase("draft_model", {**EXACT, "max_num_batched_tokens": 24}),
    "eagle, coded": DraftCase("eagle", {**CODED, **CROWD}, SWAPPED),
    "eagle, tp2": DraftCase("eagle", {"tensor_parallel_size": 2}),
    "eagle, pp2": DraftCase("eagle", {"pipeline_parallel_size": 2, **CROWD}, SWAPPED),
    "eagle, bfloat16": DraftCase("eagle", {**EXACT, "max_num_batched_tokens": 24}),
    "eagle3, preemption": DraftCase("eagle3", CROWD, SWAPPED, False),
    "eagle3, coded": DraftCase("eagle3", CODED),
    "eagle3, tp2": DraftCase("eagle3", {"tensor_parallel_size": 2}),
    "eagle3, pp2": DraftCase("eagle3", {"pipeline_parallel_size": 2, **CROWD}, SWAPPED),
    "eagle3, tp2 pp2": DraftCase("eagle3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "eagle3, bfloat16": DraftCase("eagle3", {**EXACT, "max_num_batched_tokens": 24}),
    "mtp, offload": DraftCase("mtp", CROWD, SWAPPED),
    "mtp, coded": DraftCase("mtp", CODED),
    "mtp, tp2": DraftCase("mtp", {"tensor_parallel_size": 2}),
    "mtp, pp2": DraftCase("mtp", {"pipeline_parallel_size": 2}),
    "mtp, bfloat16": DraftCase("mtp", {**EXACT, "max_num_batched_tokens": 24}),
    "medusa": DraftCase("medusa", {"max_num_batched_tokens": 24}, parity=False),
    "medusa, coded": DraftCase("medusa", {**CODED, **CROWD}, SWAPPED),
    "medusa, tp2": DraftCase("medusa", {"tensor_parallel_size": 2}),
    "medusa, pp2": DraftCase("medusa", {"pipeline_parallel_size": 2}),
    "medusa, bfloat16": DraftCase("medusa", EXACT),
}
RESUMED: Final = {
    "room for all": False,
    "offload": False,
    "bfloat16": False,
    "draft model": False,
    "suffix, coded": True,
    "eagle, coded": True,
    "eagle3, preemption": True,
    "mtp, offload": True,
    "medusa": True,
}
"""Cases of requests that another engine resumes, and whether these are of make parity."""
