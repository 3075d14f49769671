"""Checkpoints in memory, under their former address."""

from tests.helpers import Content, content, read

__all__ = ["Content", "content", "read"]
