"""The training loop, its optimizer and schedules, and what is watched while it runs."""
