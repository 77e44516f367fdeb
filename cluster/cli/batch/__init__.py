"""The engine and the gateway of `tandem run-batch`, in its own process, and its files."""
