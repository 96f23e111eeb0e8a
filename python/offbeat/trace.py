"""What this rank did and when, as a file for Perfetto (https://ui.perfetto.dev).

Recording is always on: the last 32,768 frames and as many other spans are kept. `save` can be called at any moment,
also after a failure, and in a signal handler or another thread while a call hangs. `offbeat trace merge` makes one file
of those of all ranks, with their clocks aligned.
"""

import json
import os
import time
from pathlib import Path

from . import _core, files, runtime
from .errors import InvalidArgument
from .timeline import Recording, Span

__all__ = ["clear", "save"]

# Labels of the buckets of each model, by its number, for the names of tracks.
names: dict[int, list[str]] = {}


def save(path: str | os.PathLike[str]) -> Path:
    """Writes what this rank has recorded, and gives the path of the file.

    Args:
        path: a file, where "{rank}" stands for the number of this rank, or a directory, where the file becomes
            rank<number>.json. Compressed if the name ends in .gz.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgument(f'path must be the name of a file, not {path!r}; try: "trace-{{rank}}.json"')
    recording = record()
    target = files.for_rank(path, recording.rank)
    try:
        if target.is_dir() or os.fspath(path).endswith(os.sep):
            target /= f"rank{recording.rank}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        files.replace(target, json.dumps(recording.document(), separators=(",", ":")))
    except OSError as error:
        raise InvalidArgument(f"cannot write {target}: {error.strerror or error}; try: give another path") from None
    return target


def clear() -> None:
    """Forgets what was recorded so far, for instance after warming up."""
    runtime.current().trace_clear()


def record() -> Recording:
    """What this rank has recorded, as a value. Waits for nobody."""
    core = runtime.current()
    return Recording(
        rank=core.rank,
        world_size=core.world_size,
        host=core.host,
        job=runtime.job,
        clock=_core.clock(),
        monotonic=_core.now(),
        unix=time.time_ns(),
        version=_core.__version__,
        dropped=core.trace_dropped(),
        spans=[Span(*span) for span in core.trace()],
        names={model: list(labels) for model, labels in list(names.items())},
    )
