"""One rank's replica of a model: what `DistributedOptimizer` and `DataParallel` both stand on.

A replica owns the model's scheduler in the core and the views of its buckets that serve as gradients. It decides when
gradients are exchanged; the core does it.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from . import _core, agreement, counters, devices, hooks, keeping, memory, owners, runtime, sweep, trace
from .algorithm import Algorithm
from .errors import InvalidArgument, NonFinite
from .joining import Turn, Turns
from .steps import Described, Parameter

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
        self.bucket_bytes = self._sweep.usual
        self.check_every = check_every
        self.broadcast_buffers = broadcast_buffers
        self.world = runtime.world_size()
        self.step = 0
        self.unused: set[str] = set()
        # How far replicas were apart when they were last made equal.
        self.spread: float | None = None
        self._line = hooks.Line(self)
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
        # In the first round the order of gradients is observed; buckets follow it from then on.
        self._observing = True
        self._next_order: tuple[list[int], list[bool]] | None = None
        self._loaded_order: list[int] | None = None
        self._loaded: keeping.Kept = {}
        self._checked = 0
        self._turns = Turns()
        self._named = list(named)
        self._left_out = agreement.left_out(model)
        # Those that were ever trained, and the others. One that is frozen again only counts as unused.
        self._active: list[tuple[str, Tensor]] = []
        self._frozen: list[Tensor] = []
        self._slots: list[hooks.Slot] = []
        # Those of the active ones that a backward did not reach, in any round.
        self._missed: set[int] = set()
        self._scheduler: _core.Scheduler | None = None
        # Where gradients are, and who carries them there.
        self._carriage: devices.Home | devices.Carriage = devices.Home()
        self._removers: list[Callable[[], None]] = []
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
            self._forget_model = hooks.watch_model(model, self, self._line)
            if optimizer is not None:
                self._forget_steps = hooks.before_step(optimizer, self._refuse_non_finite)

    # -- the beginning and the end

    def _start(self) -> None:
        """Makes ranks agree on tensors and values, and starts the core's scheduler."""
        owners.claim(self, self._named)
        self._missed = set()
        before = {id(tensor) for _, tensor in self._active}
        self._active = [(name, t) for name, t in self._named if t.requires_grad or id(t) in before]
        active = {id(tensor) for _, tensor in self._active}
        self._frozen = [tensor for _, tensor in self._named if id(tensor) not in active]
        if self.world == 1:
            sweep.report_alone()
            return
        hooks.refuse_early_steps(self._active)
        agreement.refuse_sparse([*self._named, *self._buffers()])
        devices.refuse_elsewhere([*self._named, *self._buffers()])
        device = devices.of(self._named)
        devices.agree(device)
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
        lines = [f"algorithm {self.algorithm}"]
        if self.optimizer is not None:
            lines.append(agreement.describe_optimizer(self.optimizer))
        agreement.compare(group, "settings", lines)
        self._warn_of_idle_codec(steps)
        agreement.compare(group, "parameters", [agreement.describe(name, tensor) for name, tensor in self._named])
        named = agreement.without_wrappers(self._buffers())
        buffers = [agreement.describe(name, tensor, buffer=True) for name, tensor in named]
        agreement.compare(group, "buffers", buffers)
        if device is not None:
            self._sweep.refuse()
        self._carriage = devices.connect(device, group)
        self.bucket_bytes = self._sweep.begin(self, sum(tensor.nbytes for _, tensor in self._active))
        # before there are buckets, so that they lie where the copies of this are now
        self._hand_out(group, 0)
        self._scheduler = runtime.current().scheduler(
            lanes,
            self.number,
            [(name, hooks.elements(p), hooks.rows(p), hooks.dtype_of_gradient(p)) for name, p in self._active],
            what=self.algorithm.what,
            when=self.algorithm.when,
            every=self.algorithm.every if self.algorithm.sync() is None else 1,
            warmup=warmup,
            first=described,
            steps=steps,
            bucket_bytes=self.bucket_bytes,
            carrier=self._carriage.carrier,
        )
        self._scheduler.resume(self.step)
        self._agreed()
        self._observing, self._next_order = True, None
        self._adopt_buckets()

    def _agreed(self) -> None:
        """When all ranks have rank 0's parameters, at the beginning. For replicas that do more than gradients."""

    def _parameters(self) -> list[Parameter]:
        """What steps may want to know of the parameters."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        settings = {id(p): group for group in groups for p in group["params"]}
        return [Parameter(name, settings.get(id(p), {})) for name, p in self._active]

    def _warn_of_idle_codec(self, steps: Sequence[Described]) -> None:
        coded = any(arguments.get("codec") is not None for _, arguments in steps)
        if coded and runtime.local_size() == self.world and runtime.rank() == 0:
            warnings.warn(
                f"{self.algorithm.name} encodes what travels between hosts, and all {self.world} ranks are on one: it "
                "does what allreduce does. Set OFFBEAT_HOST on each rank to try it on one machine.",
                stacklevel=2,
            )

    def remove(self) -> None:
        """Undoes everything: hooks, buckets, ownership. Gradients stay where they are."""
        for forget in (self._forget_model, self._forget_steps):
            if forget is not None:
                forget()
        self._drop_hooks()
        owners.release(self, self._named)
        self._line.cut()
        self._slots = []
        self._scheduler, self._carriage = None, devices.Home()
        counters.models.pop(self.number, None)
        trace.names.pop(self.number, None)

    def _drop_hooks(self) -> None:
        for remove in self._removers:
            remove()
        self._removers = []

    def synchronize(self, source: int) -> None:
        """Gives all ranks the parameters, buffers and optimizer state of `source`."""
        if self._scheduler is not None:
            self._hand_out(self._scheduler.group, source)

    def _hand_out(self, group: _core.Group, source: int) -> None:
        others = [(name, tensor) for name, tensor in self.model.named_parameters() if name not in self._left_out]
        everything = {id(tensor): tensor for _, tensor in (*others, *self._buffers(), *self._named)}
        agreement.broadcast_tensors(group, everything.values(), source, self._carriage)
        if self.optimizer is not None:
            parameters = [tensor for _, tensor in self._named]
            agreement.broadcast_optimizer(group, self.optimizer, source, parameters, self._carriage)

    def refresh(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Begins anew with other parameters, or with the same when some were frozen or thawed. Every rank does so."""
        self._drop_hooks()
        owners.release(self, self._named)
        self._leave_buckets()
        self._line.disconnect()
        self._scheduler, self._carriage = None, devices.Home()
        self._named = list(named)
        self._start()

    # -- buckets

    def _adopt_buckets(self) -> None:
        """Takes the core's buckets as the place of gradients; what is there moves in."""
        scheduler = self._running()
        self._carriage.connect(self._line, scheduler)
        mine: dict[int, hooks.Slot] = {}
        labels: list[str] = []
        for shown, slots in scheduler.buckets():
            flat = memory.shown(shown)
            for index, offset in slots:
                name, parameter = self._active[index]
                mine[index] = hooks.Slot(hooks.places(flat, parameter, offset), index, name)
            labels.append(", ".join(self._active[index][0] for index, _ in slots))
        trace.names[self.number] = labels
        self._slots = [mine[index] for index in range(len(self._active))]
        batch = [(parameter, slot) for (_, parameter), slot in zip(self._active, self._slots, strict=True)]
        hooks.move(batch)
        self._removers = [hooks.watch_gradient(parameter, slot, self._line) for parameter, slot in batch]

    def _leave_buckets(self) -> None:
        """Gives the old buckets' memory back before new ones are made."""
        for slot, (_, parameter) in zip(self._slots, self._active, strict=True):
            if slot.holds(parameter.grad):
                parameter.grad = slot.home.clone()
        self._slots = []

    def rebucket(self, bucket_bytes: int | None = None) -> None:
        """Makes new buckets, by the order in which rank 0's gradients became ready. Every rank does so."""
        scheduler = self._running()
        self.bucket_bytes = bucket_bytes or self.bucket_bytes
        order, late = self._next_order or (list(range(len(self._active)))[::-1], [False] * len(self._active))
        self._drop_hooks()
        self._leave_buckets()
        scheduler.rebucket(order, late, self.bucket_bytes)
        self._observing = False
        self._adopt_buckets()
        loaded, self._loaded = self._loaded, {}
        keeping.restore(scheduler, self._names(), loaded)

    def plan(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(tensor, first element) of what lies in each bucket."""
        return tuple(tuple(slots) for _, slots in self._running().buckets())

    @property
    def group(self) -> _core.Group:
        """In which gradients are exchanged."""
        return self._running().group

    @property
    def place(self) -> str:
        """Where gradients are: who keeps what of an element is not the same there."""
        return self._carriage.place

    @property
    def is_running(self) -> bool:
        """Whether there is anything to exchange, and it was not removed."""
        return self._scheduler is not None

    def _running(self) -> _core.Scheduler:
        runtime.current()
        if self._scheduler is None:
            raise InvalidArgument("this wrapper was removed; wrap the model or the optimizer again")
        return self._scheduler

    # -- what hooks tell

    def forward_begins(self) -> None:
        """Before the model's forward. Only training counts: evaluation on one rank alone must not wait for others."""
        if self._scheduler is None or not self.model.training or not torch.is_grad_enabled():
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
        if self._scheduler is None:
            self._line.exchanging = False
            return
        self._mend()
        # A forward outside of no_sync() asks for the exchange, also one that was not for training; where none is known
        # the present counts.
        if held is None:
            held = self._hold or bool(self._forwards)
        self._line.exchanging = (not held or False in self._forwards) and self._exchanges_gradients()
        hooks.at_end_of_backward(self)
        self._began = _core.now()
        if self._line.exchanging:
            self._turns.take(self, Turn.GRADIENTS)

    def _exchanges_gradients(self) -> bool:
        """Whether the backward that begins is one after which gradients are exchanged, apart from no_sync()."""
        return True

    def backward_ended(self) -> None:
        """When the last gradient is there: waits until all are exchanged."""
        exchanging, self._line.exchanging = self._line.exchanging, None
        self._record("backward")
        scheduler = self._scheduler
        if exchanging:
            self._deliver()
        if scheduler is None or not exchanging:
            self._forwards.clear()
            return
        if scheduler.has_begun() or self._turns.joining:
            self._forwards.clear()
            self._refuse_thawed()
            self._finish(scheduler)
            # without a forward through the model there is no other moment; hooks must not change while they run
            if not self._called:
                self._prepare()
            self._called = False
        else:
            # only gradients of inputs were asked for: that is no training step
            self._refuse_converted()
            self._refuse_replaced()

    def _deliver(self) -> None:
        try:
            self._line.deliver()
        except BaseException:
            self._broken = True
            raise

    def _refuse_converted(self) -> None:
        for slot, (_, parameter) in zip(self._slots, self._active, strict=True):
            slot.refuse(parameter)

    def _refuse_replaced(self) -> None:
        """Parameters that are not the model's any more get no gradient, and nobody would exchange those of the new."""
        present = {id(tensor): agreement.plain(name) for name, tensor in self.model.named_parameters()}
        names = set(present.values())
        for name, tensor in self._active:
            if id(tensor) not in present and agreement.plain(name) in names:
                self._broken = True
                raise InvalidArgument(
                    f"{name} is another parameter of the model than it was when it was wrapped: its gradient would "
                    "silently stay on this rank; replace modules, or load_state_dict(..., assign=True), before wrapping"
                )

    def _refuse_thawed(self) -> None:
        """Buckets are made anew where a forward in training begins. Without one the gradient of a parameter that was
        thawed would silently stay on this rank."""
        for name, parameter in self._named if self._frozen and not self._called else ():
            if parameter.requires_grad and parameter.grad is not None and any(parameter is it for it in self._frozen):
                self._broken = True
                raise InvalidArgument(
                    f"{name} was frozen when buckets were made and has a gradient now, and there was no forward of the "
                    "wrapped model in training mode in between; call model.train() before forward, or wrap it again"
                )

    def backward_failed(self) -> None:
        """When backward raised. Called while torch cleans up, so the consequences wait until somebody goes on."""
        self._line.exchanging, self._broken = None, True
        self._line.drop()

    def _mend(self) -> None:
        """Goes on after a backward that raised, where nothing of it has reached the other ranks."""
        if self._broken:
            self._broken = False
            self._forwards.clear()
            self._running().reset("its backward raised an exception")

    def _finish(self, scheduler: _core.Scheduler) -> None:
        absent, earlier = [], []
        missing = scheduler.missing()
        if not self._missed.issuperset(missing):
            self._missed.update(missing)
            self._refuse_replaced()
        for index in missing:
            name, parameter = self._active[index]
            if parameter.grad is None:
                self._carriage.absent(scheduler, index, self._slots[index].home)
                if parameter.requires_grad:
                    absent.append(name)
            else:
                # from an earlier backward: exchanged before, or accumulated under no_sync()
                earlier.append((parameter, self._slots[index]))
        self._line.put(earlier)
        self._observe(scheduler)
        with hooks.mark("offbeat::wait"):
            gained = self._carriage.finish(scheduler)
        for index in gained:
            self._slots[index].show(self._active[index][1])
        self.step += 1
        if not self._turns.joining:
            self._sweep.round_ended()
        if absent:
            self._name_unused(absent)

    def _observe(self, scheduler: _core.Scheduler) -> None:
        """In the first round: the order for the final buckets. One that was loaded is as good, and known before."""
        if self._observing and self._next_order is None:
            order, late = scheduler.observed()
            self._next_order = (self._loaded_order or order, late)

    def _name_unused(self, absent: Sequence[str]) -> None:
        new = [name for name in absent if name not in self.unused]
        if new and not self.unused:
            shown = ", ".join(new[:10]) + (f" and {len(new) - 10} more" if len(new) > 10 else "")
            warnings.warn(
                f"{len(new)} parameters got no gradient on rank {runtime.rank()} in step {self.step - 1}: {shown}. "
                "They count as zero here; where no rank used one, its .grad stays None. This is said once.",
                stacklevel=2,
            )
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
        if self._observing and self._next_order is not None:
            self._turns.take(self, Turn.BUCKETS)
            self.rebucket()
        if self.check_every and self.step != self._checked and self.step % self.check_every == 0:
            self._turns.take(self, Turn.CHECK)
            self._check()

    def _check(self, *, working: bool = True) -> None:
        self._checked = self.step
        agreement.compare_values(self._running().group, self._named, self.step, working=working)

    def _broadcast_buffers(self) -> None:
        with hooks.mark("offbeat::buffers"):
            buffers = [tensor for _, tensor in self._buffers()]
            agreement.broadcast_tensors(self._running().group, buffers, self._turns.source, self._carriage)

    def _buffers(self) -> list[tuple[str, Tensor]]:
        return [(name, tensor) for name, tensor in self.model.named_buffers() if name not in self._left_out]

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
        rounds, communication, exposed = self._scheduler.totals() if self._scheduler else (self.step, 0.0, 0.0)
        coding = None if self._scheduler is None else counters.coding(self._scheduler.coded())
        if coding is not None and rounds >= ROUNDS_TO_JUDGE and counters.seconds_saved(coding, communication) < 0:
            self._warn_of_cost(coding)
        return {
            "model": self.number,
            "algorithm": self.algorithm.name,
            "step": rounds,
            "parameters": sum(hooks.elements(tensor) for _, tensor in self._active),
            "buckets": len(trace.names.get(self.number, ())),
            "bucket_bytes": self.bucket_bytes,
            "unused": sorted(self.unused),
            "seconds": {"communication": communication, "exposed": exposed},
            "coding": coding,
            "syncs": 0,
            "spread": self.spread,
        }

    def _warn_of_cost(self, coding: counters.Coding) -> None:
        if not self._warned_of_cost:
            self._warned_of_cost = True
            warnings.warn(
                f"{self.algorithm.name} has spent {coding['seconds']:.2f} s on encoding and saved "
                f"{coding['saved'] / 1e6:.1f} MB, which this network carries in less: try algorithm='allreduce'. This "
                "is said once.",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """This rank's state of the algorithm, by names of parameters."""
        count = len(self._active)
        order, late = self._next_order or (list(range(count)), [False] * count)
        state: dict[str, Any] = {
            "version": 1,
            "algorithm": self.algorithm.name,
            "world_size": self.world,
            "place": self.place,
            "step": self.step,
            "bucket_bytes": self.bucket_bytes,
            "order": [self._active[index][0] for index in order],
            "late": [name for (name, _), is_late in zip(self._active, late, strict=True) if is_late],
        }
        if self._scheduler is not None:
            kept = keeping.save(self._scheduler, self._names())
            # what was loaded and waits for its buckets is still what this rank has
            state |= {"kept": self._loaded or kept} if kept else {}
        if self.takeover is not None:
            state["frozen"] = self.takeover.state_dict(dict(self._active))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave. Every rank does so, each with its own.

        The order of buckets changes no result of an algorithm that loses nothing. One that does goes on with the
        buckets that it had, because what is kept of the losses lies where those were summed.
        """
        self.step = state.get("step", self.step)
        if self.takeover is not None:
            self.takeover.load_state_dict(state.get("frozen", {}), dict(self._active))
        order = state.get("order", [])
        places = {name: index for index, name in enumerate(self._names())}
        saved_by, here = keeping.author(state), (self.algorithm.name, self.world, self.place)
        if self._scheduler is None or sorted(order) != sorted(places):
            # of another kind of algorithm, or of another model; alone there is nothing to keep
            kept = state.get("kept", {}) if self._scheduler is not None else {}
            keeping.warn_of_reset(kept, {}, saved_by, here)
            return
        self._scheduler.resume(self.step)
        self._loaded_order = [places[name] for name in order]
        if "kept" not in state:
            return
        if saved_by != here:
            same = saved_by[0] == self.algorithm.name
            self._loaded = (
                keeping.fitting(self._scheduler, self._names(), state["kept"], saved_by, here) if same else {}
            )
            keeping.warn_of_reset(state["kept"], self._loaded, saved_by, here)
        else:
            self._loaded = state["kept"]
            late = set(state.get("late", ()))
            self._next_order = (self._loaded_order, [name in late for name in self._names()])
            self.bucket_bytes = state.get("bucket_bytes", self.bucket_bytes)
        if self._loaded and not (self._observing and self._next_order is not None):
            # no new buckets are due, so what was loaded finds its place now
            loaded, self._loaded = self._loaded, {}
            keeping.restore(self._scheduler, self._names(), loaded)

    def _names(self) -> list[str]:
        return [name for name, _ in self._active]

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
        scheduler = self._scheduler
        if scheduler is None or getattr(optimizer, "found_inf", None) is not None or not scheduler.was_non_finite():
            return
        # on a GPU it shows when the exchange has long been used: the host does not wait for it
        when = f"step {self.step - 1}" if self.place == "cpu" else f"a step before {self.step - 1}"
        raise NonFinite(
            f"gradients of {when} were NaN or infinite on some rank, and {self.algorithm.name} has made "
            "whole blocks NaN of them on all; try: a lower learning rate, clipping, a GradScaler, or check "
            "torch.isfinite before step()"
        )

    # -- ranks with fewer batches

    def join(self) -> contextlib.AbstractContextManager[None]:
        """Around a loop in which ranks have different numbers of batches (`joining.Turns.join`)."""
        self._sweep.pause()
        return self._turns.join(self)

    def follow(self, turn: Turn) -> None:
        """Takes part in what the ranks that still work do, without data."""
        scheduler = self._running()
        if turn is Turn.GRADIENTS:
            self._exchanges_gradients()
            for index, slot in enumerate(self._slots):
                self._carriage.absent(scheduler, index, slot.home)
            self._observe(scheduler)
            self._carriage.finish(scheduler)
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
