"""Profiles: a small JSON file that says which size of buckets was best on some machines, and how that was found out.

`offbeat tune` and `cargo bench --bench bucket_size` write them, `init` reads them.
"""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import files
from .checks import is_number, is_whole
from .errors import InvalidArgument
from .tuning import size_text

VERSION = 1
NAME = "offbeat-profile.json"


@dataclass(frozen=True)
class Profile:
    """What a profile says. `measured` holds (bytes of a bucket, seconds of a step)."""

    bucket_bytes: int
    measured: tuple[tuple[int, float], ...] = ()
    made_by: str = ""
    machine: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """A profile in use: where it was found, and by which rule."""

    path: Path
    why: str
    profile: Profile

    def __str__(self) -> str:
        return f"profile {self.path} ({self.why}): buckets of {size_text(self.profile.bucket_bytes)}"


def find(given: "str | os.PathLike[str] | None") -> Found | None:
    """The profile to use: given, from OFFBEAT_PROFILE, in the working directory, or in the user's configuration."""
    if given is not None and (not isinstance(given, str | os.PathLike) or not os.fspath(given)):
        raise InvalidArgument(f"profile= must be the path of a file, not {given!r}; try: profile={NAME!r}")
    for value, why in ((given, "profile="), (os.environ.get("OFFBEAT_PROFILE"), "OFFBEAT_PROFILE")):
        if value:
            path = Path(value).absolute()
            return Found(path, why, load(path, why))
    # os.path does not raise where there is no home directory, or none that may be read: that is no error
    configuration = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111
    for path, why in (
        (Path(NAME).absolute(), "in the working directory"),
        (Path(configuration, "offbeat", "profile.json"), "in the user's configuration"),
    ):
        if os.path.isfile(path):  # noqa: PTH113
            return Found(path, why, load(path, why))
    return None


def load(path: "str | os.PathLike[str]", why: str = "") -> Profile:
    """Reads a profile. What is wrong with it is said, with what to try."""
    where = f"the profile {os.fspath(path)}" + (f" ({why})" if why else "")
    again = "make one with `offbeat tune -- python train.py`, or leave it out"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(
            f"{where} cannot be read: {error.strerror or error}; try: another path, {again}"
        ) from None
    except ValueError as error:
        raise InvalidArgument(f"{where} is not JSON ({error}); try: {again}") from None
    if not isinstance(data, dict) or "offbeat_profile" not in data:
        raise InvalidArgument(f'{where} is no profile: it has no "offbeat_profile"; try: {again}')
    if data["offbeat_profile"] != VERSION:
        raise InvalidArgument(
            f"{where} has version {data['offbeat_profile']!r} and this Offbeat reads {VERSION}; try: update Offbeat, "
            f"{again}"
        )
    size = data.get("bucket_bytes")
    if not is_whole(size) or size < 1:
        raise InvalidArgument(
            f'{where} has "bucket_bytes": {size!r}, which must be a positive whole number; try: {again}'
        )
    measured = data.get("measured", [])
    if not isinstance(measured, list) or not all(is_measurement(pair) for pair in measured):
        raise InvalidArgument(f'{where} has a "measured" that is no list of [bytes, seconds]; try: {again}')
    made_by, machine = data.get("made_by", ""), data.get("machine", {})
    if not isinstance(made_by, str) or not isinstance(machine, dict):
        raise InvalidArgument(f'{where} has a "made_by" that is no text or a "machine" that is no object; try: {again}')
    return Profile(size, tuple((pair[0], float(pair[1])) for pair in measured), made_by, machine)


def is_measurement(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and is_whole(pair[0]) and is_number(pair[1])


def save(profile: Profile, path: "str | os.PathLike[str]") -> None:
    """Writes a profile, whole or not at all."""
    data = {
        "offbeat_profile": VERSION,
        "bucket_bytes": profile.bucket_bytes,
        "measured": [[size, round(seconds, 9)] for size, seconds in profile.measured],
        "made_by": profile.made_by,
        "machine": dict(profile.machine),
    }
    try:
        files.replace(Path(path), json.dumps(data, indent=2) + "\n")
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror or error}; try: give another path") from None


def machine() -> dict[str, object]:
    """This machine, so that a reader of the profile can tell whether it is about theirs."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "cores": os.cpu_count() or 1,
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
