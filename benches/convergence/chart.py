"""One picture: held-out loss against steps and against time, a row of panels for each task."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from .methods import Result

# distinguishable without colour vision, too; DDP is black
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#882255", "#117733"]


def means(columns: list[list[float]]) -> list[float]:
    return [statistics.fmean(each) for each in zip(*columns, strict=True)]


def panel(axes: Axes, results: list[Result], colours: dict[str, str], *, against_time: bool) -> None:
    lowest, highest = math.inf, 0.0
    for result in results:
        method, task = result.method, result.task
        losses = means([run.losses for run in result.runs])
        x = means([run.seconds for run in result.runs]) if against_time else task.mark_steps()
        style = "-" if method.optimizer == "sgd" else "--"
        label = method.title if method.algorithm else f"DDP, {method.optimizer}"
        width = 1.5 if method.algorithm else 2.5
        axes.plot(x, losses, style, color=colours.get(method.key, "black"), lw=width, marker=".", label=label)
        if not method.algorithm:
            lowest, highest = min(lowest, *losses), max(highest, *losses)
    if highest:
        reach = highest / lowest  # what diverges leaves the picture, not the others
        axes.set_ylim(lowest / reach**0.1, highest * reach**0.3)
        axes.set_yscale("log")
        axes.minorticks_off()
        ticks = [lowest * (highest / lowest) ** (part / 4) for part in range(5)]
        axes.set_yticks(ticks, [f"{tick:.2g}" if tick < 1 else f"{tick:.2f}" for tick in ticks])
    axes.set_xlabel("seconds of training" if against_time else "steps")
    axes.set_ylabel("held-out loss")
    axes.grid(alpha=0.3)


def draw(path: Path, results: list[Result], title: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    tasks = list({result.task.key: result.task for result in results}.values())
    ours = dict.fromkeys(result.method.key for result in results if result.method.algorithm)
    colours = dict(zip(ours, COLOURS * len(ours), strict=False))
    figure, grid = plt.subplots(len(tasks), 2, figsize=(14, 4.5 * len(tasks)), squeeze=False)
    for row, task in zip(grid, tasks, strict=True):
        mine = [result for result in results if result.task.key == task.key]
        for axes, against_time in zip(row, (False, True), strict=True):
            if task.seconds and not against_time:
                axes.set_visible(False)  # ranks make different numbers of steps
                continue
            panel(axes, mine, colours, against_time=against_time)
            axes.set_title(task.title)
        row[1 if task.seconds else 0].legend(fontsize=7, ncols=2)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
