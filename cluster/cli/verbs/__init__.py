"""The verbs of `tandem`, which cluster/cli/main.py lists. Modules that are no verb belong to base/ or client/."""
