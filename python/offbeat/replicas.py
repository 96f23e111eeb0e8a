"""Which replica an algorithm needs."""

from typing import Unpack

from torch import Tensor, nn

from .algorithm import Algorithm
from .asynchronous import Background
from .background import BackgroundReplica
from .local_replica import LocalReplica
from .replica import Options, Replica

AnyReplica = Replica | BackgroundReplica


def make(
    model: nn.Module, named: list[tuple[str, Tensor]], algorithm: Algorithm, **options: Unpack[Options]
) -> AnyReplica:
    """A `Replica`, or what can do the same for an algorithm that works in the background."""
    if isinstance(algorithm, Background):
        return BackgroundReplica(model, named, algorithm, **options)
    kind = Replica if algorithm.sync() is None else LocalReplica
    return kind(model, named, algorithm, **options)
