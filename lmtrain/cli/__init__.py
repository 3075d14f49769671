"""The command line: one file for each command that needs one, shared options, console output."""
