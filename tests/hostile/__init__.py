"""Hostile input for every kind of file that lmtrain reads: for the tests and for scripts/fuzz."""
