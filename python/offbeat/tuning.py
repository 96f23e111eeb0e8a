"""Which size of buckets is best: sizes are tried one after another and judged by the time of a step.

Pure: no clock, no ranks. Ranks that are handed the same times decide alike.
"""

import math
import re
import statistics
from collections.abc import Sequence

from .errors import InvalidArgument

LEAST = 512 << 10
MOST = 64 << 20
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def candidates(total: int, preferred: int, *, least: int = LEAST, most: int = MOST) -> list[int]:
    """Sizes to try for gradients of `total` bytes: the preferred one, then powers of two.

    None of these is over twice the total: larger buckets could not hold more.
    """
    powers = [1 << bits for bits in range(least.bit_length() - 1, most.bit_length()) if least <= 1 << bits <= 2 * total]
    return [preferred, *(size for size in powers if size != preferred)]


class Tuner:
    """Tries each size for some steps, and then knows the best.

    `observe` each step's time until it gives the median of the present size, let all ranks agree on it, and hand it to
    `decide`, which gives the next size. The first size is the one to stay with: another must be faster by `margin`, and
    must be so again in a second match between the two, because the machine may have been busier during the first.

    Args:
        sizes: in bytes; the first one is preferred.
        steps: how many steps count for a size.
        skip: how many do not count after each change, when memory is new.
        passes: how often all sizes are tried; more than once where the machine is not always equally busy.
        margin: by what part of the preferred size's time another must be faster.
    """

    def __init__(
        self, sizes: Sequence[int], *, steps: int = 5, skip: int = 1, passes: int = 1, margin: float = 0.02
    ) -> None:
        if not sizes or min(sizes) < 1 or steps < 1 or skip < 0 or passes < 1:
            raise InvalidArgument(
                f"cannot try {list(sizes)} bytes for {steps} steps; try: give sizes and steps above 0"
            )
        self.sizes = list(dict.fromkeys(sizes))
        self.steps, self.skip, self.margin = steps, skip, margin
        # The size being tried, or the best when all is done.
        self.size = self.sizes[0]
        self.done = False
        # Seconds of a step by size; of several tries the fastest one, since a busy machine only ever slows down.
        self.results: dict[int, float] = {}
        self._left = (self.sizes * passes)[1:]
        # How often sizes are tried, at most.
        self.tries = len(self.sizes) * passes + (2 if len(self.sizes) > 1 else 0)
        self._second_match = False
        self._seen = 0
        self._times: list[float] = []

    @property
    def best(self) -> int:
        """The best size so far."""
        preferred = self.sizes[0]
        if preferred not in self.results:
            return preferred
        fastest = min(self.results, key=lambda size: self.results[size])
        return fastest if self.results[fastest] < (1 - self.margin) * self.results[preferred] else preferred

    @property
    def rounds(self) -> int:
        """How many steps it takes at most."""
        return self.tries * (self.skip + self.steps)

    def observe(self, seconds: float) -> float | None:
        """Takes the time of a step. Gives the median once the size was tried long enough."""
        self._seen += 1
        if self._seen > self.skip:
            self._times.append(seconds)
        return statistics.median(self._times) if len(self._times) == self.steps else None

    def decide(self, agreed: float) -> int:
        """Takes the median that all ranks agreed on. Gives the next size to try, or the best if that was the last."""
        if not agreed >= 0 or math.isinf(agreed):
            raise InvalidArgument(f"a step of {agreed} seconds; try: give the agreed median of observe()")
        self.results[self.size] = min(agreed, self.results.get(self.size, math.inf))
        return self._advance()

    def leave_out(self) -> int:
        """Does not try the present size, whose buckets would be those of another one. Gives the next as `decide`."""
        self._left = [size for size in self._left if size != self.size]
        return self._advance()

    def _advance(self) -> int:
        self._seen, self._times = 0, []
        if not self._left and not self._second_match and self.best != self.sizes[0]:
            self._second_match = True
            self._left = [self.sizes[0], self.best]
        if self._left:
            self.size = self._left.pop(0)
        else:
            self.size, self.done = self.best, True
        return self.size


def size_text(size: int) -> str:
    """A number of bytes to read: 4 MiB, 512 KiB, 1000 bytes."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size} bytes"


def parse_size(text: str) -> int:
    """A number of bytes as people write it: 262144, 256K, 256KiB, 1.5M."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?)(?:I?B)?", text.strip().upper())
    size = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not 1 <= size < 1 << 50 or size != int(size):
        raise InvalidArgument(f"{text!r} is not a size; try: 256K, 4M, or a whole number of bytes")
    return int(size)


def parse_sizes(text: str) -> list[int]:
    """Sizes with commas between them."""
    sizes = [parse_size(part) for part in text.split(",") if part.strip()]
    if not sizes:
        raise InvalidArgument(f"{text!r} names no size; try: 256K,1M,4M")
    return list(dict.fromkeys(sizes))
