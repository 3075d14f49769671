"""Building blocks as plain torch modules; they know nothing of configurations or files."""
