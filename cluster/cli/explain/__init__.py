"""The verb `explain`, and its words."""
