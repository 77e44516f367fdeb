"""The bundled demo model: its weights, its adapters, and the scripts that made them.

A first `make serve` talks to this model, so it must answer something sensible without any download.
Nothing in the serving code imports these scripts; the cluster only reads `model/` and `adapters/`.
"""
