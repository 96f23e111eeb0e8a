"""What arguments must be like: checked where they are given, so that no training step finds out later."""

from typing import TypeGuard

from .errors import InvalidArgument


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, and no truth."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number, and no truth."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_flag(name: str, value: object) -> None:
    """Raises unless it is a truth."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name}={value!r}; try: True or False")


def check_seed(seed: object) -> None:
    """Raises unless it is one."""
    if not is_whole(seed) or not 0 <= seed < 2**64:
        raise InvalidArgument(f"seed={seed!r}; try: a whole number from 0 to 2**64 - 1")


def check_warmup(steps: object, name: str = "warmup_steps") -> None:
    """Raises unless it is a number of steps."""
    if not is_whole(steps) or not 0 <= steps < 2**63:
        raise InvalidArgument(f"{name}={steps!r}; try: a whole number from 0 on, e.g. 100")


def check_period(period: object) -> None:
    """Raises unless it is a time, or None."""
    if period is not None and not (is_number(period) and 0 <= period < 1e9):
        raise InvalidArgument(f"period={period!r}; try: a number of seconds from 0 on, e.g. 0.5, or None")


def check_hierarchical(hierarchical: object) -> None:
    """Raises unless it is a choice."""
    if not isinstance(hierarchical, bool) and not (isinstance(hierarchical, str) and hierarchical == "auto"):
        raise InvalidArgument(f'hierarchical={hierarchical!r}; try: "auto", True or False')
