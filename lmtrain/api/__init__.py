"""The Python interface: `load` and `train`."""
