"""Players of the launch files, as shipped, on this machine: `make launch`. Not part of `make test`."""
