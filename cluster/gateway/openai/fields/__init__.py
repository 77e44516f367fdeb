"""Fields of bodies that several routes share."""
