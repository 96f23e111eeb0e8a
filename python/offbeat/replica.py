"""One rank's replica of a model: what `DistributedOptimizer` and `DataParallel` both stand on.

A replica decides when gradients are exchanged. Where they lie, and how they get there, is in `gradients.py`; the core
does the rest.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from . import (
    _core,
    advice,
    agreement,
    counters,
    devices,
    hooks,
    keeping,
    owners,
    runtime,
    sweep,
    trace,
    views,
)
from .accumulation import Accumulation, Said
from .algorithm import Algorithm, codecs_of, describe
from .gradients import Gradients
from .joining import Rules, Turn, Turns
from .samples import Samples


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
        self.number = counters.number()
        self.model = model
        self.algorithm = algorithm
        self.optimizer = optimizer
        # What makes the optimizer's step in its place, from some exchange on.
        self.takeover = algorithm.take_over(optimizer)
        self._sweep = sweep.Sweep(bucket_bytes)
        self.check_every = check_every
        self.broadcast_buffers = broadcast_buffers
        self.world, self.rank = runtime.world_size(), runtime.rank()
        self.step = 0
        self._advice = advice.Advice(algorithm.name)
        # How far replicas were apart when they were last made equal.
        self.spread: float | None = None
        self.gradients = Gradients(self, self.number, self._sweep.usual)
        self._broken = False
        # When the forward or backward under way began.
        self._began = 0
        self._accumulation = Accumulation()
        self._buffers_due = True
        self._checked = 0
        self._turns = Turns()
        self._named = list(named)
        # Of each rank the lowest on its host, where algorithms look at hosts.
        self._hosts = [0]
        self._left_out = agreement.left_out(model)
        # Parameters that were never trained. One that is frozen later only counts as unused.
        self._frozen: list[Tensor] = []
        self._forget_model: Callable[[], None] | None = None
        self._forget_steps: Callable[[], None] | None = None
        # Gives all parameters if some were added that the replica does not know, and None if not.
        self.late: Callable[[], Sequence[tuple[str, Tensor]] | None] | None = None
        try:
            self._start()
            # here, since only now steps are known to be such
            self._samples = Samples(algorithm)
            self._watch()
        except BaseException:
            self.remove()
            raise
        counters.models[self.number] = counters.weakly(self)

    def _start(self) -> None:
        """Makes ranks agree on tensors and values, and starts the core's scheduler."""
        owners.claim(self, self._named)
        gradients = self.gradients
        before = {id(tensor) for _, tensor in gradients.named}
        gradients.named = [(name, t) for name, t in self._named if t.requires_grad or id(t) in before]
        active = {id(tensor) for _, tensor in gradients.named}
        self._frozen = [tensor for _, tensor in self._named if id(tensor) not in active]
        described = describe(self.algorithm, gradients.named, self.optimizer)
        if self.world == 1:
            sweep.report_alone()
            return
        hooks.refuse_scripted(self.model)
        hooks.refuse_early_steps(gradients.named)
        device = devices.agreed(self._named, self._buffers())
        lanes = runtime.current().lanes(flat=described.is_flat, one=device is not None)
        group = lanes[0]
        agreement.compare_model(group, self.algorithm, self.optimizer, self._named)
        advice.warn_of_idle_codec(self.algorithm.name, described.steps)
        agreement.compare_buffers(group, self._buffers())
        self._hosts = list(range(self.world)) if described.is_flat else agreement.hosts(group)
        if device is not None:
            self._sweep.refuse()
        gradients.carriage = devices.connect(device, group)
        gradients.bucket_bytes = self._sweep.begin(gradients, sum(tensor.nbytes for _, tensor in gradients.named))
        # before there are buckets, so that they lie where the copies of this are now
        self._hand_out(group, 0)
        gradients.start(lanes, self.algorithm, described, self.step)
        self._agreed()
        gradients.begin()

    def _watch(self) -> None:
        """Hooks into the model and its optimizer. A world of one has nobody to exchange anything with: there the model
        stays as it is, and a step of the optimizer is what an exchange is elsewhere."""
        optimizer = self.optimizer
        if self.world > 1:
            self._forget_model = hooks.watch_model(self.model, self, self.gradients.line)
            advice.warn_of_own_loss(optimizer)
            if optimizer is not None:
                self._forget_steps = hooks.before_step_is_made(optimizer, self._refuse_non_finite)
        elif optimizer is not None and self.takeover is None:
            self._forget_steps = hooks.before_step(optimizer, self.count_step)

    def _agreed(self) -> None:
        """When all ranks have rank 0's parameters, at the beginning. For replicas that do more than gradients."""

    def remove(self) -> None:
        """Undoes everything: hooks, buckets, ownership. Gradients stay where they are."""
        for forget in (self._forget_model, self._forget_steps):
            if forget is not None:
                forget()
        owners.release(self, self._named)
        self.gradients.remove()
        counters.models.pop(self.number, None)

    def _hand_out(self, group: _core.Group, source: int) -> None:
        """Gives all ranks the parameters, buffers and optimizer state of `source`."""
        tensors = (self.model, self._left_out, self._named)
        agreement.hand_out(group, tensors, self.optimizer, source, self.gradients.carriage)
        if self.takeover is not None:
            named = dict(self.gradients.named)
            self.takeover.load_state_dict(agreement.told_by(group, source, self.takeover.state_dict(named)), named)

    def refresh(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Begins anew with other parameters, or with the same when some were frozen or thawed. Every rank does so."""
        self._turns.take(self, Turn.REFRESH)
        owners.release(self, self._named)
        kept = self.gradients.kept()
        self.gradients.leave()
        self._named = list(named)
        self._start()
        self._samples.tell(self.gradients.scheduler)
        if kept:
            self.gradients.go_on(kept)

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

    def forward_begins(self) -> None:
        """Before the model's forward. Only training counts: evaluation on one rank alone must not wait for others."""
        if not self._trains():
            return
        runtime.training_here()
        self._mend()
        if self.optimizer is None and self.gradients.running().was_non_finite():
            advice.refuse_spoiled(self.gradients.named, self.algorithm.name, self.step - 1)
        self._turns.look(self)
        self._accumulation.forward_begins()
        late = None if self.late is None else self.late()
        if late is not None or any(tensor.requires_grad for tensor in self._frozen):
            self.refresh(late or self._named)
        self._prepare()
        self._before_forward()
        if not self._turns.joining:
            self._sweep.between_rounds(self.gradients)
        if self._buffers_due and self.broadcast_buffers and (buffers := self._buffers()):
            self._turns.take(self, Turn.BUFFERS)
            self._broadcast_buffers(buffers)
        # as in DDP: not again before a forward that is followed by an exchange
        self._buffers_due = not self._accumulation.is_held
        self._began = _core.now()

    def _trains(self) -> bool:
        """Whether the forward under way is one in training."""
        return self.is_running and self.model.training and torch.is_grad_enabled()

    def _before_forward(self) -> None:
        """Before a forward in training. For replicas that do more than gradients."""

    def forward_ended(self) -> Said:
        """After the model's forward: whether no_sync() holds what it computed."""
        self._record("forward")
        return self._accumulation.forward_ended(in_training=self._trains())

    def _record(self, kind: str) -> None:
        """Adds a span of the compute track to the trace: from when it began until now."""
        if self._began:
            runtime.current().mark(kind, self.number, self.step, self._began, _core.now())
            self._began = 0

    def backward_begins(self, said: Said | None) -> None:
        """At the first gradient, or before. `said` is by the forward whose output came first, if it is known."""
        if not self.is_running:
            self.gradients.line.exchanging = False
            return
        self._mend()
        self._decide(asked=self._accumulation.asks_for_exchange(said))
        hooks.at_end_of_backward(self)
        self._began = _core.now()

    def backward_goes_on(self, said: Said) -> None:
        """At the first gradient of another output, where none are exchanged so far: those that have come already
        are sent when backward is over, as after no_sync()."""
        if self.is_running:
            self._decide(asked=self._accumulation.asks_later(said))

    def _decide(self, *, asked: bool) -> None:
        """Says whether gradients of the backward under way are exchanged."""
        line, exchanges = self.gradients.line, asked and self._exchanges_gradients()
        line.announcing = exchanges and self._turns.joining
        line.exchanging = exchanges and not self._turns.joining

    def gradients_begin(self) -> None:
        """At the first gradient of a parameter, in `join()`: a backward to inputs only is no turn."""
        self._turns.take(self, Turn.GRADIENTS)

    def _exchanges_gradients(self) -> bool:
        """Whether the backward that begins is one after which gradients are exchanged, apart from no_sync()."""
        return True

    def backward_ended(self) -> None:
        """When the last gradient is there: waits until all are exchanged."""
        scheduler = self.gradients.scheduler
        exchanging, asked = self.gradients.line.end()
        self._record("backward")
        if exchanging:
            with self._breaking():
                self.gradients.line.deliver()
        if scheduler is None or not asked:
            self._accumulation.forget()
            return
        if scheduler.has_begun() or (exchanging and self._turns.joining):
            self._accumulation.forget()
            called = self._accumulation.was_called
            if not called:
                with self._breaking():
                    advice.refuse_thawed(self._named, self._frozen)
            self._finish()
            # without a forward through the model there is no other moment; hooks must not change while they run
            if not called:
                self._prepare()
            self._accumulation.was_called = False
        else:
            # only gradients of inputs were asked for: that is no training step
            self.gradients.refuse_converted()
            self._refuse_replaced()

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """What raises in here ends the round: the next one mends what is left of it."""
        try:
            yield
        except BaseException:
            self._broken = True
            raise

    def _refuse_replaced(self) -> None:
        with self._breaking():
            advice.refuse_replaced(self.model, self.gradients.named)

    def backward_failed(self) -> None:
        """When backward raised. Called while torch cleans up, so the consequences wait until somebody goes on."""
        self._broken = True
        self._samples.forget(self.gradients.scheduler)
        self.gradients.line.end()
        self.gradients.line.drop()

    def _mend(self) -> None:
        """Goes on after a backward that raised, where nothing of it has reached the other ranks."""
        if self._broken:
            self._broken = False
            self._accumulation.forget()
            self.gradients.running().reset("its backward raised an exception")

    def _finish(self) -> None:
        if self.gradients.misses_others():
            self._refuse_replaced()
        absent = self.gradients.finish(self._turns.scale)
        self._samples.forget(self.gradients.scheduler)
        self.step += 1
        if not self._turns.joining:
            self._sweep.round_ended()
        if absent:
            self._advice.of_unused(absent, self.step - 1)

    @property
    def has_lost(self) -> bool:
        """Whether ranks are lost, and this one goes on with those that are left."""
        return False

    def lose(self) -> bool:
        """When a call has failed because a rank is lost: whether this one goes on with those that are left."""
        return False

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Around somebody else's change of the parameters, between steps, on all ranks: nothing is under way inside."""
        yield

    def references(self) -> list[Tensor]:
        """What else becomes the mean of all ranks together with the weights: what these are set off against later."""
        return []

    def consolidated(self, spread: float) -> None:
        """When all ranks have been given the mean of their weights, which were so far apart."""
        self.spread = spread

    def _prepare(self) -> None:
        """New buckets after the first round, and now and then a look at the parameters."""
        if self.gradients.are_buckets_due:
            self._turns.take(self, Turn.BUCKETS)
            self.gradients.rebucket()
        if self.check_every and self.step != self._checked and self.step % self.check_every == 0:
            self._turns.take(self, Turn.CHECK)
            self._check()

    def _check(self, *, working: bool = True) -> None:
        self._checked = self.step
        agreement.compare_values(self.group, self._named, self.step, working=working)

    def _broadcast_buffers(self, buffers: list[tuple[str, Tensor]]) -> None:
        with hooks.mark("offbeat::buffers"):
            tensors = [tensor for _, tensor in buffers]
            agreement.broadcast_tensors(self.group, tensors, self._turns.source, self.gradients.carriage)

    def _buffers(self) -> list[tuple[str, Tensor]]:
        return agreement.buffers_of(self.model, self._left_out)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Forwards in this context leave gradients where they are: nothing is exchanged in their backward."""
        return self._accumulation.no_sync()

    @property
    def is_held(self) -> bool:
        """Whether no_sync() is active, or what stands for it."""
        return self._accumulation.is_held

    @is_held.setter
    def is_held(self, held: bool) -> None:
        self._accumulation.is_held = held

    def saw(self, samples: float) -> None:
        """Counts the samples of what the next exchange is about."""
        self._samples.saw(samples, self.gradients.scheduler)

    def stats(self) -> counters.Model:
        """What the model has done so far."""
        scheduler = self.gradients.scheduler
        rounds, communication, exposed = scheduler.totals() if scheduler else (self.step, 0.0, 0.0)
        coding = None if scheduler is None else counters.coding(scheduler.coded())
        if coding is not None:
            self._advice.of_cost(coding, rounds, communication)
        return {
            "model": self.number,
            "algorithm": self.algorithm.name,
            "step": rounds,
            "parameters": sum(views.elements(tensor) for _, tensor in self.gradients.named),
            "buckets": len(trace.names.get(self.number, ())),
            "bucket_bytes": self.bucket_bytes,
            "unused": sorted(self._advice.unused),
            "seconds": {"communication": communication, "exposed": exposed},
            "coding": coding,
            "syncs": 0,
            "spread": self.spread,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's state of the algorithm, by names of parameters."""
        state: dict[str, Any] = {"version": keeping.VERSION, "step": self.step}
        state |= self._author._asdict() | self.gradients.state_dict()
        if self.takeover is not None:
            state["frozen"] = self.takeover.state_dict(dict(self.gradients.named))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave. Every rank does so, each with its own."""
        self._mend()
        self.step = state.get("step", self.step)
        if self.takeover is not None:
            self.takeover.load_state_dict(state.get("frozen", {}), dict(self.gradients.named))
        self._take(state, keeping.Match.of(state, self._author, self.group if self._keeps else None))

    def _take(self, state: dict[str, Any], match: keeping.Match) -> None:
        self.gradients.load_state_dict(state, self.step, match)

    @property
    def _keeps(self) -> bool:
        """Whether steps keep anything: the same on all ranks."""
        return self.gradients.keeps

    @property
    def _author(self) -> keeping.Author:
        """Who saves, and loads: what that depends on."""
        name, codecs = self.algorithm.name, codecs_of(self.algorithm)
        return keeping.Author(name, self.world, self.place, self.rank, self._hosts, codecs)

    def count_step(self, *_: object) -> None:
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

    def _refuse_non_finite(self) -> None:
        """Before each step. A GradScaler skips the step, or says so in `found_inf`; nobody else may have noticed."""
        scheduler, found_inf = self.gradients.scheduler, getattr(self.optimizer, "found_inf", None)
        if scheduler is None or found_inf is not None or not scheduler.was_non_finite():
            return
        raise advice.of_non_finite(self.algorithm.name, self.step - 1, self.place)

    @contextlib.contextmanager
    def join(self, rules: Rules) -> Iterator[None]:
        """Around a loop in which ranks have different numbers of batches (`joining.Turns.join`)."""
        self._sweep.pause()
        with self._turns.join(self, rules):
            yield
        if self._turns.idle and self.optimizer is None:
            self._advice.of_missed_steps(sorted(self._turns.idle))

    def follow(self, turn: Turn) -> None:
        """Takes part in what the ranks that still work do, without data."""
        if turn is Turn.GRADIENTS:
            self._exchanges_gradients()
            self.gradients.finish_without()
            self.step += 1
        elif turn is Turn.BUFFERS:
            self._broadcast_buffers(self._buffers())
        elif turn is Turn.BUCKETS:
            self.gradients.rebucket()
        elif turn is Turn.CHECK:
            self._check(working=False)

    def end_join(self, source: int) -> None:
        """Makes ranks equal when the last one is done; `source` has worked until the end."""
        if self.is_running:
            self._hand_out(self.group, source)
