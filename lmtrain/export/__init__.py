"""Trained runs as folders that other programs load."""
