"""Training with exchanges in the background: what `DistributedOptimizer` stands on where an algorithm's `when` is that.

A background thread of the core exchanges snapshots of the parameters while training goes on. This module holds the
safe points, at the end of each `optimizer.step()`: there it adds what came of a round to the parameters, and copies
them for the next. In between the core touches nothing of the model.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import (
    _core,
    advice,
    agreement,
    consolidation,
    counters,
    devices,
    hooks,
    keeping,
    owners,
    replica,
    resuming,
    runtime,
    views,
)
from .algorithms import GradientAllReduce
from .asynchronous import Background
from .errors import InvalidArgument, Timeout, Unsupported
from .joining import Rules
from .snapshots import Snapshots


class BackgroundReplica:
    """A model on this rank, kept near the others by exchanges in the background."""

    def __init__(
        self,
        model: nn.Module,
        named: Sequence[tuple[str, Tensor]],
        algorithm: Background,
        *,
        optimizer: torch.optim.Optimizer | None,
        bucket_bytes: int | Literal["auto"],
        check_every: int | None,
        broadcast_buffers: bool = True,
    ) -> None:
        if optimizer is None:
            raise InvalidArgument(
                f"{algorithm.name} works at the end of each optimizer step, and there is no optimizer; try: optimizer="
            )
        if check_every:
            raise InvalidArgument(
                f"check_every={check_every} compares parameters that {algorithm.name} lets differ; try: leave it out, "
                "and look at the spread in offbeat.stats()"
            )
        self.number = counters.number()
        self.model, self.algorithm, self.optimizer = model, algorithm, optimizer
        self.world = runtime.world_size()
        # Steps of this rank that may be made on top of its last exchange; None for any number.
        self.staleness = algorithm.bound
        self.step = 0
        self.spread: float | None = None
        # Steps since exchanges began, on all ranks alike; the one after which the snapshot under way was taken; and
        # that of the last result that was added.
        self._clock = self._taken = self._synced = 0
        self._named = list(named)
        self._first: replica.Replica | None = None
        self._snapshots: Snapshots | None = None
        self._core: _core.Background | None = None
        # Whether the thread runs, and whether the snapshot is what exchanges begin with.
        self._started = self._seeded = self._paused = False
        # Whether the pause is that of a checkpoint, which the next step ends.
        self._stands_in = False
        # Whether this rank takes part no more.
        self._left = False
        # Numbers that were NaN or infinite: in snapshots that were refused, and among what was encoded before.
        self._refused = self._encoded_bad = 0
        # Rounds that were made before a checkpoint, and those that were dropped.
        self._syncs = self._dropped = 0
        self._group: _core.Group | None = None
        self._forget_steps: list[Callable[[], None]] = []
        if self.world == 1:
            owners.claim(self, self._named)
        elif algorithm.warmup_steps:
            self._first = replica.Replica(
                model,
                named,
                GradientAllReduce(),
                optimizer=optimizer,
                bucket_bytes=bucket_bytes,
                check_every=None,
                broadcast_buffers=broadcast_buffers,
            )
        else:
            self._begin(synchronize=True)
        counters.models[self.number] = counters.weakly(self)
        self._forget_steps = around_steps(optimizer, self)

    def _begin(self, *, synchronize: bool) -> None:
        """Makes ranks agree, and prepares the core. The thread starts at the first safe point."""
        owners.claim(self, self._named)
        device = devices.agreed(self._named)
        for name, tensor in self._named:
            if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.itemsize == 1:
                raise Unsupported(f"{name} is {tensor.dtype}, of which there is no mean; try: float32")
        parameters = [tensor for _, tensor in self._named]
        (group,) = runtime.current().lanes(flat=False, one=True)
        self._group = group
        agreement.compare_model(group, self.algorithm, self.optimizer, self._named)
        if synchronize:
            tensors = (self.model, agreement.left_out(self.model), self._named)
            agreement.hand_out(group, tensors, self.optimizer, 0, devices.Home())
        method, arguments = self.algorithm.method()
        period = self.algorithm.pace
        self._snapshots = Snapshots(group, parameters, method, arguments, period=period, device=device)
        self._core = self._snapshots.core
        self._started = self._seeded = self._left = False
        self._encoded_bad = 0
        self._clock = self._taken = self._synced = 0

    def _begin_anew(self) -> None:
        """The same with a thread of its own, on all ranks together."""
        self._stop()
        owners.release(self, self._named)
        self._begin(synchronize=False)

    def _stop(self) -> None:
        """Ends the thread. What was counted stays."""
        if self._core is not None:
            rounds, dropped, *_ = self._core.progress()
            self._syncs, self._dropped = self._syncs + rounds, self._dropped + dropped
            self._core.stop()

    def remove(self) -> None:
        """Undoes everything, and says goodbye to the other ranks' exchanges."""
        for forget in self._forget_steps:
            forget()
        if self._first is not None:
            self._first.remove()
        if self._core is not None:
            self._core.stop()
        owners.release(self, self._named)
        self._first = self._snapshots = self._core = None
        counters.models.pop(self.number, None)

    def refresh(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Begins anew with other parameters. Every rank does so."""
        if self._core is not None and self._group is not None:
            # rank 0's weights count from now on: what the others have learned must be in them
            with self.settled():
                buffers = [tensor for _, tensor in agreement.buffers_of(self.model, agreement.left_out(self.model))]
                self.spread, _ = consolidation.average(self._group, [tensor for _, tensor in self._named], buffers)
        owners.release(self, self._named)
        self._named = list(named)
        if self._first is not None:
            self._first.refresh(named)
        elif self._core is not None:
            self._stop()
            self._begin(synchronize=True)

    def _end_warmup(self) -> None:
        """After the last step of the warm-up: from here on nothing is exchanged in backward."""
        if self._first is not None and self.step >= self.algorithm.warmup_steps:
            self._first.remove()
            self._first = None
            self._begin(synchronize=False)

    def step_begins(self) -> None:
        """Before the optimizer's step. What is there before the first one is what exchanges begin with: a checkpoint
        of the model may have been loaded after one of the optimizer."""
        runtime.training_here()
        self._end_stand_in()
        self._seed()

    def _seed(self) -> None:
        if self._snapshots is not None and not self._seeded:
            self._snapshots.copy()
            self._seeded = True

    def step_ended(self) -> None:
        """After the optimizer's step, or instead of one that a GradScaler skips: the only place where the core's
        results reach the model."""
        self.step += 1
        if self._first is not None:
            self._end_warmup()
            return
        snapshots = self._snapshots
        self._clock += 1
        if snapshots is None:
            return
        if not self._paused:
            self._meet(snapshots)
        if self.staleness is not None:
            # others wait for this rank's steps, and not for ever for those that it has no occasion to push
            snapshots.core.passed(self._clock)

    def _start(self, snapshots: Snapshots) -> None:
        if not self._started:
            snapshots.core.start()
            self._started = True

    def _meet(self, snapshots: Snapshots) -> None:
        """Does what the core asks for, and waits for it where too many steps would be made on top of an exchange."""
        core = snapshots.core
        self._start(snapshots)
        task = core.look()
        while task is not None:
            self._do(snapshots, task)
            task = core.look() if task == "apply" else None
        while self.staleness is not None and self._clock - self._synced > self.staleness:
            task = core.wait(only_results=False)
            if task is None:  # nobody is left to wait for
                break
            self._do(snapshots, task)

    def _do(self, snapshots: Snapshots, task: str) -> None:
        if task == "snapshot":
            self._refuse_non_finite(snapshots)
        self._act(snapshots, task)

    def _act(self, snapshots: Snapshots, task: str) -> None:
        snapshots.do(task, self._clock)
        if task == "snapshot":
            self._taken = self._clock
        else:
            self._synced = self._taken

    def _refuse_non_finite(self, snapshots: Snapshots) -> None:
        """Before a snapshot that would be encoded. The host waits for no GPU: there it is what was encoded last."""
        if getattr(self.algorithm, "codec", None) is None or getattr(self.optimizer, "found_inf", None) is not None:
            return
        if snapshots.is_on_gpu:
            counted = snapshots.core.coded()[2]
            bad, self._encoded_bad = counted - self._encoded_bad, counted
        else:
            bad = snapshots.non_finite()
            self._refused += bad
        if bad:
            raise advice.of_non_finite_weights(self.algorithm.name, self.step, bad)

    def _coded(self) -> tuple[int, int, int, float, float]:
        """What encoding has done, and what was refused before."""
        plain, coded, bad, error, seconds = (0, 0, 0, 0.0, 0.0) if self._core is None else self._core.coded()
        return plain, coded, bad + self._refused, error, seconds

    def drain(self) -> None:
        """Waits for the round under way, if there is one, and adds what came of it."""
        self._end_stand_in()
        snapshots = self._snapshots
        if snapshots is None or not self._started or self._paused:
            return
        # what takes longer is added later: the parameters are a valid state without it
        with contextlib.suppress(Timeout):
            task = snapshots.core.wait(only_results=True)
            if task is not None:
                self._do(snapshots, task)

    def _make_round(self, snapshots: Snapshots) -> None:
        """Makes a whole round, with the weights of now, and adds what comes of it. Nothing of it is encoded, so no
        number is refused."""
        taken = False
        while (task := snapshots.core.wait(only_results=False)) is not None:  # somebody is left
            self._act(snapshots, task)
            if taken and task != "snapshot":
                return
            taken = taken or task == "snapshot"

    def pause(self) -> None:
        """Leaves the parameters alone until `resume`. Meanwhile a copy stands for the model in rounds of others;
        what comes of these is added after."""
        snapshots, was_paused = self._snapshots, self._paused
        self._paused, self._stands_in = True, False
        if snapshots is None or was_paused:
            return
        core, held = snapshots.core, False
        # a result may come in between
        for _ in range(2):
            task = core.look()
            if task is not None and task != "snapshot":
                self._do(snapshots, task)
            held = held or core.hold()
        if held:
            snapshots.copy()
        core.pause(self._clock)

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._paused = self._stands_in = False
        if self._core is not None:
            self._core.resume()

    def _stand_in(self) -> None:
        """Lets a copy stand for the model until the next step: whoever has saved may wait for the other ranks to do so,
        and one of these for a round with it. Where staleness is bounded they wait for its steps instead."""
        if self._started and not self._paused and self.staleness is None:
            self.pause()
            self._stands_in = True

    def _end_stand_in(self) -> None:
        if self._stands_in:
            self.resume()

    def saw(self, _: float) -> None:
        """Refused: who is how far is not known here, so each rank counts the same."""
        raise InvalidArgument(
            f"each rank counts the same in {self.algorithm.name}, whatever it saw; try: weighted=True of LocalSGD or "
            "DiLoCo, or a learning rate by rank"
        )

    @property
    def is_held(self) -> bool:
        """Whether the warm-up's exchanges are held; see `Replica`."""
        return self._first is not None and self._first.is_held

    @is_held.setter
    def is_held(self, held: bool) -> None:
        if self._first is not None:
            self._first.is_held = held

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing is exchanged in backward anyway, but in a warm-up."""
        with contextlib.nullcontext() if self._first is None else self._first.no_sync():
            yield

    @contextlib.contextmanager
    def join(self, rules: Rules) -> Iterator[None]:
        """Around a loop in which ranks have different numbers of batches: who is done takes part no more. The next such
        loop, which every rank begins, is with all of them again."""
        if rules != Rules():
            raise InvalidArgument(
                f"{self.algorithm.name} lets every rank go at its own pace, so there is no mean to divide by another "
                "number, and no step at which all could end; try: join() without arguments"
            )
        if self._core is not None and self._left:
            self._begin_anew()
            # weights have gone apart since: all begin from what they have now
            self._core.go_on(0, 0, 0)
        with contextlib.nullcontext() if self._first is None else self._first.join(rules):
            yield
        if self._core is not None:
            self.drain()
            self._core.stop()
            self._left = True

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Around somebody else's change of the parameters, on all ranks: nothing is under way inside, and nothing is
        left to be added after."""
        self._end_stand_in()
        was_paused = self._paused
        try:
            if self.algorithm.has_server:
                self._go_to_server()
            else:
                self._end_rounds()
            yield
        finally:
            if was_paused:
                self.pause()

    def _end_rounds(self) -> None:
        """Ranks that are in no round let a copy stand for them, or those that are would wait for their snapshots in
        vain. When all do so no new round begins; when all have ended theirs, every round that some rank was still to be
        drawn into has begun everywhere, and a second wait ends it."""
        for _ in range(2):
            if self._started:
                self.pause()
            consolidation.meet()
            self.resume()
            self.drain()

    def _go_to_server(self) -> None:
        """Gives every rank the server's values. No rank makes steps any more when all are here; the server has all of
        them when all have ended a round, and every rank has those when it has ended another."""
        self.resume()
        # weights with which nobody has begun are in no server
        if not consolidation.meet(says=self._started and not self._left):
            return
        snapshots = self._snapshots
        if snapshots is None:
            return
        # the others need what is served here
        self._seed()
        self._start(snapshots)
        try:
            snapshots.core.close("settles")
            self._make_round(snapshots)
            consolidation.meet()
            self._make_round(snapshots)
        finally:
            snapshots.core.close("open")

    def references(self) -> list[Tensor]:
        """What else becomes the mean of all ranks: nothing, since nothing is under way."""
        return []

    def consolidated(self, spread: float) -> None:
        """Replicas were made equal; they had been so far apart."""
        self.spread = spread

    def stats(self) -> counters.Model:
        """What the model has done so far."""
        rounds, dropped, spread, living = self._core.progress() if self._core else (0, 0, 0.0, self.world)
        rounds, dropped = rounds + self._syncs, dropped + self._dropped
        return {
            "model": self.number,
            "algorithm": self.algorithm.name,
            "step": self.step,
            "parameters": sum(views.elements(tensor) for _, tensor in self._named),
            "buckets": 0,
            "bucket_bytes": 0,
            "unused": [],
            "seconds": {"communication": 0.0, "exposed": 0.0},
            "coding": counters.coding(self._coded()),
            "syncs": rounds,
            "spread": self.spread,
            "background": {
                "syncs": rounds,
                "dropped": dropped,
                "staleness": self._clock - self._synced,
                "spread": spread,
                "living": living,
            },
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's state of the algorithm, by names of parameters. What is under way is ended first, and is in the
        parameters then; what could not be ended is a part of the state. Nobody else has to save at the same time."""
        self.drain()
        state: dict[str, Any] = {
            "version": keeping.VERSION,
            "algorithm": self.algorithm.name,
            "world_size": self.world,
            "rank": runtime.rank(),
            "step": self.step,
        }
        if self._snapshots is None or self._core is None:
            return state
        if not self._seeded:
            self._snapshots.copy()
        number, living, kept = resuming.save(self._core, self._names())
        rounds, dropped, *_ = self._core.progress()
        self._stand_in()
        return state | {
            # who is gone has no part in what is kept
            "world_size": living,
            "round": number,
            "clock": self._clock,
            "synced": self._synced,
            "syncs": rounds + self._syncs,
            "dropped": dropped + self._dropped,
            "kept": kept,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave. Every rank does so, each with its own: they agree on whether all fit."""
        self.step = state.get("step", self.step)
        self._end_warmup()
        if self._core is None:
            return
        if self._started or self._left:
            self._begin_anew()
        here = (self.algorithm.name, self.world, runtime.rank())
        self._syncs, self._dropped = state.get("syncs", 0), state.get("dropped", 0)
        if self._group is not None and resuming.go_on(self._core, self._group, self._names(), state, here):
            self._clock, self._taken, self._synced = state["clock"], state["synced"], state["synced"]

    def _names(self) -> list[str]:
        return [name for name, _ in self._named]


def around_steps(optimizer: torch.optim.Optimizer, background: BackgroundReplica) -> list[Callable[[], None]]:
    """Has a replica told of each step, without keeping it alive. Gives what takes that away."""
    reference = weakref.ref(background)

    def before(*_: object) -> None:
        alive = reference()
        if alive is not None:
            alive.step_begins()

    def after(*_: object) -> None:
        alive = reference()
        if alive is not None:
            alive.step_ended()

    return hooks.around_step(optimizer, before, after)
