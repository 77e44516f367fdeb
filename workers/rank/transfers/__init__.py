"""A rank's copy lanes: threads that move KV and adapters beside the steps."""
