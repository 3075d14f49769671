"""The help page of a command."""

from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose help lists its options in groups and leaves out the Python types of its arguments."""

    ungrouped = "Options"
    """The group of the options that name none."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options, group after group, in the order of their first members."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                if parameter.param_type_name == "argument":
                    groups.setdefault("Arguments", []).append((record[0].partition(" <")[0], record[1]))
                else:
                    groups.setdefault(getattr(parameter, "rich_help_panel", None) or self.ungrouped, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)
