"""Tandem: an LLM serving cluster on Ray.

`from tandem import LLM, SamplingParams` is the offline API (docs/offline.md). The code lives in the folders `configs`,
`parallel`, `offload`, `workers` and `cluster` of the repository, imported as `tandem.configs`, `tandem.workers`, ...
The links beside this file serve tools and checkouts that are not installed; builds map the folders (setup.py).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.workers.messages.request import SamplingParams
    from tandem.workers.messages.sampling_ranges import RequestOutputKind, StructuredOutputsParams
    from tandem.workers.offline.async_llm import AsyncLLM
    from tandem.workers.offline.embed import PoolingParams
    from tandem.workers.offline.llm import LLM
    from tandem.workers.text.beam_search import BeamSearchParams

    __version__: str

PUBLIC = {
    "AsyncLLM": "tandem.workers.offline.async_llm",
    "LLM": "tandem.workers.offline.llm",
    "BeamSearchParams": "tandem.workers.text.beam_search",
    "PoolingParams": "tandem.workers.offline.embed",
    "RequestOutputKind": "tandem.workers.messages.sampling_ranges",
    "SamplingParams": "tandem.workers.messages.request",
    "StructuredOutputsParams": "tandem.workers.messages.sampling_ranges",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "PoolingParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used: `LLM` imports torch, which gateways and routers never load."""
    if name == "__version__":
        return _version()
    if name not in __all__:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    """Lists the public names, which are loaded when they are first used."""
    return list(__all__)


def _version() -> str:
    """Returns the version of the installed distribution, or "unknown" in a checkout that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tandem-serve")
    except PackageNotFoundError:
        return "unknown"
