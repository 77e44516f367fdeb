"""AdapterChecker: fetches an adapter source if it is a URL, and checks it whole against a base model. Torch-free.

Used by gateways, `tandem adapters add`, the launcher and `LLM.load_adapter`. A rank reads and checks again what it
uses. Blocks; call it from a thread.
"""

import logging
from pathlib import Path

from tandem.workers.lora.peft.adapter_source import remote_digest
from tandem.workers.lora.peft.base_tables import check_base_tables
from tandem.workers.lora.peft.peft_folder import most_file_bytes, read_adapter
from tandem.workers.messages.request import is_url
from tandem.workers.models.spec.arch import ArchSpec

log = logging.getLogger(__name__)


class AdapterChecker:
    """Checks sources against one base model.

    max_rank: --max-lora-rank. model_folder: the base checkpoint; None if there is none to compare with (random weights,
    or files that only the ranks have). cache_folder: where files of URLs stay, for ranks to find.
    """

    def __init__(self, spec: ArchSpec, max_rank: int, model_folder: Path | None, cache_folder: Path) -> None:
        self._spec = spec
        self._max_rank = max_rank
        self._model_folder = model_folder
        self._cache_folder = cache_folder

    def __call__(self, source: str) -> str:
        """Returns the digest of the source's content, and logs what is not read of it. AdapterRefused with the reason
        if it cannot be served."""
        folder = Path(source)
        if is_url(source):
            most_bytes = most_file_bytes(self._spec, self._max_rank)
            folder = self._cache_folder / remote_digest(source, self._cache_folder, most_bytes=most_bytes)
        adapter = read_adapter(folder, self._spec, self._max_rank)
        if self._model_folder is not None:
            check_base_tables(adapter, self._model_folder, self._spec)
        if adapter.facts.note is not None:
            log.warning("adapter %s: %s", source, adapter.facts.note)
        return adapter.facts.digest
