"""The only module that touches autograd: it tells a replica when gradients are there and when backward is over.

- a hook on each parameter runs as soon as its gradient is complete; the gradients that have arrived are put into their
  buckets together, when one of these is complete or they are many
- a hook before and after the model's forward lets the replica prepare, and hangs a hook on the outputs, so that the
  beginning of backward is noticed in the outermost backward, also with reentrant checkpointing
- a callback of the engine runs when backward is over: then `.grad` becomes final, before `backward()` returns
"""

import contextlib
import dataclasses
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from .accumulation import Said
from .errors import InvalidArgument, Unsupported
from .slots import Slot, move

M = TypeVar("M", bound=nn.Module)


class Listener(Protocol):
    """Who is told."""

    def forward_begins(self) -> None: ...
    def forward_ended(self) -> Said: ...
    def backward_begins(self, said: Said | None) -> None: ...  # sets `Line.exchanging` and `Line.announcing`
    def backward_goes_on(self, said: Said) -> None: ...  # where neither is set; may do it yet
    def gradients_begin(self) -> None: ...  # where `Line.announcing` is set
    def backward_ended(self) -> None: ...
    def backward_failed(self) -> None: ...


class Line:
    """What hooks of gradients hold instead of the listener: torch keeps them where Python's collector does not look, so
    whatever they held would live for ever."""

    __slots__ = ("_listener", "_lock", "_mark", "announcing", "arrive", "arrived", "exchanging")

    def __init__(self, listener: Listener) -> None:
        self._listener = weakref.ref(listener)
        # Whether gradients of the backward under way are exchanged; None while none is under way.
        self.exchanging: bool | None = None
        # Whether they will be, once the listener was told of the first one.
        self.announcing = False
        # Parameters whose gradients are not in their slots yet. Always this very list: hooks add to it.
        self.arrived: list[tuple[Tensor, Slot]] = []
        self._lock = threading.Lock()
        self.arrive: Callable[[int], bool] = ignore
        self._mark: Callable[[Sequence[int]], object] = ignore
        weakref.finalize(listener, self.cut)

    @property
    def is_dead(self) -> bool:
        """Whether there is nobody to tell any more."""
        return self._listener() is None

    def connect(self, arrive: Callable[[int], bool], mark: Callable[[Sequence[int]], object]) -> None:
        """Says who is told of a gradient that has arrived, and of those that are in their slots."""
        self.arrive, self._mark = arrive, mark

    def disconnect(self) -> None:
        """Lets go of the core."""
        self.connect(ignore, ignore)

    def cut(self) -> None:
        """Nothing is exchanged any more."""
        self.disconnect()
        self.exchanging = self.announcing = False
        self.drop()

    def begin(self, said: Said | None = None) -> None:
        """At the first gradient of a backward, and at that of each output. `said` is by the forward whose output it is,
        if that is known."""
        listener = self._listener()
        if listener is None:
            return
        if self.exchanging is None:
            listener.backward_begins(said)
        elif said is not None and not (self.exchanging or self.announcing):
            listener.backward_goes_on(said)

    def begin_exchange(self) -> bool:
        """At the gradient of a parameter, where none is exchanged yet: whether this one is."""
        self.begin()
        if self.announcing:
            with self._lock:  # of several threads of autograd the first one
                listener = self._listener()
                if self.announcing and listener is not None:
                    listener.gradients_begin()
                    self.exchanging, self.announcing = True, False
        return bool(self.exchanging)

    def end(self) -> tuple[bool, bool]:
        """When backward is over or has raised: whether gradients were exchanged, and whether they would have been."""
        exchanging, announcing = bool(self.exchanging), self.announcing
        self.exchanging, self.announcing = None, False
        return exchanging, exchanging or announcing

    def deliver(self) -> None:
        """Puts all gradients that have arrived into their slots."""
        with self._lock:  # of several threads of autograd; what one of them adds meanwhile stays
            batch = self.arrived[:]
            del self.arrived[: len(batch)]
            self.put(batch)

    def put(self, batch: "Sequence[tuple[Tensor, Slot]]") -> None:
        """Puts gradients into their slots, and says so."""
        self._mark(move(batch))

    def drop(self) -> None:
        """Forgets gradients that have arrived."""
        self.arrived.clear()


def ignore(_: object) -> bool:
    """For nobody."""
    return False


def at_once(_: object) -> bool:
    """For gradients that are moved one by one."""
    return True


class Ending:
    """Runs at the end of a backward. Torch drops it without a call when the backward raises: so that is noticed too."""

    def __init__(self, listener: Listener) -> None:
        self.listener: Listener | None = listener

    def __call__(self) -> None:
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.backward_ended()

    def __del__(self) -> None:
        listener = getattr(self, "listener", None)
        if listener is not None:
            listener.backward_failed()


def at_end_of_backward(listener: Listener) -> None:
    """Lets the listener know when the backward under way is over."""
    torch.autograd.Variable._execution_engine.queue_callback(Ending(listener))


def refuse_early_steps(named: Iterable[tuple[str, Tensor]]) -> None:
    """A step that is made while backward runs takes this rank's own gradient, and replicas drift apart."""
    hooked = []
    for name, parameter in named:
        drop_dead(parameter)
        if getattr(parameter, "_in_backward_optimizers", None):  # torch's mark
            raise InvalidArgument(
                f"{name} is stepped by an optimizer in backward, as soon as its gradient is there and before it is "
                "averaged; try: let optimizer.step() do it after backward"
            )
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            hooked.append(name)
    if hooked:
        warnings.warn(
            f"{len(hooked)} parameters have hooks that run when their gradient is accumulated, e.g. {hooked[0]}: they "
            "see this rank's own gradient. If they make the optimizer's steps, replicas drift apart; do that after "
            "backward, when gradients are averaged.",
            stacklevel=2,
        )


def drop_dead(parameter: Tensor) -> None:
    """Takes away the hooks of wrappers that were dropped without `remove()`: they would keep memory of old buckets."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for key, hook in list(hooks.items()):
        if isinstance(line := getattr(hook, "line", None), Line) and line.is_dead:
            del hooks[key]


def watch_gradient(parameter: Tensor, slot: Slot, line: Line) -> Callable[[], None]:
    """Has each gradient of a parameter put into its slot in a bucket. Gives what takes the hook away."""
    index, arrived = slot.index, line.arrived

    def hook(parameter: Tensor) -> None:
        if line.exchanging or line.begin_exchange():
            arrived.append((parameter, slot))
            if line.arrive(index):
                line.deliver()

    hook.line = line  # type: ignore[attr-defined]
    # torch refuses hooks on a frozen parameter, but keeps those of one that is frozen later
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trained)
    return cast("Callable[[], None]", handle.remove)


# Torch's own, private and so perhaps not there.
_transforms: Callable[[], object] = getattr(
    getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None
)


def in_transform() -> bool:
    """Whether a transform of `torch.func` runs: it asks for gradients of its own, and its tensors take no hooks."""
    return _transforms() is not None


class Hook:
    """What hooks of a module have in common."""

    def __getattr__(self, name: str) -> object:
        if name == "__name__":  # torch.jit.script asks for it, and would go on to compile what is behind it
            raise AttributeError(
                "torch.jit.script cannot compile the hooks of a wrapped model; try: script it first, then wrap it in "
                "DataParallel, or remove() the wrapper first; of a copy, script a new model with its state_dict()"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class ForwardHook(Hook):
    """A hook of a model's forward. In a copy of the model, deep or pickled, it does nothing: that is not watched."""

    def __init__(self, model: nn.Module, listener: Listener, line: Line) -> None:
        self.model = weakref.ref(model)
        self.listener, self.line = listener, line

    def __reduce__(self) -> tuple[type["Inert"], tuple[()]]:
        return Inert, ()


class Inert(Hook):
    """A hook that does nothing."""

    def __call__(self, *_: object) -> None:
        pass


class Before(ForwardHook):
    """Runs before forward."""

    # Outside of compiled graphs: a compiled model would otherwise trace it once and never run it again. Unlike
    # torch.compiler.disable this one imports torch's compiler, and Triton with it, at the first call and not here.
    @_disable_dynamo
    def __call__(self, module: nn.Module, _: object) -> None:
        if module is self.model() and not in_transform():
            self.listener.forward_begins()


class After(ForwardHook):
    """Runs after forward: has the outputs tell when backward begins."""

    @_disable_dynamo
    def __call__(self, module: nn.Module, _: object, output: object) -> None:
        if module is not self.model() or in_transform():
            return
        begins = functools.partial(self.begins, self.listener.forward_ended())
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                # not on a parameter or an input that was passed on: that outlives the graph, and so would the hook
                if tensor.grad_fn is not None:
                    tensor.register_hook(begins)  # type: ignore[no-untyped-call]

    def begins(self, said: Said, _: Tensor) -> None:
        """Before the first gradient."""
        self.line.begin(said)


class FirstTraining(Hook, Generic[M]):
    """Runs before the forwards of a copy of a wrapped model, and tells of the first one in training."""

    def __init__(self, model: M, begins: Callable[[M], None]) -> None:
        self.model = weakref.ref(model)
        self.begins: Callable[[M], None] | None = begins

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return Inert, ()

    @_disable_dynamo
    def __call__(self, module: M, _: object) -> None:
        begins = self.begins
        is_training = module.training and torch.is_grad_enabled() and not in_transform()
        if begins is not None and module is self.model() and is_training:
            begins(module)
            self.begins = None  # not before: who tries again after an error must not train alone


def before_training(model: M, begins: Callable[[M], None]) -> None:
    """Has a function called before the first forward of the model in training."""
    model.register_forward_pre_hook(FirstTraining(model, begins), prepend=True)


def refuse_scripted(model: nn.Module) -> None:
    """Torch lets nobody watch the forward of a scripted model itself."""
    if isinstance(model, torch.jit.ScriptModule):
        raise Unsupported(
            "the forward of a model that torch.jit.script has compiled cannot be watched; try: "
            "offbeat.DataParallel(model, optimizer), which is called in its place"
        )


def watch_model(model: nn.Module, listener: Listener, line: Line) -> Callable[[], None]:
    """Tells the listener of every forward of the model. Gives what takes the hooks away."""
    before, after = Before(model, listener, line), After(model, listener, line)
    handles = [model.register_forward_pre_hook(before, prepend=True), model.register_forward_hook(after)]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in what a forward returned, once each: a tensor, or a nest of lists, tuples, dicts, dataclasses."""
    waiting, seen = [value], dict[int, object]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:  # a container may be in itself
            continue
        seen[id(part)] = part
        if isinstance(part, Tensor):
            yield part
        else:
            waiting += parts_of(part)


def parts_of(value: object) -> Iterable[object]:
    """What is in a container, nothing in anything else."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


def before_step(optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> Callable[[], None]:
    """Has a function called before each step of an optimizer. Gives what takes it away."""
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise InvalidArgument(
            f"{type(optimizer).__name__} is an optimizer whose __init__ has not called that of torch.optim.Optimizer; "
            "try: wrap the optimizer inside of it, or call super().__init__(params, defaults) there"
        )
    return optimizer.register_step_pre_hook(hook).remove


def before_step_is_made(optimizer: torch.optim.Optimizer, check: Callable[[], None]) -> Callable[[], None]:
    """Has a function called when the gradients of a step are there: before it, or after each call of its closure. Gives
    what takes that away."""

    def before(
        _: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            check()
            return None

        def checked() -> object:
            loss = closure()
            check()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": checked}
        return (args[0], checked, *args[2:]), kwargs

    return before_step(optimizer, before)


def around_step(
    optimizer: torch.optim.Optimizer, before: Callable[..., None], after: Callable[..., None]
) -> list[Callable[[], None]]:
    """Has functions called before and after each step of an optimizer. Gives what takes them away."""
    return [before_step(optimizer, before), optimizer.register_step_post_hook(after).remove]


def mark(name: str) -> contextlib.AbstractContextManager[object]:
    """A mark in torch's profiler, where one is running."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return contextlib.nullcontext()
