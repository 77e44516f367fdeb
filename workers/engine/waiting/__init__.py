"""Waiting: the queue, the rules of admission, fair shares, what sequences wait for."""
