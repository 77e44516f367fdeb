"""Conversations, for all APIs that are worded so: from messages to a prompt, from output to thinking, text, calls."""
