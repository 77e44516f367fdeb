"""Whether a source holds an adapter of a model: fetched where it is a URL, read and checked whole. Torch-free.

Called by whoever lists adapters: gateways, `tandem adapters add`, the launcher, `LLM.load_adapter`. A rank reads again
what it uses and checks the same. Blocks; call it from a thread.
"""

from pathlib import Path

from workers.adapter_source import remote_digest
from workers.base_tables import check_base_tables
from workers.messages import is_url
from workers.models.spec import ArchSpec
from workers.peft_folder import most_file_bytes, read_adapter


class AdapterChecker:
    """Checks sources against one base model. model_folder: its checkpoint, None where there is none to compare with
    (random weights, or files that only the ranks have); cache_folder: where files of URLs stay, for ranks to find."""

    def __init__(self, spec: ArchSpec, max_rank: int, model_folder: Path | None, cache_folder: Path) -> None:
        self._spec = spec
        self._max_rank = max_rank
        self._model_folder = model_folder
        self._cache_folder = cache_folder

    def __call__(self, source: str) -> str:
        """The digest of what lies there. AdapterRefused with the reason when it cannot be served."""
        folder = Path(source)
        if is_url(source):
            most_bytes = most_file_bytes(self._spec, self._max_rank)
            folder = self._cache_folder / remote_digest(source, self._cache_folder, most_bytes=most_bytes)
        adapter = read_adapter(folder, self._spec, self._max_rank)
        if self._model_folder is not None:
            check_base_tables(adapter, self._model_folder, self._spec)
        return adapter.facts.digest
