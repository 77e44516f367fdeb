"""The gateway's process: its deployment, what it is built of, its routes and probes."""
