"""Builds an executor and the facts of the model from settings.

Called by workers/offline/ and the coordinator (cluster/group/coordinator.py); what judges pairs of texts is the
gateway's too (cluster/gateway/app/model_text.py). Torch-free until an in-process
executor is made.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from tandem.configs.platform_facts import sized, steps_line
from tandem.configs.schema import EngineSettings, ModelSettings
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.executor.rank_group import RankGroup
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.classifier_config import read_classifier
from tandem.workers.planning.resolve import fingerprint, kv_groups, read_spec
from tandem.workers.planning.resolve import resolve_max_model_len as resolve_max_model_len
from tandem.workers.text.chat_template import ChatTemplate
from tandem.workers.text.generation_config import GenerationConfig, generation_of
from tandem.workers.text.pair_judge import PairJudge
from tandem.workers.text.tokenizer import ModelTokenizer
from tandem.workers.text.vocabulary.vocabulary_files import read_json

log = logging.getLogger("tandem.offline")


def model_generation(model: ModelSettings, spec: ArchSpec) -> GenerationConfig:
    """Returns the model's generation config, with the EOS ids of config.json where it names none itself."""
    found = generation_of(model)
    return found if found.eos_token_ids is not None else replace(found, eos_token_ids=spec.eos_token_ids)


def eos_token_ids(model: ModelSettings, spec: ArchSpec) -> tuple[int, ...]:
    """Returns the EOS token ids of generation_config.json if it has any, else those of config.json."""
    return model_generation(model, spec).eos_token_ids or ()


def pair_judge(model: ModelSettings, tokenizer: ModelTokenizer, template: ChatTemplate | None) -> PairJudge | None:
    """Returns what judges pairs of texts; None if the model is served as no classifier. template: of --chat-template,
    as the model's own is of conversations. Raises UnsupportedModelError as read_classifier() does."""
    config = {**read_json(Path(model.model) / "config.json"), **(model.hf_overrides or {})}
    token_ids = read_classifier(config, tokenizer.token_id)
    return None if token_ids is None else PairJudge(*token_ids, template)


def model_facts(settings: EngineSettings, ready: ExecutorReady) -> ModelFacts:
    """Returns the facts of the model that the engine needs, for ranks that are ready."""
    folder = Path(settings.model.model)
    spec = read_spec(settings)
    max_model_len = resolve_max_model_len(settings, spec)
    return ModelFacts(
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=eos_token_ids(settings.model, spec),
        model_revision=fingerprint(folder, settings),
        kv_dtype=_stored_as(ready),
        kv_groups=kv_groups(settings, spec, max_model_len),
        has_experts=spec.has_experts,
    )


def _stored_as(ready: ExecutorReady) -> str:
    """Returns the KV format for the keys of blocks."""
    # equal only where the bytes of a block mean the same and were computed in the same dtype
    if ready.kv_dtype in (None, ready.dtype):
        return ready.dtype
    return f"{ready.kv_dtype} from {ready.dtype}"


def open_executor(settings: EngineSettings) -> RankGroup:
    """Returns an executor that is not started: in this process for one rank, over spawned processes for several."""
    if settings.parallel.ranks_per_group == 1:
        from tandem.workers.executor.in_process_ranks import in_process_group

        make: Callable[[EngineSettings], RankGroup] = in_process_group
        return make(settings)
    from tandem.workers.executor.local_ranks import local_group

    return local_group(settings)


def offline_settings(settings: EngineSettings) -> EngineSettings:
    """Returns the settings for offline use: no queue limit, nobody who is told of KV, and one plan at a time with a
    rank in this process that computes on the CPU, as nothing goes on there while the next step is planned. Sizes of
    steps that no flag gave are those of this machine's device."""
    from tandem.workers.platforms.open_platform import device_here, is_on_cpu

    device, memory_bytes = device_here(settings)
    settings = sized(settings, device, memory_bytes, offline=True)
    if (line := steps_line(settings, device)) is not None:
        log.info("%s", line)
    scheduler = replace(
        settings.scheduler,
        max_num_queued_reqs=2**62,
        max_num_queued_tokens=None,
        async_scheduling=settings.parallel.ranks_per_group > 1 or not is_on_cpu(settings),
    )
    return replace(settings, scheduler=scheduler, cache=replace(settings.cache, kv_events=False))
