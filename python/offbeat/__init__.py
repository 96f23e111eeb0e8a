"""Offbeat trains PyTorch models data-parallel where the network is the slow part.

    import offbeat

    offbeat.init()  # torchrun's environment; a world of one without it
    optimizer = offbeat.DistributedOptimizer(optimizer, model)  # the same object, now trained on all ranks

- training: `DistributedOptimizer`, or `DataParallel` in the shape of torch's DDP; `consolidate` for one model of
  replicas that differ
- what is sent, and when: `algorithms`, also by name (`algorithm="bytegrad"`); your own out of `steps` and `codecs`
- the world: `init`, `shutdown`, `rank`, `world_size`, `local_rank`, `local_size`, `host`
- collectives: `all_reduce` and others, on all ranks or in a `Group`; a `Handle` with `async_op=True`; `shared_empty`
  for tensors that need no copy on a host
- when something is slow or wrong: `stats`, `trace.save`, `errors`, and the command `offbeat doctor`
"""

from . import algorithms, codecs, errors, steps, trace
from ._core import __version__
from .algorithms import Algorithm
from .collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from .consolidation import consolidate
from .errors import OffbeatError
from .group import Group
from .handle import Handle
from .memory import shared_empty
from .objects import all_gather_object, broadcast_object
from .optimizer import DistributedOptimizer
from .parallel import DataParallel
from .runtime import host, init, is_initialized, local_rank, local_size, rank, shutdown, stats, world_size

__all__ = [
    "Algorithm",
    "DataParallel",
    "DistributedOptimizer",
    "Group",
    "Handle",
    "OffbeatError",
    "__version__",
    "algorithms",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "codecs",
    "consolidate",
    "errors",
    "gather",
    "host",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "shared_empty",
    "shutdown",
    "stats",
    "steps",
    "trace",
    "world_size",
]
