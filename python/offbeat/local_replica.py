"""A replica that may differ from the others for a while, because its algorithm exchanges weights."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from . import _core, agreement, consolidation, counters, hooks, keeping, replica, runtime, settings
from .algorithm import Algorithm
from .errors import InvalidArgument, Unsupported
from .joining import Turn
from .weights import Weights


class LocalReplica(replica.Replica):
    """Weights are exchanged when the optimizer has made its steps; gradients in the warm-up, and inside of hosts."""

    def __init__(
        self,
        model: nn.Module,
        named: list[tuple[str, Tensor]],
        algorithm: Algorithm,
        **options: Unpack[replica.Options],
    ) -> None:
        self.weights: Weights | None = None
        # Whether gradients are exchanged after the warm-up too.
        self._averages = True
        optimizer = options["optimizer"]
        if optimizer is None:
            raise InvalidArgument(
                f"{algorithm.name} exchanges weights when the optimizer has made its steps, and there is no optimizer; "
                "try: offbeat.DistributedOptimizer(optimizer, model, ...)"
            )
        if options["check_every"]:
            raise InvalidArgument(
                f"check_every={options['check_every']} compares the parameters of all ranks, and {algorithm.name} lets "
                "them differ; try: check_every=None, and offbeat.consolidate(model), which says how far they are apart"
            )
        # sizes are tried in exchanges of gradients, which there may be none of; replicas that differ have buffers of
        # their own too
        size = settings.BUCKET_BYTES if options["bucket_bytes"] == "auto" else options["bucket_bytes"]
        super().__init__(
            model,
            named,
            algorithm,
            optimizer=optimizer,
            bucket_bytes=size,
            check_every=None,
            broadcast_buffers=False,
        )
        self._around_steps: list[Callable[[], None]] = (
            [] if self.weights is None else hooks.around_step(optimizer, self.step_begins, self.step_ended)
        )

    def _agreed(self) -> None:
        sync = self.algorithm.sync()
        if sync is None:
            return
        self._averages = bool(self.algorithm.steps()) and several_on_a_host(self.group)
        self.weights = Weights(sync, self.algorithm.name, self.gradients.named, self.bucket_bytes)
        self.weights.step = self.step

    def remove(self) -> None:
        for forget in self.__dict__.pop("_around_steps", ()):
            forget()
        if self.weights is not None:
            self.weights.remove()
        super().remove()

    def refresh(self, named: Sequence[tuple[str, Tensor]]) -> None:
        before = self.weights
        if before is None:
            super().refresh(named)
            return
        if before.survivors is not None:
            raise Unsupported(
                "a rank was lost, and without it no new buckets can be agreed on for parameters that were added or "
                "thawed; try: save a checkpoint, and start again"
            )
        self._turns.take(self, Turn.REFRESH)
        # rank 0's weights count from now on: what the others have learned must be in them
        self._average()
        kept = before.state_dict()
        before.remove()
        super().refresh(named)
        if self.weights is not None:
            taken = self.weights.load_state_dict(kept, keeping.Fit.OF_HOSTS)
            keeping.warn_of_new_buckets(kept.get("kept", {}), taken)

    def _before_forward(self) -> None:
        if self.weights is not None and self.weights.is_due_before_forward:
            self._turns.take(self, Turn.STEP)
            self._end_warmup(self.weights)
            self.weights.forward_begins()

    def _end_warmup(self, weights: Weights) -> None:
        """Where the warm-up ends, what steps keep begins with the weights that came of it: older anchors would count
        its steps again. All ranks have these alike, but those without data, which have made no step since."""
        if not weights.ends_warmup:
            return
        if self._turns.joining and self._turns.idle:
            parameters = [tensor for _, tensor in self._named]
            agreement.broadcast_tensors(self.group, parameters, self._turns.source, self.gradients.carriage)
        weights.begin()

    def _exchanges_gradients(self) -> bool:
        if self.weights is None:
            return False
        # backwards of one step are one exchange to the warm-up
        self.gradients.running().resume(self.weights.step)
        return self._averages or not self.weights.is_warm

    def saw(self, samples: float) -> None:
        super().saw(samples)
        if self.weights is not None:
            self.weights.saw(samples)

    def step_begins(self, *_: object) -> None:
        """Before the optimizer's step."""
        if self.weights is not None:
            self.weights.step_begins()

    def step_ended(self, *_: object) -> None:
        """After the optimizer's step, or instead of one that a GradScaler skips."""
        if self.weights is not None:
            if self.weights.is_due_after_step:
                self._turns.take(self, Turn.STEP)
                self._end_warmup(self.weights)
            self.weights.step_ended()
            self.step = self.weights.step

    @property
    def has_lost(self) -> bool:
        return self.weights is not None and self.weights.survivors is not None

    def lose(self) -> bool:
        return self.weights is not None and self.weights.lose()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        if self.weights is not None:
            self.weights.rest()
        yield

    def follow(self, turn: Turn) -> None:
        if turn is Turn.STEP and self.weights is not None:
            self._end_warmup(self.weights)
            self.weights.forward_begins()
            self.weights.step_begins()
            self.weights.step_ended()
            self.step = self.weights.step
        else:
            super().follow(turn)

    def end_join(self, source: int) -> None:
        if self.weights is None or not self.weights.is_warm:
            super().end_join(source)
            return
        # where a rank was lost those with data left make their steps without the others
        self.step = self.weights.step = self._average(patient=True)

    def _average(self, *, patient: bool = False) -> int:
        parameters = [tensor for _, tensor in self._named]
        buffers = [*(tensor for _, tensor in self._buffers()), *self.references()]
        with self.settled():
            spread, step = consolidation.average(self.group, parameters, buffers, step=self.step, patient=patient)
        self.consolidated(spread)
        return step

    def consolidated(self, spread: float) -> None:
        super().consolidated(spread)
        if self.weights is not None:
            self.weights.resume()
            self.weights.consolidated()

    def references(self) -> list[Tensor]:
        return [] if self.weights is None else self.weights.before

    def stats(self) -> counters.Model:
        stats = super().stats()
        if self.weights is not None:
            communication, exposed = self.weights.totals()
            stats["step"], stats["syncs"] = self.step, self.weights.syncs
            stats["seconds"]["communication"] += communication
            stats["seconds"]["exposed"] += exposed
            stats["coding"] = counters.coding(self.weights.coded())
            if self.weights.sync.gossip is not None:
                survivors = self.weights.survivors
                stats["living"] = self.world if survivors is None else survivors.living
        return stats

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self.weights is None else state | {"weights": self.weights.state_dict()}

    def _take(self, state: dict[str, Any], match: keeping.Match) -> None:
        super()._take(state, match)
        saved, taken = state.get("weights", {}), {}
        if self.weights is not None:
            taken = self.weights.load_state_dict(saved, match.much, has_result=match.is_of_same_world)
        keeping.warn_of_reset(saved.get("kept", {}), taken, match)

    @property
    def _keeps(self) -> bool:
        return super()._keeps or (self.weights is not None and self.weights.keeps)


def several_on_a_host(group: _core.Group) -> bool:
    """Whether any host has several ranks."""
    most = torch.tensor([runtime.local_size()], device="cpu")
    group.all_reduce(most, "max", None, False)
    return int(most) > 1
