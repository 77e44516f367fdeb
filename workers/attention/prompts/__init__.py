"""Attention of prompts on GPUs by torch's flash kernel."""
