"""Codecs: how numbers are encoded on the wire. `codec=` takes an instance or its name, e.g. `"bfloat16"`."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from . import _core
from .errors import InvalidArgument


@dataclass(frozen=True)
class Codec:
    """What all codecs are: a frozen description, from which the core builds the codec once."""

    name: ClassVar[str]


@dataclass(frozen=True)
class Float16(Codec):
    """Half precision: 2 bytes a number, 11 bits of mantissa, up to 65504."""

    name: ClassVar[str] = "float16"


@dataclass(frozen=True)
class BFloat16(Codec):
    """Brain float: 2 bytes a number, 8 bits of mantissa, the range of float32."""

    name: ClassVar[str] = "bfloat16"


KNOWN: dict[str, type[Codec]] = {kind.name: kind for kind in (Float16, BFloat16)}


def resolve(codec: Codec | str | None) -> _core.Codec | None:
    """The core's codec for an instance or a name."""
    if codec is None:
        return None
    if isinstance(codec, str):
        if codec not in KNOWN:
            raise InvalidArgument(f"there is no codec {codec!r}; try one of {', '.join(map(repr, KNOWN))}")
        codec = KNOWN[codec]()
    if not isinstance(codec, Codec):
        raise InvalidArgument(f"codec= must be one of offbeat.codecs or a name, not {codec!r}; try codec='bfloat16'")
    return _build(codec)


@cache
def _build(codec: Codec) -> _core.Codec:
    return _core.Codec(codec.name)


__all__ = ["BFloat16", "Codec", "Float16", "resolve"]
