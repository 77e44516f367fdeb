"""The recorder of an engine: what it was told, the times that it read, what its ranks answered; and its replay."""
