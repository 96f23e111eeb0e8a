"""What a replica tells its user of how training goes: warnings, and errors that are no single call's."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from . import agreement, counters, runtime
from .algorithm import Algorithm
from .errors import InvalidArgument, NonFinite
from .steps import AllReduce, Described, LowRank, Select

# Exchanges after which it can be told whether encoding pays.
ROUNDS_TO_JUDGE = 20


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


def warn_of_own_loss(optimizer: torch.optim.Optimizer | None) -> None:
    """Where an optimizer decides by the loss how often it calls its closure, which ranks must do alike."""
    searches = optimizer is not None and any("line_search_fn" in group for group in optimizer.param_groups)
    if searches and runtime.rank() == 0:
        warnings.warn(
            f"{type(optimizer).__name__} decides by the loss that its closure returns when to stop, and each rank has "
            "its own: they would part, or wait for each other in vain. Return the mean of all ranks from the closure: "
            "loss = loss.detach(); offbeat.all_reduce(loss, 'mean'); return loss.",
            stacklevel=2,
        )


class Advice:
    """What is said once for each replica."""

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        # Parameters that got no gradient on this rank, in any round.
        self.unused: set[str] = set()
        self._has_judged = self._told_of_steps = False

    def of_unused(self, absent: Sequence[str], step: int) -> None:
        """Where parameters got no gradient."""
        if not self.unused:
            warn_of_unused(absent, step)
        self.unused.update(absent)

    def of_cost(self, coding: counters.Coding, rounds: int, communication: float) -> None:
        """Where encoding takes longer than what it saves, when enough was exchanged to tell."""
        # of the ranks of a host some may select what others send
        judges = coding["plain"] > 0 and rounds >= ROUNDS_TO_JUDGE
        if self._has_judged or not judges or counters.seconds_saved(coding, communication) >= 0:
            return
        self._has_judged = True
        warn_of_cost(self._algorithm, coding)

    def of_missed_steps(self, ranks: Sequence[int]) -> None:
        """Where ranks had no more data in `join()`, and nobody knows the optimizer."""
        if self._told_of_steps or runtime.rank() != 0:
            return
        self._told_of_steps = True
        warnings.warn(
            f"rank {', '.join(map(str, ranks))} had fewer batches in join() and got the model of the others, but not "
            "the state of their optimizer, which DataParallel was not given: with momentum or Adam replicas drift "
            "apart in the steps after it. Pass optimizer= to DataParallel. This is said once.",
            stacklevel=2,
        )


def warn_of_unused(names: Sequence[str], step: int) -> None:
    """Names parameters that got no gradient."""
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    warnings.warn(
        f"{len(names)} parameters got no gradient on rank {runtime.rank()} in step {step}: {shown}. "
        "They count as zero here; where no rank used one, its .grad stays None. This is said once.",
        stacklevel=2,
    )


def warn_of_cost(algorithm: str, coding: counters.Coding) -> None:
    """Says what encoding has cost."""
    warnings.warn(
        f"{algorithm} has spent {coding['seconds']:.2f} s on encoding and saved {coding['saved'] / 1e6:.1f} MB, which "
        "this network carries in less: try algorithm='allreduce'. This is said once.",
        stacklevel=2,
    )


def refuse_thawed(named: Sequence[tuple[str, Tensor]], frozen: Sequence[Tensor]) -> None:
    """Buckets are made anew where a forward in training begins. Without one the gradient of a parameter that was thawed
    would silently stay on this rank."""
    never_trained = {id(tensor) for tensor in frozen}
    for name, parameter in named:
        if id(parameter) in never_trained and parameter.requires_grad and parameter.grad is not None:
            raise InvalidArgument(
                f"{name} was frozen when buckets were made and has a gradient now, and there was no forward of the "
                "wrapped model in training mode in between; try: model.train() before forward, or wrap it again"
            )


def refuse_replaced(model: nn.Module, named: Sequence[tuple[str, Tensor]]) -> None:
    """A parameter that is not the model's any more gets no gradient, and nobody would exchange that of the new one."""
    present = {id(tensor): agreement.plain(name) for name, tensor in model.named_parameters()}
    names = set(present.values())
    for name, tensor in named:
        if id(tensor) not in present and agreement.plain(name) in names:
            raise InvalidArgument(
                f"{name} is another parameter of the model than it was when it was wrapped: its gradient would "
                "silently stay on this rank; try: replace modules, or load_state_dict(..., assign=True), before "
                "wrapping"
            )


def refuse_other_than_mean(algorithm: Algorithm) -> None:
    """Only a mean of gradients over all ranks can be made one over those that still have data."""
    steps = [*algorithm.warmup()[1], *algorithm.steps()]
    are_means = all(
        isinstance(step, Select | LowRank) or (isinstance(step, AllReduce) and step.op == "mean") for step in steps
    )
    if not are_means or algorithm.every != 1 or algorithm.sync() is not None:
        raise InvalidArgument(
            f"{algorithm} does more than to average gradients, so join(divide_by_initial_world_size=False) cannot "
            "divide by the ranks that still have data; try: leave the argument out, or algorithm='allreduce'"
        )


def refuse_spoiled(named: Sequence[tuple[str, Tensor]], algorithm: str, step: int) -> None:
    """Raises if a parameter is not finite any more, after an exchange of gradients that were not, where nobody could
    look before the optimizer's step. A step that was left out has done no harm."""
    for name, parameter in named:
        if not bool(parameter.detach().isfinite().all()):
            raise NonFinite(
                f"gradients of step {step} or before were NaN or infinite on some rank, {algorithm} has made whole "
                f"blocks NaN of them on all, and a step with these has spoiled {name}; try: go back to a checkpoint, "
                "and give DataParallel the optimizer, whose step() raises before it does harm"
            )


def of_non_finite(algorithm: str, step: int, place: str) -> NonFinite:
    """What was sent was not finite. On a GPU it shows when the exchange has long been used: the host does not wait."""
    when = f"step {step}" if place == "cpu" else f"a step before {step}"
    return NonFinite(
        f"gradients of {when} were NaN or infinite on some rank, and {algorithm} has made whole blocks NaN of them on "
        "all; try: a lower learning rate, clipping, a GradScaler, or check torch.isfinite before step()"
    )


def of_non_finite_weights(algorithm: str, step: int, bad: int) -> NonFinite:
    """The error of weights that cannot be encoded, which this rank has sent nobody."""
    return NonFinite(
        f"weights after step {step} have {bad} numbers that are NaN or infinite, and {algorithm} could not encode "
        "them; try: a lower learning rate, clipping, or go back to a checkpoint"
    )
