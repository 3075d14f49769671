"""The configuration: one schema per section, and its loader (YAML, environment, overrides)."""
