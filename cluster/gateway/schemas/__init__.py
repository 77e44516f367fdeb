"""The bodies of requests: their fields, types and ranges, and refusals that name the field at fault."""
