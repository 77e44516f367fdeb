"""Ray Serve's router of groups: the only files of cluster/routing that import Ray."""
