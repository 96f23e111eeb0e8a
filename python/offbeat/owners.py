"""Which replica exchanges the gradients of a parameter: two would do it twice."""

import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .errors import InvalidArgument

# Keeps neither parameters nor replicas alive.
_owners: MutableMapping[Tensor, weakref.ref[object]] = WeakIdKeyDictionary()


def claim(replica: object, named: Iterable[tuple[str, Tensor]]) -> None:
    """Makes the replica the owner of parameters, or raises if another one is."""
    for name, tensor in named:
        owner = _owners.get(tensor)
        if owner is None or owner() is None:
            _owners[tensor] = weakref.ref(replica)
        elif owner() is not replica:
            raise InvalidArgument(
                f"{name} is kept equal already by another wrapper; try: remove() on that one first, or wrap once"
            )


def owners(tensors: Iterable[Tensor]) -> list[Any]:
    """The replicas that own some of these."""
    found = {id(owner): owner for tensor in tensors if (known := _owners.get(tensor)) and (owner := known())}
    return list(found.values())


def release(replica: object, named: Iterable[tuple[str, Tensor]]) -> None:
    """Gives up what the replica owns of these."""
    for _, tensor in named:
        owner = _owners.get(tensor)
        if owner is not None and owner() is replica:
            del _owners[tensor]
