"""Spans of a rank as a file for Perfetto (Chrome's JSON), and back. Pure: no clock, no files, no runtime."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Event = dict[str, Any]

# What `Recording.document` writes and `parse` reads; the number changes when old files can no longer be read.
FORMAT = "offbeat trace 1"
MERGED = "offbeat merged trace 1"

COMPUTE = ("forward", "backward", "wait")
BUCKET = ("queued", "reduce", "python")
LINK = ("send", "receive")


class Span(NamedTuple):
    """Something that took time, as `_core.Runtime.trace` gives it: `id` is a bucket or a peer, times are nanoseconds.

    Of frames ("send" and "receive"), `model` and `step` are the group and the number of the call in it.
    """

    kind: str
    id: int
    model: int
    step: int
    begin: int
    end: int
    bytes: int


@dataclass(frozen=True)
class Recording:
    """What one rank recorded, with what is needed to set it beside the recordings of others."""

    rank: int
    world_size: int
    host: str
    job: str  # the same on all ranks of a job, and on no others
    clock: str  # the same on all ranks that read the same clock
    monotonic: int  # one moment by the clock of the spans …
    unix: int  # … and by the wall clock, both in nanoseconds
    version: str
    dropped: int
    spans: Sequence[Span]
    names: Mapping[int, Sequence[str]] = field(default_factory=dict)  # labels of the buckets of each model

    @property
    def name(self) -> str:
        """How messages call the rank."""
        return f"rank {self.rank} (host {self.host})"

    def document(self) -> dict[str, Any]:
        """The whole file, ready for `json.dumps`."""
        about = {
            "format": FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "host": self.host,
            "job": self.job,
            "clock": self.clock,
            "anchor": {"monotonic": self.monotonic, "unix": self.unix},
            "version": self.version,
            "dropped": self.dropped,
            "names": {str(model): list(labels) for model, labels in self.names.items()},
        }
        return {"traceEvents": list(events(self)), "displayTimeUnit": "ms", "otherData": about}


class Track(NamedTuple):
    """A line of the timeline; tracks are shown in the order of these fields."""

    group: int  # 0: compute, 1: buckets, 2: links
    first: int  # the model, or the peer
    second: int  # the bucket, or the direction

    @classmethod
    def of(cls, span: Span) -> "Track":
        """Where a span belongs."""
        if span.kind in BUCKET:
            return cls(1, span.model, span.id)
        if span.kind in LINK:
            return cls(2, span.id, LINK.index(span.kind))
        return cls(0, 0, 0)

    def title(self, names: Mapping[int, Sequence[str]]) -> str:
        """What stands beside the line."""
        if self.group == 0:
            return "compute"
        if self.group == 2:
            return f"{('send to', 'receive from')[self.second]} {self.first}"
        labels = names.get(self.first, ())
        label = f": {labels[self.second]}" if self.second < len(labels) else ""
        return f"model {self.first} bucket {self.second}{label}"


def lanes(spans: Iterable[Span], *, nest: bool) -> list[list[Span]]:
    """Spreads the spans of a track over as many lanes as it takes for none to overlap: Perfetto loses those that do.

    With `nest`, a span may lie inside another one of its lane, and is shown below it.
    """
    made: list[list[Span]] = []
    opened: list[list[int]] = []  # for each lane the ends of the spans that are not over yet, the innermost last
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        for number, ends in enumerate(opened):
            while ends and ends[-1] <= span.begin:
                ends.pop()
            if not ends or (nest and span.end <= ends[-1]):
                made[number].append(span)
                ends.append(span.end)
                break
        else:
            made.append([span])
            opened.append([span.end])
    return made


def events(recording: Recording, label: str = "") -> Iterable[Event]:
    """The events of a rank: names of its tracks, then its spans. `label` stands beside the name of the rank."""
    # Perfetto takes process and thread 0 for the idle task and hides them, and a thread belongs to one process.
    process = recording.rank + 1
    thread = process * 100_000
    yield _name(process, process, "process_name", name=recording.name)
    yield _name(process, process, "process_sort_index", sort_index=recording.rank)
    if label:
        yield _name(process, process, "process_labels", labels=label)
    tracks: dict[Track, list[Span]] = {}
    for span in recording.spans:
        tracks.setdefault(Track.of(span), []).append(span)
    for track in sorted(tracks):
        for number, lane in enumerate(lanes(tracks[track], nest=track.group < 2)):
            thread += 1
            title = track.title(recording.names) + (f" ({number + 1})" if number else "")
            yield _name(process, thread, "thread_name", name=title)
            yield _name(process, thread, "thread_sort_index", sort_index=thread)
            for span in lane:
                yield {
                    "name": span.kind,
                    "cat": span.kind,
                    "ph": "X",
                    "ts": span.begin / 1000,
                    "dur": (span.end - span.begin) / 1000,
                    "pid": process,
                    "tid": thread,
                    "args": _arguments(span),
                }


def _name(process: int, thread: int, what: str, **arguments: object) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _arguments(span: Span) -> dict[str, int]:
    if span.kind in LINK:
        return {"peer": span.id, "group": span.model, "call": span.step, "bytes": span.bytes}
    if span.kind in BUCKET:
        return {"model": span.model, "bucket": span.id, "step": span.step, "bytes": span.bytes}
    return {"model": span.model, "step": span.step}


def parse(document: object) -> Recording:
    """The reverse of `Recording.document`. Raises ValueError with the reason for whatever that has not written."""
    about = document.get("otherData") if isinstance(document, dict) else None
    kind = about.get("format") if isinstance(about, dict) else None
    if kind == MERGED:
        raise ValueError("is merged already; give the files of single ranks")
    if not isinstance(document, dict) or not isinstance(about, dict) or kind != FORMAT:
        told = f" ({kind})" if isinstance(kind, str) and kind.startswith("offbeat") else ""
        raise ValueError(f"is no trace of a rank that this version can read{told}; write one with offbeat.trace.save()")
    try:
        return Recording(
            rank=int(about["rank"]),
            world_size=int(about["world_size"]),
            host=str(about["host"]),
            job=str(about["job"]),
            clock=str(about["clock"]),
            monotonic=int(about["anchor"]["monotonic"]),
            unix=int(about["anchor"]["unix"]),
            version=str(about["version"]),
            dropped=int(about["dropped"]),
            spans=[_span(event) for event in document["traceEvents"] if event["ph"] == "X"],
            names={int(model): [str(label) for label in labels] for model, labels in about["names"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"is damaged ({type(error).__name__}: {error}); save it again") from None


def _span(event: Event) -> Span:
    kind, told = event["cat"], event["args"]
    begin = round(event["ts"] * 1000)
    end = begin + round(event["dur"] * 1000)
    if kind in LINK:
        return Span(kind, int(told["peer"]), int(told["group"]), int(told["call"]), begin, end, int(told["bytes"]))
    if kind in BUCKET:
        return Span(kind, int(told["bucket"]), int(told["model"]), int(told["step"]), begin, end, int(told["bytes"]))
    if kind in COMPUTE:
        return Span(kind, 0, int(told["model"]), int(told["step"]), begin, end, 0)
    raise ValueError(f"an event of kind {kind!r}")
