"""The training loop: one step, optimizer and schedule, validation, monitoring, checkpoint cadence."""
