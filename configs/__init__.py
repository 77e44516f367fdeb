"""Settings (schema, flags, loading, presets), launch files and the bundled demo model. Imports no other folder."""

if not __name__.startswith("tandem."):
    raise ImportError(
        "import tandem.configs instead of configs: under a second name each of its classes would exist twice"
    )
