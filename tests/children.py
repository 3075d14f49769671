"""Child, under its former address."""

from tests.helpers import Child

__all__ = ["Child"]
