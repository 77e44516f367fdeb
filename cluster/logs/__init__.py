"""Log files: one for each process of a service, and the forms of their lines."""
