"""Codecs: how numbers are encoded on the wire. `codec=` takes an instance or its name, e.g. `"bfloat16"`.

Each states what one encoding loses at most, beside the rounding of float32 itself. Those of less than 16 bits work on
blocks of elements; a block with NaN or an infinity in it becomes NaN. docs/codecs.md has all about them.
"""

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
    """Half precision: 2 bytes a number, an error of at most 2⁻¹¹ of it, or 2⁻²⁵; over 65504 becomes infinite."""

    name: ClassVar[str] = "float16"


@dataclass(frozen=True)
class BFloat16(Codec):
    """Brain float: 2 bytes a number, an error of at most 2⁻⁸ of it, the range of float32."""

    name: ClassVar[str] = "bfloat16"


@dataclass(frozen=True)
class MinMax8(Codec):
    """256 levels from the least to the largest number of 256: 1.03 bytes a number.

    An error of at most half a level, 1/510 of the range of the block. Zero stays zero, equal numbers stay exact.
    """

    name: ClassVar[str] = "minmax8"


@dataclass(frozen=True)
class Int4(Codec):
    """15 levels around zero, up to the largest magnitude of 128 numbers: 0.53 bytes a number.

    An error of at most half a level, 1/14 of that magnitude. Zero stays zero. Wants residuals.
    """

    name: ClassVar[str] = "int4"


@dataclass(frozen=True)
class QSGD(Codec):
    """127 levels of either sign, up to the largest magnitude of 512 numbers, rounded at random: 1.01 bytes a number.

    An error of less than a level, 1/127 of that magnitude, and none in the mean, so errors of ranks and steps cancel.
    """

    name: ClassVar[str] = "qsgd"


@dataclass(frozen=True)
class OneBit(Codec):
    """The signs of 2048 numbers and their mean magnitude: 0.13 bytes a number.

    An error of at most the largest magnitude of the block. Makes sense with residuals only.
    """

    name: ClassVar[str] = "onebit"


KNOWN: dict[str, type[Codec]] = {kind.name: kind for kind in (Float16, BFloat16, MinMax8, Int4, QSGD, OneBit)}


def resolve(codec: Codec | str | None) -> _core.Codec | None:
    """The core's codec for an instance or a name."""
    if codec is None:
        return None
    if isinstance(codec, str):
        if codec not in KNOWN:
            raise InvalidArgument(f"there is no codec {codec!r}; try: one of {', '.join(map(repr, KNOWN))}")
        codec = KNOWN[codec]()
    if not isinstance(codec, Codec):
        raise InvalidArgument(f"codec= must be one of offbeat.codecs or a name, not {codec!r}; try: codec='bfloat16'")
    return _build(codec)


def name_of(codec: Codec | str | None) -> str | None:
    """What a codec is called."""
    return codec.name if isinstance(codec, Codec) else codec


@cache
def _build(codec: Codec) -> _core.Codec:
    return _core.Codec(codec.name)


__all__ = ["QSGD", "BFloat16", "Codec", "Float16", "Int4", "MinMax8", "OneBit", "resolve"]
