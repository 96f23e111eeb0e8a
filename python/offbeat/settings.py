"""Arguments of `init`: from the call, else from OFFBEAT_<NAME>, else the default. An empty variable counts as unset."""

import math
import operator
import os
from pathlib import Path
from typing import Literal

from . import files
from .checks import is_number, is_whole
from .errors import InvalidArgument

# In this order; the last one is NCCL's own, because whoever has set it has met the problem before.
INTERFACE_VARIABLES = ("OFFBEAT_SOCKET_IFNAME", "OFFBEAT_INTERFACE", "NCCL_SOCKET_IFNAME")


class Default(float):
    """A default in a signature: shown as its number, yet told apart from the same number given by the user."""


def seconds(name: str, value: float) -> float:
    """A duration: positive and finite, since every blocking call has a deadline."""
    source, given = f"{name}=", value
    variable = f"OFFBEAT_{name.upper()}"
    text = os.environ.get(variable, "")
    if isinstance(value, Default) and text:
        source = variable
        try:
            given = float(text)
        except ValueError:
            raise InvalidArgument(
                f"{variable}={text!r} is not a number of seconds; try: {variable}={value:g}"
            ) from None
    if not is_number(given) or not math.isfinite(given) or given <= 0:
        raise InvalidArgument(f"{source} must be a positive, finite number of seconds, not {given!r}; try: 60")
    return float(given)


def whole(
    name: str,
    value: int | None,
    *,
    variables: tuple[str, ...],
    least: int,
    advice: str = "check how the job was started",
) -> int | None:
    """A whole number of at least `least`, or None where neither the call nor one of the variables says it."""
    if value is not None:
        try:
            number = operator.index(value)
        except TypeError:
            raise InvalidArgument(f"{name}= must be an int, not {value!r}; try: int({name})") from None
        source = f"{name}="
    else:
        source = next((v for v in variables if os.environ.get(v)), "")
        if not source:
            return None
        try:
            number = int(os.environ[source])
        except ValueError:
            raise InvalidArgument(
                f"{source}={os.environ[source]!r} is not a whole number; try: set it to one, or unset it"
            ) from None
    if number < least:
        raise InvalidArgument(f"{source} is {number}, but must be at least {least}; try: {advice}")
    return number


# Small enough that the last bucket, which nothing hides, is soon there; large enough to fill the wire.
BUCKET_BYTES = 8 << 20
# More than any model has, and few enough for the core's integers.
MOST_BUCKET_BYTES = 1 << 50
BucketBytes = int | Literal["auto"] | None


def bucket_bytes(value: object, profiled: int | None = None) -> int | Literal["auto"]:
    """The size of buckets: from the call, else from OFFBEAT_BUCKET_BYTES, else from the profile, else the default."""
    if value is None:
        if os.environ.get("OFFBEAT_BUCKET_BYTES", "").strip().lower() == "auto":
            return "auto"
        advice = f"OFFBEAT_BUCKET_BYTES={BUCKET_BYTES}, or unset it"
        given = whole("bucket_bytes", None, variables=("OFFBEAT_BUCKET_BYTES",), least=1, advice=advice)
        return min(given or profiled or BUCKET_BYTES, MOST_BUCKET_BYTES)
    if value == "auto":
        return "auto"
    if not is_whole(value) or value < 1:
        raise InvalidArgument(
            f'bucket_bytes={value!r} must be a positive number of bytes or "auto"; try: bucket_bytes={BUCKET_BYTES}'
        )
    return min(value, MOST_BUCKET_BYTES)


def check_every(value: object) -> int | None:
    """Once in how many steps the parameters of all ranks are compared; None for never."""
    if value is None or (is_whole(value) and value > 0):
        return value
    raise InvalidArgument(f"check_every={value!r} must be a positive number of steps; try: check_every=100, or None")


def token(value: str | bytes | None) -> bytes | None:
    """The job's secret. None lets rank 0 make one up and spread it through the store."""
    if value is None:
        value = os.environ.get("OFFBEAT_TOKEN") or None
    if value is None:
        return None
    if not isinstance(value, str | bytes):
        raise InvalidArgument(f"token= must be str or bytes, not {type(value).__name__}; try: secrets.token_hex()")
    if not value:
        raise InvalidArgument("token= is empty, which would protect nothing; try: give a secret, or leave it out")
    # surrogateescape, because that is how os.environ decoded it: all bytes come back as they were set.
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(value)


def interface(value: str | None) -> str | None:
    """Which network interfaces to use, in NCCL's grammar or as CIDR."""
    if value is None:
        value = next((os.environ[v] for v in INTERFACE_VARIABLES if os.environ.get(v)), None)
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidArgument(f'interface= must be a text, not {value!r}; try: "eth0", "^lo,docker" or "10.0.0.0/8"')
    return value


def metrics(rank: int) -> Path | None:
    """Where to write metrics, nowhere by default. Its directory is made here, where the user can read why not."""
    text = os.environ.get("OFFBEAT_METRICS") or None
    if text is None:
        return None
    path = files.for_rank(text, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        problem = "is a directory" if path.is_dir() else None
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
    if problem is not None:
        raise InvalidArgument(f"OFFBEAT_METRICS={text!r} {problem}; try: OFFBEAT_METRICS=/tmp/offbeat-{{rank}}.prom")
    return path
