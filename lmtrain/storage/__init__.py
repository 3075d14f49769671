"""Atomic directories, safetensors, run folders and their checkpoints."""
