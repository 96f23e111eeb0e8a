"""Offbeat trains PyTorch models data-parallel where the network is the slow part.

import offbeat

offbeat.init()  # torchrun's environment; a world of one without it
offbeat.all_reduce(tensor, "mean")
"""

from . import codecs, errors
from ._core import __version__
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
from .errors import OffbeatError
from .group import Group
from .handle import Handle
from .memory import shared_empty
from .objects import all_gather_object, broadcast_object
from .runtime import host, init, is_initialized, local_rank, local_size, rank, shutdown, world_size

__all__ = [
    "Group",
    "Handle",
    "OffbeatError",
    "__version__",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "codecs",
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
    "world_size",
]
