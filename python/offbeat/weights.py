"""A replica's exchange of weights: copies parameters into buckets of their own, and back where it is time.

What an exchange does is in the core, when it is due in `syncs.py`. Parameters are no views of these buckets, so that
training goes on with them while an exchange is under way. Where gossip has lost a rank, `survivors.py` takes over.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import counters, devices, keeping, memory, runtime, slots, trace, views
from .errors import NonFinite, OffbeatError, PeerFailed, PeerLost
from .steps import Parameter
from .survivors import Survivors
from .syncs import Piece, Sync, divide

Named = Sequence[tuple[str, Tensor]]
Coded = tuple[int, int, int, float, float]


class Fragment:
    """Some parameters, and the scheduler that exchanges them."""

    def __init__(self, number: int, named: Named, pieces: Sequence[Piece], sync: Sync, bucket_bytes: int) -> None:
        # the objects themselves: users may point them to other memory
        self.owners = [(named[piece.tensor][1], piece) for piece in pieces]
        self.number, self.names = number, [label(named[piece.tensor], piece) for piece in pieces]
        named = list(zip(self.names, self.parameters, strict=True))
        # Parameters as they were when the exchange began, where training goes on meanwhile.
        self.before: list[Tensor] = []
        # How many samples this rank had seen when its last exchange began.
        self.seen = 0.0
        described = [step.describe([Parameter(name) for name in self.names]) for step in sync.steps]
        self.of_hosts = keeping.of_hosts(described)
        core, device = runtime.current(), devices.of(named)
        lanes = core.lanes(flat=False, one=device is not None)
        # Where weights are on a GPU. Exchanges of gradients have another one: both may be under way.
        self._carriage = devices.connect(device, lanes[0])
        self.scheduler = core.scheduler(
            lanes,
            number,
            memory.listed(named),
            what="weights",
            when=sync.when,
            every=sync.every,
            warmup=0,
            first=[],
            steps=described,
            bucket_bytes=bucket_bytes,
            carrier=self._carriage.carrier,
        )
        # The parameters of each bucket, in the order in which buckets go out.
        self.places, self._buckets = memory.spread(self.scheduler, self.parameters)
        trace.names[number] = [", ".join(self.names[index] for index in bucket) for bucket in self._buckets]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters, or the pieces of them that belong here, where they are now."""
        return [piece_of(parameter, piece) for parameter, piece in self.owners]

    @property
    def is_on_gpu(self) -> bool:
        """Whether weights are on a GPU; the ranks that are left can go on without the others on the CPU only."""
        return self._carriage.place == "gpu"

    def begin(self) -> None:
        """What steps keep begins with these weights, which all ranks have alike."""
        slots.fill(self.places, self.parameters)
        self._carriage.begin(self.scheduler)

    def start(self, samples: float, *, overlapped: bool) -> None:
        """Begins an exchange, when this rank has seen so many samples. A bucket goes out while the next is copied."""
        self.scheduler.weigh(samples - self.seen)
        self.seen = samples
        parameters = self.parameters
        # of the parameters, since a bucket is not this thread's any more when it is on its way
        self.before = [parameter.detach().clone() for parameter in parameters] if overlapped else []
        self.scheduler.hold(False)
        mark = self._carriage.marker(self.scheduler.mark_ready)
        for bucket in self._buckets:
            slots.fill([self.places[index] for index in bucket], [parameters[index] for index in bucket])
            mark(bucket)

    def land(self, step: int, algorithm: str) -> None:
        """Waits until the exchange is over. Its result stays in the buckets."""
        self._carriage.finish(self.scheduler)
        if self.scheduler.was_non_finite():
            raise NonFinite(
                f"weights of step {step} were NaN or infinite, and {algorithm} could not encode them; try: a lower "
                "learning rate, clipping, or a GradScaler"
            )

    def show(self) -> None:
        """Puts the result in the place of the parameters, and what they have moved meanwhile on top."""
        if self.before:
            torch._foreach_sub_(self.parameters, self.before)
            torch._foreach_add_(self.parameters, self.places)
            self.before = []
        else:
            torch._foreach_copy_(self.parameters, self.places)


def piece_of(parameter: Tensor, piece: Piece) -> Tensor:
    """The elements of a parameter that a piece names: itself, or a view of some of them."""
    if piece.last - piece.first == views.elements(parameter):
        return parameter
    return parameter.detach().view(-1)[piece.first : piece.last]


def label(named: tuple[str, Tensor], piece: Piece) -> str:
    """What a piece is called, in state and messages: as its parameter if it is all of it."""
    name, parameter = named
    return name if piece_of(parameter, piece) is parameter else f"{name}[{piece.first}:{piece.last}]"


class Weights:
    """All of a replica's weights. Every rank makes the same calls in the same order.

    Gossip goes on when a rank is lost: what was under way is thrown away, which leaves the parameters as they are, and
    from the next exchange on those that are left meet without groups. They need not notice in the same step.
    """

    def __init__(self, sync: Sync, algorithm: str, named: Named, bucket_bytes: int) -> None:
        self.sync, self.algorithm, self._bucket_bytes = sync, algorithm, bucket_bytes
        # Steps of the optimizer, also those that a GradScaler skipped; exchanges that have been applied.
        self.step = self.syncs = 0
        # Samples that this rank has seen, where ranks count by them.
        self.samples = 0.0
        # The fragment whose exchange has begun and is not applied, and whether its result is there.
        self._flying: Fragment | None = None
        self._landed = False
        # The step of which the exchange has begun, if one is due; for exchanges that begin before forward.
        self._begun: int | None = None
        # Whether weights were made equal since the exchange under way began: its result is of no use any more.
        self._obsolete = False
        # What goes on with the ranks that are left, once some are lost; whether a round of it is under way; the number
        # of the next; and what had been done before.
        self.survivors: Survivors | None = None
        self._meeting = False
        self._next = 0
        self._past: tuple[float, float] = (0.0, 0.0)
        self._coded: list[Coded] = []
        sizes = [views.elements(parameter) for _, parameter in named]
        cut = [sync.cuts and parameter.is_contiguous() and not parameter.is_complex() for _, parameter in named]
        parts = divide(sizes, sync.fragments, cut=cut)
        self.fragments = [Fragment(counters.number(), named, part, sync, bucket_bytes) for part in parts]
        self.begin()

    def begin(self) -> None:
        """What steps keep begins with the weights of now, which all ranks have alike."""
        with torch.no_grad():
            for fragment in self.fragments:
                fragment.begin()

    @property
    def is_warm(self) -> bool:
        """Whether the warm-up is over."""
        return self.step >= self.sync.after

    @property
    def ends_warmup(self) -> bool:
        """Whether the warm-up ends here: with this step, or before the first forward after it."""
        return 0 < self.sync.after == self.step + (0 if self.is_before_forward else 1)

    @property
    def is_before_forward(self) -> bool:
        """Whether exchanges begin before forward, and not after a step."""
        return self.sync.when == "before_forward"

    @property
    def is_due_before_forward(self) -> bool:
        """Whether `forward_begins` has anything to do: not again in a step."""
        return self._is_to_begin and not self.is_under_way

    @property
    def is_due_after_step(self) -> bool:
        """Whether `step_ended` has anything to exchange: always, but where a forward has begun it."""
        return self._is_to_begin or not self.is_before_forward

    @property
    def _is_to_begin(self) -> bool:
        return self.is_before_forward and self._begun != self.step

    @property
    def is_under_way(self) -> bool:
        """Whether an exchange has begun and is not applied."""
        return self._flying is not None or self._meeting

    def forward_begins(self) -> None:
        """Before a forward in training: begins an exchange that is due."""
        if self.is_due_before_forward:
            self._begin_before_forward()

    def _begin_before_forward(self) -> None:
        self._begun = self.step
        due = self.sync.starts(self.step)
        if due is not None:
            # a forward may be inside of the optimizer's step, or other weights are loaded after it
            self._start(due, overlapped=True)

    def step_begins(self) -> None:
        """Before an optimizer's step: gradients were computed with the old weights, which may move now."""
        if self.is_before_forward:
            self._apply()

    def step_ended(self) -> None:
        """After an optimizer's step, or one that was skipped."""
        if self._is_to_begin:
            # the model was not called, or an exchange was still under way when it was
            self._begin_before_forward()
        self.step += 1
        if self.is_before_forward:
            return
        due = self.sync.starts(self.step)
        if due is not None:
            self._start(due, overlapped=self.sync.overlap > 0)
        if self.sync.ends(self.step) is not None:
            self._apply()

    def saw(self, samples: float) -> None:
        """So many more samples, of which those of the warm-up count in no exchange of weights."""
        self.samples += samples
        if not self.is_warm:
            for fragment in self.fragments:
                fragment.seen = self.samples

    def _start(self, due: int, *, overlapped: bool) -> None:
        if self.survivors is not None:
            number = self.sync.number(self.step)
            self._meeting, self._next = self.survivors.start(number), number + 1
            return
        fragment = self.fragments[due]
        with torch.no_grad():
            fragment.start(self.samples, overlapped=overlapped)
        self._flying, self._landed = fragment, False

    def _apply(self) -> None:
        obsolete, self._obsolete = self._obsolete, False
        if self.survivors is not None and self._meeting:
            self._meeting = False
            self.syncs += self.survivors.land(adds=not obsolete)
            return
        self.land()
        fragment, self._flying = self._flying, None
        if fragment is None or obsolete:
            return
        with torch.no_grad():
            fragment.show()
        self.syncs += 1

    def land(self) -> None:
        """Waits for the exchange that is under way, if one is. It is applied when its time has come."""
        if self._flying is not None and not self._landed:
            try:
                self._flying.land(self.step, self.algorithm)
                self._landed = True
            except (PeerLost, PeerFailed):
                if not self.lose():
                    raise

    def lose(self) -> bool:
        """Goes on with those that are left, from the next exchange on; False if this algorithm cannot. The core tells
        the user who is lost."""
        gossip = self.sync.gossip
        if gossip is None or not self.is_warm or any(fragment.is_on_gpu for fragment in self.fragments):
            return False
        if self.survivors is None:
            self._past, self._coded = self.totals(), [self.coded()]
            self._next = self.sync.number(self.step) + 1
            (fragment,) = self.fragments
            self.survivors = Survivors(fragment.scheduler.group, fragment.parameters, gossip)
            self._forget()
        return True

    @property
    def before(self) -> list[Tensor]:
        """Weights as they were when the exchange under way began, if its result will be set off against them."""
        return [] if self._flying is None or self.is_before_forward else self._flying.before

    def consolidated(self) -> None:
        """Ranks were given the mean of their weights, and of `before`. What gossip has under way would part them."""
        self._obsolete = self.is_before_forward and self.is_under_way
        if self.sync.restart and self.survivors is None:
            self.begin()

    def rest(self) -> None:
        """Between steps: this rank does something else, and those that are left need not wait for it."""
        if self.survivors is not None and not self._meeting:
            self.survivors.rest()

    def resume(self) -> None:
        """It comes back."""
        if self.survivors is not None:
            self.survivors.resume()

    @property
    def keeps(self) -> bool:
        """Whether steps keep anything."""
        return any(keeping.keeps(fragment.scheduler, fragment.names) for fragment in self.fragments)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, by names of parameters. An exchange under way is waited for, and its result saved: the
        weights themselves stay as they are, whether they are saved before or after."""
        self.land()
        state: dict[str, Any] = {"step": self.step, "syncs": self.syncs, "bucket_bytes": self._bucket_bytes}
        state |= {} if self._begun is None else {"begun": self._begun}
        if self.survivors is not None:
            # copies of peers' weights, and a round under way, are not kept
            return state | {"rounds": [self._next], "living": self.survivors.living}
        state["rounds"] = [fragment.scheduler.totals()[0] for fragment in self.fragments]
        if self.samples:
            # since the last exchange of each
            state["samples"] = [self.samples - fragment.seen for fragment in self.fragments]
        kept: keeping.Kept = {}
        for fragment in self.fragments:
            kept |= keeping.save(fragment.scheduler, fragment.names)
        state |= {"kept": kept} if kept else {}
        if self._flying is not None and not self._obsolete:
            flying = self._flying
            state["result"] = {n: place.clone() for n, place in zip(flying.names, flying.places, strict=True)}
            state["before"] = {n: values.clone() for n, values in zip(flying.names, flying.before, strict=False)}
        return state

    def load_state_dict(self, state: dict[str, Any], much: keeping.Fit, *, has_result: bool = True) -> keeping.Kept:
        """Takes over as much as fits of what `state_dict` gave, and the result of an exchange that was under way unless
        it is another's. Gives what of all that steps had kept was taken."""
        if state.get("bucket_bytes", self._bucket_bytes) != self._bucket_bytes:
            # with other buckets others carry
            much = min(much, keeping.Fit.OF_HOSTS)
        self.step, self.syncs = state.get("step", self.step), state.get("syncs", self.syncs)
        self._flying, self._obsolete = None, False
        self._begun = state.get("begun", self.step if "result" in state else None)
        for fragment, rounds in zip(self.fragments, state.get("rounds", ()), strict=False):
            fragment.scheduler.resume(rounds)
        for fragment, samples in zip(self.fragments, state.get("samples", ()), strict=False):
            fragment.seen = self.samples - samples
        kept: keeping.Kept = state.get("kept", {})
        taken: keeping.Kept = {}
        for fragment in self.fragments:
            mine = keeping.fitting(fragment.scheduler, fragment.names, kept, much, fragment.of_hosts)
            keeping.restore(fragment.scheduler, fragment.names, mine)
            taken |= mine
        result, before = state.get("result", {}), state.get("before", {})
        for fragment in self.fragments:
            if has_result and result and set(fragment.names) == set(result):
                for name, place in zip(fragment.names, fragment.places, strict=True):
                    place.copy_(result[name])
                fragment.before = [before[name].clone() for name in fragment.names] if before else []
                self._flying, self._landed = fragment, True
        return taken

    def totals(self) -> tuple[float, float]:
        """Seconds of communication, and seconds that were waited for."""
        totals = [fragment.scheduler.totals() for fragment in self.fragments]
        communication, exposed = self._past
        return communication + sum(each[1] for each in totals), exposed + sum(each[2] for each in totals)

    def coded(self) -> Coded:
        """What encoding has done."""
        counts = [*self._coded, *(fragment.scheduler.coded() for fragment in self.fragments)]
        counts += [] if self.survivors is None else [self.survivors.coded()]
        plain, coded, bad, errors, seconds = zip(*counts, strict=True)
        return sum(plain), sum(coded), sum(bad), max(errors), sum(seconds)

    def remove(self) -> None:
        """Lets go of everything. What is under way is ended, or it would fail for others too, and not applied."""
        if self._flying is not None and not self._landed:
            with contextlib.suppress(OffbeatError):
                self._flying.land(self.step, self.algorithm)
        if self.survivors is not None:
            self.survivors.remove()
        self._forget()

    def _forget(self) -> None:
        for fragment in self.fragments:
            trace.names.pop(fragment.number, None)
        self.fragments, self._flying = [], None
