"""A model family as torch-free data: config.json to ArchSpec, checkpoint names, parameter sizes."""
