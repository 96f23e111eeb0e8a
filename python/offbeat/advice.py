"""What a replica tells its user of how training goes: warnings, and errors that are no single call's."""

import warnings
from collections.abc import Sequence

from . import counters, runtime
from .errors import InvalidArgument, NonFinite
from .steps import Described


def warn_of_idle_codec(algorithm: str, steps: Sequence[Described]) -> None:
    """Where ranks encode what travels between hosts, and nothing does."""
    coded = any(arguments.get("codec") is not None for _, arguments in steps)
    world = runtime.world_size()
    if coded and runtime.local_size() == world and runtime.rank() == 0:
        warnings.warn(
            f"{algorithm} encodes what travels between hosts, and all {world} ranks are on one: it does what allreduce "
            "does. Set OFFBEAT_HOST on each rank to try it on one machine.",
            stacklevel=2,
        )


def warn_of_unused(names: Sequence[str], step: int) -> None:
    """Where parameters got no gradient."""
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    warnings.warn(
        f"{len(names)} parameters got no gradient on rank {runtime.rank()} in step {step}: {shown}. "
        "They count as zero here; where no rank used one, its .grad stays None. This is said once.",
        stacklevel=2,
    )


def warn_of_cost(algorithm: str, coding: counters.Coding) -> None:
    """Where encoding takes longer than what it saves."""
    warnings.warn(
        f"{algorithm} has spent {coding['seconds']:.2f} s on encoding and saved {coding['saved'] / 1e6:.1f} MB, which "
        "this network carries in less: try algorithm='allreduce'. This is said once.",
        stacklevel=2,
    )


def of_thawed(name: str) -> InvalidArgument:
    """Buckets are made anew where a forward in training begins. Without one the gradient of a parameter that was thawed
    would silently stay on this rank."""
    return InvalidArgument(
        f"{name} was frozen when buckets were made and has a gradient now, and there was no forward of the wrapped "
        "model in training mode in between; call model.train() before forward, or wrap it again"
    )


def of_replaced(name: str) -> InvalidArgument:
    """A parameter that is not the model's any more gets no gradient, and nobody would exchange that of the new one."""
    return InvalidArgument(
        f"{name} is another parameter of the model than it was when it was wrapped: its gradient would silently stay "
        "on this rank; replace modules, or load_state_dict(..., assign=True), before wrapping"
    )


def of_non_finite(algorithm: str, step: int, place: str) -> NonFinite:
    """What was sent was not finite. On a GPU it shows when the exchange has long been used: the host does not wait."""
    when = f"step {step}" if place == "cpu" else f"a step before {step}"
    return NonFinite(
        f"gradients of {when} were NaN or infinite on some rank, and {algorithm} has made whole blocks NaN of them on "
        "all; try: a lower learning rate, clipping, a GradScaler, or check torch.isfinite before step()"
    )
