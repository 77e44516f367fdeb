"""Copies of KV bytes between the device and host memory, on the rank's side."""
