"""`DistributedOptimizer`: your own optimizer object, trained on all ranks."""

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from . import algorithms, keeping, runtime, settings
from .agreement import left_out, without_wrappers
from .background import BackgroundReplica
from .errors import InvalidArgument
from .joining import Joins
from .local_replica import LocalReplica
from .replica import Replica
from .replicas import AnyReplica, make

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


def DistributedOptimizer(  # noqa: N802
    optimizer: O,
    model: nn.Module,
    algorithm: algorithms.Algorithm | str = "allreduce",
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    bucket_bytes: settings.BucketBytes = None,
    check_every: int | None = None,
) -> O:
    """Makes an optimizer train on all ranks, and gives back the very same object. Every rank calls it alike.

    Parameters, buffers and optimizer state come from rank 0. From then on gradients are averaged while `backward` runs;
    when it returns, `.grad` is final. The object gets methods: `no_sync()`, `join()`, and `remove()`, which undoes all.

    Args:
        optimizer: any torch optimizer. Wrapped already, it is wrapped anew.
        model: the module whose parameters it steps.
        algorithm: a name or an instance of `offbeat.algorithms`.
        named_parameters: names for parameters that are not the model's own.
        bucket_bytes: how many bytes of gradients travel together; "auto" tries sizes in the first steps.
        check_every: compare the parameters of all ranks every so many steps, and name the first that drifted.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}; try: make one first"
        )
    if not isinstance(model, nn.Module):
        raise InvalidArgument(
            f"model must be a torch.nn.Module, not {type(model).__name__}; try: pass the model itself"
        )
    chosen = algorithms.resolve(algorithm)
    size = settings.bucket_bytes(bucket_bytes, runtime.profiled_bucket_bytes())
    every = settings.check_every(check_every)
    named = None if named_parameters is None else pairs(named_parameters)
    names = name_parameters(optimizer, model, named)
    if isinstance(optimizer, Distributed) and not optimizer._offbeat.is_whole:
        optimizer.remove()
    replica = make(
        model, names, chosen, optimizer=optimizer, bucket_bytes=size, check_every=every, broadcast_buffers=True
    )
    change_class(optimizer, Wrapping(replica, type(optimizer), model, named))
    return optimizer


def change_class(optimizer: torch.optim.Optimizer, wrapping: "Wrapping") -> None:
    """Gives an optimizer what its replica's algorithm needs of it, in front of its own class."""
    kind, base, wrapped = wrapping.kind, wrapping.base, cast("Any", optimizer)
    wrapped._offbeat = wrapping
    if isinstance(wrapping.replica, Replica):
        wrapping.replica.late = wrapping.late
    wrapped.__class__ = type(kind.__name__, (base, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    if base is not Distributed:
        wrapping.patched = route_step(optimizer)


def restore_class(optimizer: torch.optim.Optimizer) -> None:
    """Undoes `change_class`."""
    wrapped = cast("Any", optimizer)
    wrapping: Wrapping = wrapped._offbeat
    del wrapped._offbeat
    if wrapping.patched is not None:
        wrapped.__dict__["step"] = wrapping.patched
    wrapped.__class__ = wrapping.kind


def route_step(optimizer: torch.optim.Optimizer) -> object:
    """A learning-rate scheduler that was made before has put a `step` of its own on the object, which calls that of the
    old class. Puts one there that calls that of the new, and gives the old one."""
    patched = optimizer.__dict__.get("step")
    if patched is None:
        return None
    reference = weakref.ref(optimizer)

    @functools.wraps(patched)
    def step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        alive = cast("Any", reference())
        alive._opt_called = True
        return type(alive).step(alive, *args, **kwargs)

    optimizer.__dict__["step"] = step
    return patched


def all_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """A model's parameters with their names, but for those that the user has left out."""
    ignored = left_out(model)
    named = without_wrappers((name, tensor) for name, tensor in model.named_parameters() if name not in ignored)
    refuse_lazy(named)
    return named


def name_parameters(
    optimizer: torch.optim.Optimizer, model: nn.Module, named: list[tuple[str, Tensor]] | None
) -> list[tuple[str, Tensor]]:
    """The optimizer's parameters with their names in the model, in the model's order."""
    owned = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    ignored, known = left_out(model), [*model.named_parameters(), *(named or ())]
    for name, tensor in known:
        if name in ignored:
            owned.pop(id(tensor), None)
    known = without_wrappers((name, tensor) for name, tensor in known if name not in ignored)
    refuse_lazy(known)
    names = {id(tensor): name for name, tensor in reversed(known)}
    refuse_same_names((names[key], owned[key]) for key in owned if key in names)
    nameless = [tensor for key, tensor in owned.items() if key not in names]
    if len(nameless) == len(owned):
        raise InvalidArgument(
            f"the optimizer has none of the model's parameters ({len(owned)} of its own); try: make it from "
            "model.parameters() of this very model, after moving or compiling it"
        )
    if nameless:
        raise InvalidArgument(
            f"the optimizer has {len(nameless)} parameters that are not the model's, e.g. of shape "
            f"{tuple(nameless[0].shape)}; try: name them with named_parameters=[('name', tensor), ...]"
        )
    if not any(tensor.requires_grad for tensor in owned.values()):
        raise InvalidArgument(
            f"the optimizer has no parameters that require a gradient: all {len(owned)} are frozen; try: "
            "requires_grad_(True) on some first"
        )
    return list({key: (names[key], owned[key]) for key in map(id, (t for _, t in known)) if key in owned}.values())


def pairs(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """What was given as `named_parameters`, if it is what it should be."""
    given: object = named.items() if isinstance(named, dict) else named
    # what is no list at all is told like a list of it
    listed: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for each in listed:
        if not (
            isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) and isinstance(each[1], Tensor)
        ):
            raise InvalidArgument(
                f"named_parameters= must be pairs of a name and a tensor, not {type(each).__name__}; try: "
                "model.named_parameters(), or [('name', tensor), ...]"
            )
    return listed


def refuse_same_names(named: Iterable[tuple[str, Tensor]]) -> None:
    """State is saved by name: two parameters of one name would get each other's."""
    taken: dict[str, Tensor] = {}
    for name, tensor in named:
        if taken.setdefault(name, tensor) is not tensor:
            raise InvalidArgument(
                f"two parameters have the name {name}, of shapes {tuple(taken[name].shape)} and {tuple(tensor.shape)}; "
                "try: give each its own in named_parameters=, e.g. with the name of its model in front"
            )


def refuse_lazy(named: Iterable[tuple[str, Tensor]]) -> None:
    """Parameters that have no shape yet cannot be compared or exchanged."""
    for name, tensor in named:
        if is_lazy(tensor):
            raise InvalidArgument(
                f"{name} has no shape yet: it is of a lazy module; try: run a forward before wrapping"
            )


class Wrapping:
    """What a wrapped optimizer remembers."""

    def __init__(
        self,
        replica: AnyReplica,
        kind: type[torch.optim.Optimizer],
        model: nn.Module,
        named: list[tuple[str, Tensor]] | None,
        *,
        is_whole: bool = False,
    ) -> None:
        self.replica, self.kind, self.model, self.named = replica, kind, model, named
        # Whether it is a `DataParallel`'s: all of the model's parameters are exchanged, also those that this optimizer
        # does not step, and only that wrapper gives them back.
        self.is_whole = is_whole
        # The parameters that the optimizer had when it was last looked at.
        self._known = self._owned()
        # The `step` that a scheduler had put on the object, where ours has taken its place.
        self.patched: object = None

    def late(self) -> list[tuple[str, Tensor]] | None:
        """All parameters, if groups have others than they had: not every script calls `add_param_group`."""
        optimizer, owned, known = self.replica.optimizer, self._owned(), self._known
        # asked before each forward, so by functions that are no Python; a tensor's == is something else
        if optimizer is None or (len(owned) == len(known) and all(map(operator.is_, owned, known))):
            return None
        named = name_late(optimizer, self)
        self._known = owned
        return named

    def _owned(self) -> list[Tensor]:
        groups = [] if self.replica.optimizer is None else self.replica.optimizer.param_groups
        return list(chain.from_iterable(group["params"] for group in groups))

    @property
    def base(self) -> "type[Distributed]":
        """What stands in front of the optimizer's own class."""
        if isinstance(self.replica, LocalReplica | BackgroundReplica):
            return Stepping
        return Distributed if self.replica.takeover is None else TakenOver


class Distributed(Joins, torch.optim.Optimizer):
    """What a wrapped optimizer's class has besides its own. `isinstance` of the old class still holds."""

    _offbeat: Wrapping

    def no_sync(self) -> AbstractContextManager[None]:
        """Forwards in this context only accumulate: nothing is exchanged in their backward. DDP's meaning exactly."""
        return self._offbeat.replica.no_sync()

    def saw(self, samples: float) -> None:
        """Says how many samples the next backward is of, where an algorithm is `weighted`: ranks count by these."""
        self._offbeat.replica.saw(samples)

    def _joined(self) -> AnyReplica:
        return self._offbeat.replica

    def pause(self) -> None:
        """Leaves the parameters alone until `resume`, e.g. for an evaluation; others exchange without them."""
        if isinstance(self._offbeat.replica, BackgroundReplica):
            self._offbeat.replica.pause()

    def resume(self) -> None:
        """Goes on after `pause`."""
        if isinstance(self._offbeat.replica, BackgroundReplica):
            self._offbeat.replica.resume()

    def remove(self) -> None:
        """Undoes the wrapping: this is the optimizer that it was."""
        self._offbeat.replica.remove()
        restore_class(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        wrapping = self.__dict__.get("_offbeat")
        if wrapping is not None and (late := wrapping.late()) is not None:
            wrapping.replica.refresh(late)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["offbeat"] = self._offbeat.replica.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ours = keeping.readable(state_dict.get("offbeat"))
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "offbeat"})
        self._offbeat.replica.load_state_dict(ours)

    def __reduce__(self) -> Any:  # noqa: ANN401
        raise InvalidArgument("a wrapped optimizer cannot be pickled or copied; try: state_dict(), or remove() first")


class TakenOver(Distributed):
    """The same for an algorithm that makes the step itself from some point on."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        kind: Any = type(self)
        if not issubclass(kind, TakenOver):
            # a scheduler that was made while it was wrapped holds on to this function
            return kind.step(self) if closure is None else kind.step(self, closure)
        # first, since its backward decides who makes the step; Adam calls it once too
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        replica = cast("Replica", self._offbeat.replica)
        replica.count_step()
        if replica.takes_over():
            self._taken_over()
        else:
            super().step()
        return loss

    # torch must not put its hooks around this one: they are around each of the two it chooses from
    step.hooked = True  # type: ignore[attr-defined]

    @torch.optim.Optimizer.profile_hook_step
    def _taken_over(self) -> None:
        cast("Replica", self._offbeat.replica).make_step()


class Stepping(Distributed):
    """The same for an algorithm that exchanges weights between steps. Ranks have gradients of their own there, and one
    may overflow where the others do not; so a GradScaler leaves the skipping to `step`, which counts on every rank."""

    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        # an optimizer that knows of scales itself says so on the object
        if found is None or "_step_supports_amp_scaling" in self.__dict__:
            return super().step() if closure is None else super().step(closure)
        if found.item():
            replica = cast("LocalReplica | BackgroundReplica", self._offbeat.replica)
            replica.step_begins()
            replica.step_ended()
            return None
        if scale is not None:
            unscale(self, scale)
        scaled = cast("Any", self)
        scaled.found_inf = scaled.grad_scale = None
        try:
            return super().step() if closure is None else super().step(closure)
        finally:
            # the scaler takes them away itself
            scaled.found_inf, scaled.grad_scale = found, scale

    # torch must not put its hooks around this one too
    step.hooked = True  # type: ignore[attr-defined]


def unscale(optimizer: torch.optim.Optimizer, scale: Tensor) -> None:
    """Takes a GradScaler's scale out of the gradients, as it does itself for other optimizers."""
    inverse = scale.double().reciprocal().float()
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse)


def name_late(optimizer: torch.optim.Optimizer, wrapping: Wrapping) -> list[tuple[str, Tensor]]:
    """Names for all parameters, also for those that were added later and that the model does not know."""
    known = {id(tensor) for _, tensor in (*wrapping.model.named_parameters(), *(wrapping.named or ()))}
    late = [(name, tensor) for name, tensor in numbered(optimizer) if id(tensor) not in known]
    named = name_parameters(optimizer, wrapping.model, [*(wrapping.named or ()), *late])
    if not wrapping.is_whole:
        return named
    return list({id(tensor): (name, tensor) for name, tensor in (*all_parameters(wrapping.model), *named)}.values())


def numbered(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Parameters by their place in the groups."""
    for number, group in enumerate(optimizer.param_groups):
        for place, tensor in enumerate(group["params"]):
            yield f"param_groups.{number}.{place}", tensor
