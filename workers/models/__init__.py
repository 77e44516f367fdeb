"""One decoder for every registered family. spec, registry, rope_config and weight_names are torch-free, as is this."""
