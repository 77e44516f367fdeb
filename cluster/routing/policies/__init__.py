"""Policies that pick the group of a request, a file each: policy_names.policy_by_name makes one. They need no Ray."""
