"""`offbeat.stats()` for Prometheus: as text, and as a file that is rewritten every few seconds.

A file and no port: the textfile collector of node_exporter reads it, and nothing listens. Every sample has the label
`rank`, because that collector joins the files of all ranks of a host.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from . import _core, files
from .counters import Model, Stats

EVERY = 5.0

Labels = dict[str, object]


class Metric(NamedTuple):
    """A name with its samples."""

    name: str
    kind: str
    help: str
    samples: list[tuple[Labels, float]]


def render(stats: Stats) -> str:
    """Prometheus' text format."""
    return "".join(line + "\n" for metric in _metrics(stats) for line in _lines(metric, stats["rank"]))


def _metrics(stats: Stats) -> list[Metric]:
    links, models, seconds = stats["links"], stats["models"], stats["seconds"]

    def of_models(give: Callable[[Model], float]) -> list[tuple[Labels, float]]:
        return [({"model": part["model"]}, give(part)) for part in models]

    return [
        Metric(
            "offbeat_info",
            "gauge",
            "The rank that writes this, always 1.",
            [({"world_size": stats["world_size"], "version": _core.__version__}, 1)],
        ),
        Metric(
            "offbeat_bytes_total",
            "counter",
            "Bytes of frames over the link to a peer.",
            [
                ({"peer": link["rank"], "kind": link["kind"], "direction": direction}, count)
                for link in links
                for direction, count in (("sent", link["sent"]), ("received", link["received"]))
            ],
        ),
        Metric(
            "offbeat_communication_seconds_total",
            "counter",
            "Time during which buckets were reduced.",
            [({}, seconds["communication"])],
        ),
        Metric(
            "offbeat_exposed_seconds_total",
            "counter",
            "Time during which backward passes waited for communication.",
            [({}, seconds["exposed"])],
        ),
        Metric(
            "offbeat_model_info",
            "gauge",
            "The algorithm of a model, always 1.",
            [({"model": part["model"], "algorithm": part["algorithm"]}, 1) for part in models],
        ),
        Metric("offbeat_steps_total", "counter", "Steps of a model.", of_models(lambda part: part["step"])),
        Metric(
            "offbeat_model_communication_seconds_total",
            "counter",
            "Time during which buckets of a model were reduced.",
            of_models(lambda part: part["seconds"]["communication"]),
        ),
        Metric(
            "offbeat_model_exposed_seconds_total",
            "counter",
            "Time during which backward passes of a model waited for communication.",
            of_models(lambda part: part["seconds"]["exposed"]),
        ),
        Metric("offbeat_parameters", "gauge", "Elements of a model.", of_models(lambda part: part["parameters"])),
        Metric("offbeat_buckets", "gauge", "Buckets of a model.", of_models(lambda part: part["buckets"])),
        Metric(
            "offbeat_bucket_bytes",
            "gauge",
            "Bytes that a bucket of a model may have.",
            of_models(lambda part: part["bucket_bytes"]),
        ),
        Metric(
            "offbeat_unused_parameters",
            "gauge",
            "Parameters that were without a gradient in some step.",
            of_models(lambda part: len(part["unused"])),
        ),
    ]


def _lines(metric: Metric, rank: int) -> Iterable[str]:
    # a metric without samples is left out: readers may refuse a name without a value
    if metric.samples:
        yield f"# HELP {metric.name} {metric.help}"
        yield f"# TYPE {metric.name} {metric.kind}"
    for labels, value in metric.samples:
        told = ",".join(f'{name}="{_escape(str(label))}"' for name, label in {"rank": rank, **labels}.items())
        yield f"{metric.name}{{{told}}} {value!r}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Writer:
    """Rewrites a file with what `collect` gives, at once, every few seconds, and a last time when it is stopped."""

    def __init__(self, path: Path, collect: Callable[[], Stats], every: float = EVERY) -> None:
        self._path = path
        self._collect = collect
        self._every = every
        self._over = threading.Event()
        self._complained = False
        # a daemon, so that it never keeps an interpreter alive that has forgotten to shut down
        self._thread = threading.Thread(target=self._run, name="offbeat-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and writes a last time."""
        self._over.set()
        # with a limit: a file system that hangs must not keep a rank from leaving
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self._write()

    def _run(self) -> None:
        self._write()
        while not self._over.wait(self._every):
            self._write()

    def _write(self) -> None:
        try:
            files.replace(self._path, render(self._collect()))
        except Exception as error:  # whatever it is, training goes on
            if not self._complained:
                self._complained = True
                with contextlib.suppress(Exception):
                    logging.getLogger(__name__).warning("cannot write metrics to %s: %s", self._path, error)
