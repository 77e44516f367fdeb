"""Memory before anything is loaded: the plan of `tandem plan`, a rank's KV budget, resolved settings."""
