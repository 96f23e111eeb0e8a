"""The command `offbeat`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from . import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and gives its exit code."""
    options = _parser().parse_args(arguments)
    # Imported here, so that `offbeat --help` stays quick when more commands come.
    if options.command == "trace":
        from . import merge

        return merge.run(options.files, options.output, as_json=options.json)
    if options.command == "tune":
        from . import tune

        return tune.run(
            tune.Options(
                command=options.program[1:] if options.program[:1] == ["--"] else options.program,
                nproc=options.nproc_per_node,
                steps=options.steps,
                sizes=options.sizes,
                output=options.output,
                png=options.png,
                as_json=options.json,
            )
        )
    from . import doctor

    return doctor.run(as_json=options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="offbeat", description="Communication for data-parallel PyTorch.")
    parser.add_argument("--version", action="version", version=f"offbeat {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser(
        "doctor",
        help="show versions, limits, interfaces and links, and what to try where something is missing",
        description="Shows what Offbeat finds on this machine; under torchrun also how ranks reach each other.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of tables")
    trace = commands.add_parser("trace", help="work with the files of offbeat.trace.save()")
    of_trace = trace.add_subparsers(dest="action", required=True, metavar="action")
    merge = of_trace.add_parser(
        "merge",
        help="make one file for Perfetto of those of several ranks, and say which rank and link was slowest",
        description="Aligns the clocks of all ranks, writes one file for https://ui.perfetto.dev, and says in one line "
        "which rank was last, which link was slowest, and how much of the communication was hidden.",
    )
    merge.add_argument(
        "files", nargs="+", type=Path, metavar="file", help="one of each rank, .json or .json.gz; or their directory"
    )
    merge.add_argument(
        "-o", "--output", type=Path, required=True, help="the file to write; compressed if it ends in .gz"
    )
    merge.add_argument("--json", action="store_true", help="print JSON instead of one line")
    _add_tune(commands)
    return parser


def _add_tune(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    tune = commands.add_parser(
        "tune",
        help="find the best size of buckets for a training script, and write it into a profile",
        usage="offbeat tune [options] -- python train.py ...",
        description="Runs a training script under torchrun, tries sizes of buckets in its steps, ends it when all are "
        "tried, and writes the best one into a profile that offbeat.init() picks up.",
    )
    tune.add_argument("--nproc-per-node", type=int, metavar="N", help="ranks to start (default: cores, from 2 to 4)")
    tune.add_argument("--steps", type=int, default=10, metavar="S", help="steps that count in a try (default: 10)")
    tune.add_argument("--sizes", metavar="256K,1M", help="sizes to try (default: powers of two that fit the model)")
    tune.add_argument("--output", default="offbeat-profile.json", metavar="FILE", help="where the profile goes")
    tune.add_argument("--png", metavar="FILE", help="where the picture goes (default: beside the profile)")
    tune.add_argument("--json", action="store_true", help="print JSON instead of a table and a curve")
    tune.add_argument("program", nargs=argparse.REMAINDER, help="the command that trains, also torchrun itself")
