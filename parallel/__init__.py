"""Tensor and pipeline parallelism: mesh, groups, collectives, linear layers, checkpoint reading.

This package handles tensors and ranks; it has no notion of requests or KV.
"""

if not __name__.startswith("tandem."):
    raise ImportError(
        "import tandem.parallel instead of parallel: under a second name each of its classes would exist twice"
    )
