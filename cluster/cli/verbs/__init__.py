"""The verbs of `tandem`, which cluster/cli/main.py lists."""
