"""KV blocks and weights that are outside the device's memory: tiers and transfers.

This package handles blocks, bytes and layers; it has no notion of requests.
"""

if not __name__.startswith("tandem."):
    raise ImportError(
        "import tandem.offload instead of offload: under a second name each of its classes would exist twice"
    )
