"""One rank's replica of a model: what `DistributedOptimizer` and `DataParallel` both stand on.

A replica decides when gradients are exchanged. Where they lie, and how they get there, is in `gradients.py`; the core
does the rest.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from . import _core, advice, agreement, counters, devices, hooks, keeping, memory, owners, runtime, sweep, trace
from .algorithm import Algorithm
from .errors import InvalidArgument
from .gradients import Gradients
from .joining import Turn, Turns
from .steps import Parameter

BucketBytes = int | Literal["auto"] | None

# Exchanges after which it can be told whether encoding pays.
ROUNDS_TO_JUDGE = 20

_numbers = itertools.count()


class Options(TypedDict):
    """What a replica is made with besides model, parameters and algorithm."""

    optimizer: torch.optim.Optimizer | None
    bucket_bytes: int | Literal["auto"]
    check_every: int | None
    broadcast_buffers: bool


class Replica:
    """A model on this rank, kept equal to the others by an algorithm."""

    def __init__(
        self,
        model: nn.Module,
        named: Sequence[tuple[str, Tensor]],
        algorithm: Algorithm,
        *,
        optimizer: torch.optim.Optimizer | None,
        bucket_bytes: int | Literal["auto"],
        check_every: int | None,
        broadcast_buffers: bool = True,
    ) -> None:
        self.number = next(_numbers)
        self.model = model
        self.algorithm = algorithm
        self.optimizer = optimizer
        # What makes the optimizer's step in its place, from some exchange on.
        self.takeover = algorithm.take_over(optimizer)
        self._sweep = sweep.Sweep(bucket_bytes)
        self.check_every = check_every
        self.broadcast_buffers = broadcast_buffers
        self.world = runtime.world_size()
        self.step = 0
        self.unused: set[str] = set()
        # How far replicas were apart when they were last made equal.
        self.spread: float | None = None
        self.gradients = Gradients(self, self.number, self._sweep.usual)
        self._broken = False
        self._warned_of_cost = False
        # When the forward or backward under way began.
        self._began = 0
        # no_sync() counts where forward is: what the forwards since the last backward said.
        self._hold = False
        self._forwards: set[bool] = set()
        # Whether there was a forward through the model since the last exchange.
        self._called = False
        self._buffers_due = True
        self._checked = 0
        self._turns = Turns()
        self._named = list(named)
        self._left_out = agreement.left_out(model)
        # Parameters that were never trained. One that is frozen later only counts as unused.
        self._frozen: list[Tensor] = []
        self._forget_model: Callable[[], None] | None = None
        self._forget_steps: Callable[[], None] | None = None
        try:
            self._start()
        except BaseException:
            self.remove()
            raise
        counters.models[self.number] = counters.weakly(self)
        # A world of one has nobody to exchange anything with: the model stays as it is.
        if self.world > 1:
            self._forget_model = hooks.watch_model(model, self, self.gradients.line)
            if optimizer is not None:
                self._forget_steps = hooks.before_step(optimizer, self._refuse_non_finite)

    # -- the beginning and the end

    def _start(self) -> None:
        """Makes ranks agree on tensors and values, and starts the core's scheduler."""
        owners.claim(self, self._named)
        gradients = self.gradients
        before = {id(tensor) for _, tensor in gradients.named}
        gradients.named = [(name, t) for name, t in self._named if t.requires_grad or id(t) in before]
        active = {id(tensor) for _, tensor in gradients.named}
        self._frozen = [tensor for _, tensor in self._named if id(tensor) not in active]
        if self.world == 1:
            sweep.report_alone()
            return
        hooks.refuse_early_steps(gradients.named)
        device = devices.agreed(self._named, self._buffers())
        parameters = self._parameters()
        warmup, first = self.algorithm.warmup()
        described = [step.describe(parameters) for step in first]
        steps = [step.describe(parameters) for step in self.algorithm.steps()]
        by_host = [arguments["hierarchical"] for _, arguments in (*described, *steps) if "hierarchical" in arguments]
        lanes = runtime.current().lanes(flat=bool(by_host) and not any(by_host), one=device is not None)
        group = lanes[0]
        if not steps and self.algorithm.sync() is None:
            raise InvalidArgument(
                f'{self.algorithm} is an algorithm without steps; try: steps() that returns [AllReduce("mean")]'
            )
        agreement.compare_model(group, self.algorithm, self.optimizer, self._named)
        advice.warn_of_idle_codec(self.algorithm.name, steps)
        named = agreement.without_wrappers(self._buffers())
        buffers = [agreement.describe(name, tensor, buffer=True) for name, tensor in named]
        agreement.compare(group, "buffers", buffers)
        if device is not None:
            self._sweep.refuse()
        gradients.carriage = devices.connect(device, group)
        gradients.bucket_bytes = self._sweep.begin(self, sum(tensor.nbytes for _, tensor in gradients.named))
        # before there are buckets, so that they lie where the copies of this are now
        self._hand_out(group, 0)
        gradients.scheduler = runtime.current().scheduler(
            lanes,
            self.number,
            memory.listed(gradients.named, hooks.dtype_of_gradient),
            what=self.algorithm.what,
            when=self.algorithm.when,
            every=self.algorithm.every if self.algorithm.sync() is None else 1,
            warmup=warmup,
            first=described,
            steps=steps,
            bucket_bytes=gradients.bucket_bytes,
            carrier=gradients.carriage.carrier,
        )
        gradients.scheduler.resume(self.step)
        self._agreed()
        gradients.begin()

    def _agreed(self) -> None:
        """When all ranks have rank 0's parameters, at the beginning. For replicas that do more than gradients."""

    def _parameters(self) -> list[Parameter]:
        """What steps may want to know of the parameters."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        settings = {id(p): group for group in groups for p in group["params"]}
        return [Parameter(name, settings.get(id(p), {})) for name, p in self.gradients.named]

    def remove(self) -> None:
        """Undoes everything: hooks, buckets, ownership. Gradients stay where they are."""
        for forget in (self._forget_model, self._forget_steps):
            if forget is not None:
                forget()
        owners.release(self, self._named)
        self.gradients.remove()
        counters.models.pop(self.number, None)

    def synchronize(self, source: int) -> None:
        """Gives all ranks the parameters, buffers and optimizer state of `source`."""
        if self.is_running:
            self._hand_out(self.group, source)

    def _hand_out(self, group: _core.Group, source: int) -> None:
        tensors = (self.model, self._left_out, self._named)
        agreement.hand_out(group, tensors, self.optimizer, source, self.gradients.carriage)

    def refresh(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Begins anew with other parameters, or with the same when some were frozen or thawed. Every rank does so."""
        owners.release(self, self._named)
        self.gradients.leave()
        self._named = list(named)
        self._start()

    def rebucket(self, bucket_bytes: int | None = None) -> None:
        """Makes new buckets, of another size if that is given. Every rank does so."""
        self.gradients.rebucket(bucket_bytes)

    def plan(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(tensor, first element) of what lies in each bucket."""
        return self.gradients.plan()

    @property
    def bucket_bytes(self) -> int:
        """The size of buckets."""
        return self.gradients.bucket_bytes

    @property
    def group(self) -> _core.Group:
        """In which gradients are exchanged."""
        return self.gradients.running().group

    @property
    def place(self) -> str:
        """Where gradients are: who keeps what of an element is not the same there."""
        return self.gradients.carriage.place

    @property
    def is_running(self) -> bool:
        """Whether there is anything to exchange, and it was not removed."""
        return self.gradients.scheduler is not None

    # -- what hooks tell

    def forward_begins(self) -> None:
        """Before the model's forward. Only training counts: evaluation on one rank alone must not wait for others."""
        if not self.is_running or not self.model.training or not torch.is_grad_enabled():
            return
        self._mend()
        self._called = True
        self._forwards.add(self._hold)
        if any(tensor.requires_grad for tensor in self._frozen):
            self.refresh(self._named)
        self._prepare()
        self._before_forward()
        if not self._turns.joining:
            self._sweep.between_rounds(self)
        if self._buffers_due and self.broadcast_buffers:
            self._turns.take(self, Turn.BUFFERS)
            self._broadcast_buffers()
        # as in DDP: not again before a forward that is followed by an exchange
        self._buffers_due = not self._hold
        self._began = _core.now()

    def _before_forward(self) -> None:
        """Before a forward in training. For replicas that do more than gradients."""

    def forward_ended(self) -> bool:
        """After the model's forward: whether no_sync() holds what it computed."""
        self._record("forward")
        return self._hold

    def _record(self, kind: str) -> None:
        """Adds a span of the compute track to the trace: from when it began until now."""
        if self._began:
            runtime.current().mark(kind, self.number, self.step, self._began, _core.now())
            self._began = 0

    def backward_begins(self, held: bool | None) -> None:
        """At the first gradient, or before. `held` is what the forward said whose output came first, if it is known."""
        line = self.gradients.line
        if not self.is_running:
            line.exchanging = False
            return
        self._mend()
        # A forward outside of no_sync() asks for the exchange, also one that was not for training; where none is known
        # the present counts.
        if held is None:
            held = self._hold or bool(self._forwards)
        line.exchanging = (not held or False in self._forwards) and self._exchanges_gradients()
        hooks.at_end_of_backward(self)
        self._began = _core.now()
        if line.exchanging:
            self._turns.take(self, Turn.GRADIENTS)

    def _exchanges_gradients(self) -> bool:
        """Whether the backward that begins is one after which gradients are exchanged, apart from no_sync()."""
        return True

    def backward_ended(self) -> None:
        """When the last gradient is there: waits until all are exchanged."""
        line, scheduler = self.gradients.line, self.gradients.scheduler
        exchanging, line.exchanging = line.exchanging, None
        self._record("backward")
        if exchanging:
            self._deliver()
        if scheduler is None or not exchanging:
            self._forwards.clear()
            return
        if scheduler.has_begun() or self._turns.joining:
            self._forwards.clear()
            self._refuse_thawed()
            self._finish()
            # without a forward through the model there is no other moment; hooks must not change while they run
            if not self._called:
                self._prepare()
            self._called = False
        else:
            # only gradients of inputs were asked for: that is no training step
            self.gradients.refuse_converted()
            self._refuse_replaced()

    def _deliver(self) -> None:
        try:
            self.gradients.line.deliver()
        except BaseException:
            self._broken = True
            raise

    def _refuse_replaced(self) -> None:
        present = {id(tensor): agreement.plain(name) for name, tensor in self.model.named_parameters()}
        names = set(present.values())
        for name, tensor in self.gradients.named:
            if id(tensor) not in present and agreement.plain(name) in names:
                self._broken = True
                raise advice.of_replaced(name)

    def _refuse_thawed(self) -> None:
        for name, parameter in self._named if self._frozen and not self._called else ():
            if parameter.requires_grad and parameter.grad is not None and any(parameter is it for it in self._frozen):
                self._broken = True
                raise advice.of_thawed(name)

    def backward_failed(self) -> None:
        """When backward raised. Called while torch cleans up, so the consequences wait until somebody goes on."""
        self.gradients.line.exchanging, self._broken = None, True
        self.gradients.line.drop()

    def _mend(self) -> None:
        """Goes on after a backward that raised, where nothing of it has reached the other ranks."""
        if self._broken:
            self._broken = False
            self._forwards.clear()
            self.gradients.running().reset("its backward raised an exception")

    def _finish(self) -> None:
        if self.gradients.misses_others():
            self._refuse_replaced()
        absent = self.gradients.finish()
        self.step += 1
        if not self._turns.joining:
            self._sweep.round_ended()
        if absent:
            self._name_unused(absent)

    def _name_unused(self, absent: Sequence[str]) -> None:
        new = [name for name in absent if name not in self.unused]
        if new and not self.unused:
            advice.warn_of_unused(new, self.step - 1)
        self.unused.update(new)

    @property
    def has_lost(self) -> bool:
        """Whether ranks are lost, and this one goes on with those that are left."""
        return False

    def lose(self) -> bool:
        """When a call has failed because a rank is lost: whether this one goes on with those that are left."""
        return False

    def settle(self) -> None:
        """Before somebody else changes the parameters, between steps: nothing is under way then."""

    def consolidated(self, spread: float) -> None:
        """When all ranks have been given the mean of their weights, which were so far apart."""
        self.spread = spread

    # -- between rounds

    def _prepare(self) -> None:
        """New buckets after the first round, and now and then a look at the parameters."""
        if self.gradients.are_buckets_due:
            self._turns.take(self, Turn.BUCKETS)
            self.rebucket()
        if self.check_every and self.step != self._checked and self.step % self.check_every == 0:
            self._turns.take(self, Turn.CHECK)
            self._check()

    def _check(self, *, working: bool = True) -> None:
        self._checked = self.step
        agreement.compare_values(self.group, self._named, self.step, working=working)

    def _broadcast_buffers(self) -> None:
        with hooks.mark("offbeat::buffers"):
            buffers = [tensor for _, tensor in self._buffers()]
            agreement.broadcast_tensors(self.group, buffers, self._turns.source, self.gradients.carriage)

    def _buffers(self) -> list[tuple[str, Tensor]]:
        return agreement.buffers_of(self.model, self._left_out)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in this context leave gradients where they are: nothing is exchanged in their backward."""
        before, self._hold = self._hold, True
        try:
            yield
        finally:
            self._hold = before

    # -- state

    def stats(self) -> counters.Model:
        """What the model has done so far."""
        scheduler = self.gradients.scheduler
        rounds, communication, exposed = scheduler.totals() if scheduler else (self.step, 0.0, 0.0)
        coding = None if scheduler is None else counters.coding(scheduler.coded())
        if coding is not None and rounds >= ROUNDS_TO_JUDGE and counters.seconds_saved(coding, communication) < 0:
            if not self._warned_of_cost:
                advice.warn_of_cost(self.algorithm.name, coding)
            self._warned_of_cost = True
        return {
            "model": self.number,
            "algorithm": self.algorithm.name,
            "step": rounds,
            "parameters": sum(hooks.elements(tensor) for _, tensor in self.gradients.named),
            "buckets": len(trace.names.get(self.number, ())),
            "bucket_bytes": self.bucket_bytes,
            "unused": sorted(self.unused),
            "seconds": {"communication": communication, "exposed": exposed},
            "coding": coding,
            "syncs": 0,
            "spread": self.spread,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's state of the algorithm, by names of parameters."""
        state: dict[str, Any] = {
            "version": 1,
            "algorithm": self.algorithm.name,
            "world_size": self.world,
            "place": self.place,
            "step": self.step,
        }
        state |= self.gradients.state_dict()
        if self.takeover is not None:
            state["frozen"] = self.takeover.state_dict(dict(self.gradients.named))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave. Every rank does so, each with its own."""
        self.step = state.get("step", self.step)
        if self.takeover is not None:
            self.takeover.load_state_dict(state.get("frozen", {}), dict(self.gradients.named))
        self.gradients.load_state_dict(state, self.step, self._author)

    @property
    def _author(self) -> keeping.Author:
        """Who saves, and loads: what that depends on."""
        return (self.algorithm.name, self.world, self.place)

    # -- the optimizer's step

    def count_step(self) -> None:
        """Before each step: in a world of one it is what an exchange is elsewhere."""
        if self.world == 1:
            self.step += 1

    def takes_over(self) -> bool:
        """Whether the algorithm makes the optimizer's next step itself."""
        return self.takeover is not None and self.takeover.is_due(self.step)

    def make_step(self) -> None:
        """Makes the optimizer's step."""
        if self.takeover is not None:
            self.takeover.step()

    def _refuse_non_finite(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before each step. A GradScaler skips the step, or says so in `found_inf`; nobody else may have noticed."""
        scheduler = self.gradients.scheduler
        if scheduler is None or getattr(optimizer, "found_inf", None) is not None or not scheduler.was_non_finite():
            return
        raise advice.of_non_finite(self.algorithm.name, self.step - 1, self.place)

    # -- ranks with fewer batches

    def join(self) -> contextlib.AbstractContextManager[None]:
        """Around a loop in which ranks have different numbers of batches (`joining.Turns.join`)."""
        self._sweep.pause()
        return self._turns.join(self)

    def follow(self, turn: Turn) -> None:
        """Takes part in what the ranks that still work do, without data."""
        if turn is Turn.GRADIENTS:
            self._exchanges_gradients()
            self.gradients.finish_without()
            self.step += 1
        elif turn is Turn.BUFFERS:
            self._broadcast_buffers()
        elif turn is Turn.BUCKETS:
            self.rebucket()
        elif turn is Turn.CHECK:
            self._check(working=False)

    def end_join(self, source: int) -> None:
        """Makes ranks equal when the last one is done; `source` has worked until the end."""
        self.synchronize(source)
