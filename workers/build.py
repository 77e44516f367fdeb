"""From settings to a running engine: the executor that fits them and the facts of the model.

Called by workers/offline.py and the coordinator (cluster/replica.py). Torch-free until an in-process executor is made.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from configs.schema import EngineSettings
from workers.engine.engine import ModelFacts
from workers.engine.executor import Executor, ExecutorReady
from workers.models.spec import ArchSpec
from workers.resolve import fingerprint, read_spec
from workers.resolve import resolve_max_model_len as resolve_max_model_len


def eos_token_ids(folder: Path, spec: ArchSpec) -> tuple[int, ...]:
    """generation_config.json's EOS ids when given, else config.json's."""
    file = folder / "generation_config.json"
    if file.exists():
        given = msgspec.json.decode(file.read_bytes()).get("eos_token_id")
        if given is not None:
            return tuple(given) if isinstance(given, list) else (int(given),)
    return spec.eos_token_ids


def model_facts(settings: EngineSettings, ready: ExecutorReady) -> ModelFacts:
    """What the engine needs of the model."""
    folder = Path(settings.model.model)
    spec = read_spec(settings)
    return ModelFacts(
        max_model_len=resolve_max_model_len(settings, spec),
        vocab_size=spec.vocab_size,
        eos_token_ids=eos_token_ids(folder, spec),
        model_revision=fingerprint(folder, settings),
        kv_dtype=_stored_as(ready),
    )


def _stored_as(ready: ExecutorReady) -> str:
    """For the keys of blocks: equal only where the bytes of a block mean the same and were computed the same way."""
    if ready.kv_dtype in (None, ready.dtype):
        return ready.dtype
    return f"{ready.kv_dtype} from {ready.dtype}"


def open_executor(settings: EngineSettings) -> Executor:
    """Not started yet: in this process for one rank, spawned rank processes for more."""
    if settings.parallel.ranks_per_group == 1:
        from workers.inprocess_executor import InProcessExecutor

        make: Callable[[EngineSettings], Executor] = InProcessExecutor
        return make(settings)
    from workers.local_executor import LocalExecutor

    return LocalExecutor(settings)


def offline_settings(settings: EngineSettings) -> EngineSettings:
    """The same engine for a caller that waits for everything: no queue limit, and one plan at a time where the only
    rank is this process itself."""
    scheduler = replace(
        settings.scheduler,
        max_num_queued_reqs=2**62,
        max_num_queued_tokens=None,
        async_scheduling=settings.parallel.ranks_per_group > 1,
    )
    return replace(settings, scheduler=scheduler)
