"""How many samples this rank has seen: by these it counts where an algorithm has the step `Weigh`."""

from . import _core
from .algorithm import Algorithm, warmup_of
from .checks import is_number
from .errors import InvalidArgument
from .steps import Weigh


def weighs(algorithm: Algorithm) -> bool:
    """Whether ranks count by their samples in any of its exchanges."""
    sync = algorithm.sync()
    steps = (*warmup_of(algorithm)[1], *algorithm.steps(), *(() if sync is None else sync.steps))
    return any(isinstance(step, Weigh) for step in steps)


class Samples:
    """Those since the last exchange of gradients, which the core is told of before the next."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._counts = weighs(algorithm)
        self._name = algorithm.name
        self._since = 0.0

    def saw(self, samples: float, scheduler: _core.Scheduler | None) -> None:
        """So many more. Raises where they would not count."""
        if not is_number(samples) or not 0 <= samples < 1e15:
            raise InvalidArgument(f"saw({samples!r}) is no number of samples; try: saw(len(batch))")
        if not self._counts:
            raise InvalidArgument(
                f"each rank counts the same in {self._name}, whatever it saw; try: weighted=True, which "
                "GradientAllReduce, LocalSGD and DiLoCo have, or the step Weigh() in your own"
            )
        self._since += samples
        self.tell(scheduler)

    def tell(self, scheduler: _core.Scheduler | None) -> None:
        """Tells a scheduler that may be new."""
        if self._counts and scheduler is not None:
            scheduler.weigh(self._since)

    def forget(self, scheduler: _core.Scheduler | None) -> None:
        """Gradients were exchanged, or their backward has raised: the next ones are of other samples."""
        self._since = 0.0
        self.tell(scheduler)
