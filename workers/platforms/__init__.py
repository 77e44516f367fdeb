"""Everything in which devices differ, as one record per rank."""
