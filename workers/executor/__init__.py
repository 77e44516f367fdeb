"""Starts, drives and judges the ranks of a group: in process, as child processes, or by Ray (cluster/group)."""
