"""Writes trained runs as folders that other programs load."""
