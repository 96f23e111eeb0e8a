"""Collectives of Python objects, through pickle: for settings and small results, from ranks that are trusted."""

import pickle
from typing import TypeVar

import torch
from torch import Tensor

from . import runtime
from .collectives import all_gather, broadcast
from .group import Group, member, resolve

T = TypeVar("T")


def broadcast_object(obj: T, src: int = 0, *, group: Group | None = None) -> T:
    """The object of `src`, on every rank. What the others pass is not looked at."""
    _, ranks = resolve(group)
    src = member("src", src, ranks)
    if src == runtime.rank():
        data = _pack(obj)
        broadcast(torch.tensor([data.numel()], dtype=torch.int64, device="cpu"), src, group=group)
        broadcast(data, src, group=group)
        return obj
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    broadcast(length, src, group=group)
    data = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
    broadcast(data, src, group=group)
    theirs: T = _unpack(data)
    return theirs


def all_gather_object(obj: T, *, group: Group | None = None) -> list[T]:
    """The objects of all ranks, in the order of ranks."""
    return [_unpack(data) for data in all_gather(_pack(obj), group=group)]


def _pack(obj: object) -> Tensor:
    # A bytearray, because torch warns about memory that it may not write.
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _unpack(data: Tensor) -> T:  # type: ignore[type-var]
    value: T = pickle.loads(bytes(data.numpy()))
    return value
