"""One group's work: scheduler, KV blocks, ranks, model, sampling, LoRA, text. Runs without Ray."""

if not __name__.startswith("tandem."):
    raise ImportError(
        "import tandem.workers instead of workers: under a second name each of its classes would exist twice"
    )

from tandem.configs.environment import limit_openmp_spins

limit_openmp_spins()  # here, as some module of this folder is imported before torch in every process that computes
