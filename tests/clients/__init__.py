"""Clients that users of other servers have, tried on Tandem: `make clients`. Not part of `make test`."""
