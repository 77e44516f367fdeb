"""Facts and tokens that travel between the processes of a service."""
