"""`offbeat trace merge`: the traces of several ranks as one file with one clock, and what they say in one line."""

import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from . import clocks, files, summary, timeline
from .clocks import Setting
from .timeline import Recording

MAGIC_OF_GZIP = b"\x1f\x8b"


def run(paths: Sequence[Path], output: Path, *, as_json: bool) -> int:
    """Reads, merges, writes and prints. Gives the exit code: 2 if the files cannot be merged."""
    try:
        paths = [file for path in paths for file in _files(path)]
        if output.resolve() in (path.resolve() for path in paths):
            raise ValueError(f"{output} would overwrite what it is made of; give another file to -o")
        recordings = [_read(path) for path in paths]
        _check(recordings, paths)
        merged, settings = merge(recordings)
        found = summary.summarize(merged, settings.values())
        output.parent.mkdir(parents=True, exist_ok=True)
        files.replace(output, json.dumps(document(merged, settings, found), separators=(",", ":")))
    except (ValueError, OSError) as error:
        print(f"offbeat trace merge: {error}", file=sys.stderr)
        return 2
    print(json.dumps({**told(found, settings), "output": str(output)}, indent=2) if as_json else found.line)
    return 0


def _files(path: Path) -> list[Path]:
    """A file, or those that `trace.save` has put into a directory."""
    if not path.is_dir():
        return [path]
    inside = sorted(path.glob("rank*.json"))
    if not inside:
        raise ValueError(f"{path} has no rank*.json, as trace.save() writes them; try: the files themselves")
    return inside


def merge(recordings: Iterable[Recording]) -> tuple[list[Recording], dict[str, Setting]]:
    """The recordings by rank, their times set to one clock that begins with the first span; how each clock was set."""
    recordings = sorted(recordings, key=lambda recording: recording.rank)
    settings = clocks.align(recordings)
    shifted = [_shift(recording, settings[recording.clock]) for recording in recordings]
    first = min((span.begin for recording in shifted for span in recording.spans), default=0)
    start = Setting((), "", -first)
    return [_shift(recording, start) for recording in shifted], settings


def _shift(recording: Recording, setting: Setting) -> Recording:
    spans = [span._replace(begin=setting(span.begin), end=setting(span.end)) for span in recording.spans]
    return replace(recording, monotonic=setting(recording.monotonic), spans=spans)


def document(recordings: Sequence[Recording], settings: dict[str, Setting], found: summary.Summary) -> dict[str, Any]:
    """The merged file, ready for `json.dumps`."""
    events: list[timeline.Event] = []
    for recording in recordings:
        events += timeline.events(recording, _label(settings[recording.clock]))
    about = {
        "format": timeline.MERGED,
        "job": recordings[0].job,
        "version": recordings[0].version,
        "names": [recording.name for recording in recordings],
        **told(found, settings),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def told(found: summary.Summary, settings: dict[str, Setting]) -> dict[str, Any]:
    """The summary as plain values, in seconds."""
    told_clocks = [
        {
            "clock": clock,
            "ranks": list(setting.ranks),
            "by": setting.by,
            "offset": setting.offset / 1e9,
            "drift": setting.drift,
            "uncertainty": None if setting.uncertainty is None else setting.uncertainty / 1e9,
        }
        for clock, setting in settings.items()
    ]
    return {"line": found.line, **asdict(found), "clocks": told_clocks}


def _label(setting: Setting) -> str:
    if setting.uncertainty is None:
        return "clock unknown"
    return f"clock ±{setting.uncertainty / 1e6:.3f} ms" if setting.uncertainty else ""


def _read(path: Path) -> Recording:
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data.startswith(MAGIC_OF_GZIP) else data
        return timeline.parse(json.loads(text))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror or error}); give files that trace.save() wrote"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is cut off or no JSON ({error}); save it again") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def _check(recordings: Sequence[Recording], paths: Sequence[Path]) -> None:
    """The files must be of one job, and of each rank there must be one at most."""
    seen: dict[int, Path] = {}
    for recording, path in zip(recordings, paths, strict=True):
        if recording.job != recordings[0].job or recording.world_size != recordings[0].world_size:
            raise ValueError(
                f"{path} and {paths[0]} are of different jobs, or of different attempts of one; give files that were "
                "saved between the same init() and shutdown()"
            )
        if recording.rank in seen:
            raise ValueError(f"{path} and {seen[recording.rank]} are both of rank {recording.rank}; give one of them")
        seen[recording.rank] = path
