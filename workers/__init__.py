"""One group's work: scheduler, KV blocks, ranks, model, sampling, LoRA, text. Runs without Ray."""

if not __name__.startswith("tandem."):
    raise ImportError(
        "import tandem.workers instead of workers: under a second name each of its classes would exist twice"
    )
