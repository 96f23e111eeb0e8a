"""The command `offbeat`."""

import argparse
from collections.abc import Sequence

from . import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and gives its exit code."""
    parser = argparse.ArgumentParser(prog="offbeat", description="Communication for data-parallel PyTorch.")
    parser.add_argument("--version", action="version", version=f"offbeat {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser(
        "doctor",
        help="show versions, limits, interfaces and links, and what to try where something is missing",
        description="Shows what Offbeat finds on this machine; under torchrun also how ranks reach each other.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)

    # Imported here, so that `offbeat --help` stays quick when more commands come.
    from . import doctor as command

    return command.run(as_json=options.json)
