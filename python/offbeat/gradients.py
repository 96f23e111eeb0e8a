"""A replica's gradients in the core's buckets: views of these are what users see as `.grad`.

`Gradients` has the scheduler, the hooks on parameters, the order of buckets, and what steps keep. When gradients are
exchanged is for the replica to decide (`replica.py`).
"""

from typing import TYPE_CHECKING, Any

from . import _core, devices, hooks, keeping, memory, runtime, slots, trace, views
from .algorithm import Algorithm, Description
from .errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Gradients:
    """The gradients of one replica."""

    def __init__(self, listener: hooks.Listener, number: int, bucket_bytes: int) -> None:
        self.number, self.bucket_bytes = number, bucket_bytes
        self.line = hooks.Line(listener)
        # Parameters that were ever trained.
        self.named: list[tuple[str, Tensor]] = []
        self.scheduler: _core.Scheduler | None = None
        # Where gradients are, and who carries them there.
        self.carriage: devices.Home | devices.Carriage = devices.Home()
        self._slots: list[slots.Slot] = []
        self._removers: list[Callable[[], None]] = []
        # Those that a backward did not reach, in any round.
        self._missed: set[int] = set()
        # In the first round the order of gradients is observed; buckets follow it from then on.
        self._observing = True
        self._next_order: tuple[list[int], list[bool]] | None = None
        self._loaded_order: list[int] | None = None
        self._of_hosts: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """Of the parameters, in the order of their numbers."""
        return [name for name, _ in self.named]

    def running(self) -> _core.Scheduler:
        """The scheduler; raises if there is none any more."""
        runtime.current()
        if self.scheduler is None:
            raise InvalidArgument("this wrapper was removed; try: wrap the model or the optimizer again")
        return self.scheduler

    def start(self, lanes: list[_core.Group], algorithm: Algorithm, described: Description, step: int) -> None:
        """Starts a scheduler that exchanges them, and goes on from a step."""
        self.scheduler = runtime.current().scheduler(
            lanes,
            self.number,
            memory.listed(self.named, views.dtype_of_gradient),
            what=algorithm.what,
            when=algorithm.when,
            every=algorithm.every if algorithm.sync() is None else 1,
            warmup=described.warmup,
            first=described.first,
            steps=described.steps,
            bucket_bytes=self.bucket_bytes,
            carrier=self.carriage.carrier,
        )
        self.scheduler.resume(step)
        self._of_hosts = keeping.of_hosts([*described.first, *described.steps])

    def begin(self) -> None:
        """Moves into the first buckets of a scheduler, the order of which is not observed yet."""
        self._observing, self._next_order, self._loaded_order = True, None, None
        self._missed = set()
        self._adopt()

    def leave(self) -> None:
        """Lets go of the scheduler. Gradients have memory of their own again, and another one may begin."""
        self._vacate()
        self.line.disconnect()
        self.scheduler, self.carriage = None, devices.Home()

    def remove(self) -> None:
        """Lets go of everything. Gradients stay where they are."""
        self._drop_hooks()
        self.line.cut()
        self._slots = []
        self.scheduler, self.carriage = None, devices.Home()
        trace.names.pop(self.number, None)

    def _adopt(self) -> None:
        """Takes the core's buckets as the place of gradients; what is there moves in."""
        scheduler = self.running()
        self.carriage.connect(self.line, scheduler)
        places, buckets = memory.spread(scheduler, [parameter for _, parameter in self.named])
        trace.names[self.number] = [", ".join(self.named[index][0] for index in bucket) for bucket in buckets]
        self._slots = [slots.Slot(place, index, self.named[index][0]) for index, place in enumerate(places)]
        batch = [(parameter, slot) for (_, parameter), slot in zip(self.named, self._slots, strict=True)]
        slots.move(batch)
        self._removers = [hooks.watch_gradient(parameter, slot, self.line) for parameter, slot in batch]

    def _vacate(self) -> None:
        """Gives the old buckets' memory back before new ones are made. In a world of one there are none."""
        self._drop_hooks()
        if not self._slots:
            return
        for slot, (_, parameter) in zip(self._slots, self.named, strict=True):
            if slot.holds(parameter.grad):
                parameter.grad = slot.home.clone()
        self._slots = []

    def _drop_hooks(self) -> None:
        for remove in self._removers:
            remove()
        self._removers = []

    @property
    def are_buckets_due(self) -> bool:
        """Whether the order for the final buckets is known, and they are not made."""
        return self._observing and self._next_order is not None

    def rebucket(self, bucket_bytes: int | None = None) -> None:
        """Makes new buckets, by the order in which rank 0's gradients became ready. Every rank does so."""
        scheduler = self.running()
        self.bucket_bytes = bucket_bytes or self.bucket_bytes
        order, late = self._next_order or (list(range(len(self.named)))[::-1], [False] * len(self.named))
        self._vacate()
        scheduler.rebucket(order, late, self.bucket_bytes)
        self._observing = False
        self._adopt()

    def plan(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(tensor, first element) of what lies in each bucket."""
        return tuple(tuple(slots) for _, slots in self.running().buckets())

    def misses_others(self) -> bool:
        """Whether this round lacks gradients that no round before lacked."""
        missing = self.running().missing()
        before = len(self._missed)
        self._missed.update(missing)
        return len(self._missed) > before

    def finish(self, scale: float = 1.0) -> list[str]:
        """Waits until all gradients are exchanged, and multiplies them. Gives the names of trained parameters without
        one."""
        scheduler = self.running()
        absent, earlier = [], []
        for index in scheduler.missing():
            name, parameter = self.named[index]
            if parameter.grad is None:
                self._slots[index].spare()
                self.carriage.absent(scheduler, index, self._slots[index].home)
                if parameter.requires_grad:
                    absent.append(name)
            else:
                # from an earlier backward: exchanged before, or accumulated under no_sync()
                earlier.append((parameter, self._slots[index]))
        self.line.put(earlier)
        self._observe(scheduler)
        with hooks.mark("offbeat::wait"):
            gained = self.carriage.finish(scheduler)
        for index in gained:
            self._slots[index].show(self.named[index][1])
        if scale != 1.0:
            pairs = zip(self._slots, self.named, strict=True)
            slots.scale([slot.home for slot, (_, parameter) in pairs if slot.holds(parameter.grad)], scale)
        return absent

    def finish_without(self) -> None:
        """Takes part in a round of the others without any gradients."""
        scheduler = self.running()
        for index, slot in enumerate(self._slots):
            slot.spare()
            self.carriage.absent(scheduler, index, slot.home)
        self._observe(scheduler)
        self.carriage.finish(scheduler)

    def _observe(self, scheduler: _core.Scheduler) -> None:
        """In the first round: the order for the final buckets. One that was loaded is as good, and known before."""
        if self._observing and self._next_order is None:
            order, late = scheduler.observed()
            self._next_order = (self._loaded_order or order, late)

    def refuse_converted(self) -> None:
        """Raises if a parameter is of another type than its gradients were."""
        for slot, (_, parameter) in zip(self._slots, self.named, strict=True):
            slot.refuse(parameter)

    def state_dict(self) -> dict[str, Any]:
        """The order of buckets and what steps keep, by names of parameters."""
        count = len(self.named)
        order, late = self._next_order or (list(range(count)), [False] * count)
        state: dict[str, Any] = {
            "bucket_bytes": self.bucket_bytes,
            "order": [self.named[index][0] for index in order],
            "late": [name for (name, _), is_late in zip(self.named, late, strict=True) if is_late],
            "observed": self._next_order is not None,
        }
        return state | ({"kept": self.kept()} if self.keeps else {})

    @property
    def keeps(self) -> bool:
        """Whether steps keep anything."""
        return self.scheduler is not None and keeping.keeps(self.scheduler, self.names)

    def kept(self) -> keeping.Kept:
        """What steps keep."""
        if self.scheduler is None:
            return {}
        # what codecs have lost in the first buckets begins at zero in the next
        return keeping.save(self.scheduler, self.names, without="carrier" if self._observing else None)

    def go_on(self, kept: keeping.Kept) -> None:
        """Takes over what was kept in other buckets, before these were begun."""
        taken = keeping.fitting(self.running(), self.names, kept, keeping.Fit.OF_HOSTS, self._of_hosts)
        keeping.warn_of_new_buckets(kept, taken)
        keeping.restore(self.running(), self.names, taken)

    def load_state_dict(self, state: dict[str, Any], step: int, match: keeping.Match) -> None:
        """Takes over what fits of what `state_dict` gave, and goes on from a step.

        The order of buckets changes no result of an algorithm that loses nothing. One that does goes on with the
        buckets that it had, because what is kept of the losses lies where those were summed.
        """
        order, observed = state.get("order", []), state.get("observed", True)
        places = {name: index for index, name in enumerate(self.names)}
        scheduler = self.scheduler
        if scheduler is None or sorted(order) != sorted(places):
            # alone there is nothing to keep; or of another kind of algorithm, or of another model
            keeping.warn_of_reset(state.get("kept", {}), {}, match)
            return
        scheduler.resume(step)
        self._loaded_order = [places[name] for name in order] if observed else None
        if "kept" not in state:
            return
        taken = keeping.fitting(scheduler, self.names, state["kept"], match.much, self._of_hosts)
        keeping.warn_of_reset(state["kept"], taken, match)
        # who keeps nothing has not agreed with the other ranks on how much fits
        if match.much is keeping.Fit.ALL and self._loaded_order is not None and self.keeps:
            # here, where all ranks are: there may be no forward in training before the next backward
            late = set(state.get("late", ()))
            self._next_order = (self._loaded_order, [name in late for name in self.names])
            self.rebucket(state.get("bucket_bytes"))
        keeping.restore(scheduler, self.names, keeping.with_zeros(scheduler, self.names, taken))
