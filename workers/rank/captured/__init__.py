"""Whole steps that a device's graphs hold: their memory, their work, and how a plan's step is put into one."""
