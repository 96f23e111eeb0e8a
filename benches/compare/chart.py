"""One picture: time over size on one host, and how close to the limit on a wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cases import NAMES, Result, size_text
from .report import time_text

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

# distinguishable without colour vision, too
COLOURS = {"ours": "#0072b2", "gloo": "#d55e00", "mpi": "#009e73", "copy": "#999999"}
MARKERS = {"ours": "o", "gloo": "s", "mpi": "^", "copy": ""}


def missing() -> str:
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        return "no module matplotlib"
    return ""


def host_panel(axes: Axes, results: list[Result], title: str) -> None:
    for engine, colour in COLOURS.items():
        points = [(r.case.size, median * 1e3) for r in results if (median := r.median(engine))]
        if points:
            style = "--" if engine == "copy" else "-"
            name = "a copy (limit)" if engine == "copy" else NAMES[engine]
            axes.plot(*zip(*points, strict=True), style, color=colour, marker=MARKERS[engine], label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = [r.case.size for r in results]
    axes.set_xticks(sizes, [size_text(size) for size in sizes])
    axes.set_title(title.replace("`", ""))
    axes.set_ylabel("ms for an all-reduce")
    axes.grid(alpha=0.3)
    axes.legend()


def wire_panel(axes: Axes, results: list[Result]) -> None:
    labels = ["\n".join(r.case.title.split(", ", 1)) + f", {size_text(r.case.size)}" for r in results]
    for offset, engine in ((-0.2, "ours"), (0.2, "gloo")):
        values = [r.times_limit(engine) or 0.0 for r in results]
        rows = [index + offset for index in range(len(results))]
        bars = axes.barh(rows, values, 0.38, color=COLOURS[engine], label=NAMES[engine])
        texts = [f"{v:.2f}× ({time_text(r.median(engine))})" if v else "" for v, r in zip(values, results, strict=True)]
        axes.bar_label(bars, texts, padding=3, fontsize=8)
    for index, r in enumerate(results):
        if r.case.of_limit:
            axes.plot([r.case.of_limit] * 2, [index - 0.42, index], color="black", lw=2, label="" if index else "goal")
    axes.axvline(1.0, color="#999999", ls="--")
    axes.set_yticks(range(len(results)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_title("emulated hosts: time ÷ limit of the wire")
    axes.legend(loc="lower right")


def draw(path: Path, results: list[Result]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    hosts: dict[str, list[Result]] = {}
    for r in results:
        if not r.case.place.emulated and r.seconds:
            hosts.setdefault(r.case.title, []).append(r)
    wire = [r for r in results if r.case.place.emulated and r.seconds]
    panels = len(hosts) + bool(wire)
    if not panels:
        return
    columns = min(2, panels)
    rows = -(-panels // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(7 * columns, 4.5 * rows), squeeze=False)
    free = list(grid.flat)
    for title, some in hosts.items():
        host_panel(free.pop(0), some, title)
    if wire:
        wire_panel(free.pop(0), wire)
    for unused in free:
        unused.axis("off")
    figure.suptitle("All-reduce of f32 sums: Offbeat and its peers in one run (lower is better)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
