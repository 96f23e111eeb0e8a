"""Nothing happens at import, and everything public is where it should be."""

import importlib.metadata
import inspect
import json
import pickle
import subprocess
import sys

import pytest

import offbeat
from offbeat import errors

NAMES = """
    init shutdown is_initialized rank world_size local_rank local_size host shared_empty all_reduce reduce broadcast
    all_gather gather scatter reduce_scatter all_to_all send recv barrier broadcast_object all_gather_object Group
    codecs errors stats trace
"""


def test_nothing_happens_at_import():
    """No thread, no change of the environment, no hook, no logging setup, no descriptor, no output."""
    code = """
import json, os, sys, threading, logging, atexit, signal
import torch, torch.distributed
from pathlib import Path
def look():
    return {
        "threads": sorted(p.name for p in Path("/proc/self/task").iterdir()),
        "environment": dict(os.environ),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "handlers": len(logging.getLogger().handlers),
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "exits": atexit._ncallbacks(),
    }
before = look()
import offbeat
after = look()
print(json.dumps([before, after]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = json.loads(result.stdout)
    assert before == after
    assert result.stderr == ""


def test_public_names_and_version():
    missing = [name for name in NAMES.split() if not hasattr(offbeat, name)]
    assert not missing
    assert set(NAMES.split()) <= set(offbeat.__all__)
    assert offbeat.__version__ == importlib.metadata.version("offbeat")
    assert {"Float16", "BFloat16"} <= set(offbeat.codecs.__all__)


def test_defaults_can_be_read_from_the_signature():
    parameters = inspect.signature(offbeat.init).parameters
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())
    defaults = {name: parameter.default for name, parameter in parameters.items() if parameter.default is not None}
    assert defaults == {"connect_timeout": 60.0, "first_step_timeout": 300.0, "timeout": 30.0}
    assert "connect_timeout: float = 60.0" in str(inspect.signature(offbeat.init))


def test_every_public_function_has_a_docstring():
    for name in NAMES.split():
        assert inspect.getdoc(getattr(offbeat, name)), name


BUILTINS = {
    "PeerLost": ConnectionError,
    "PeerFailed": RuntimeError,
    "Timeout": TimeoutError,
    "Mismatch": RuntimeError,
    "BadFrame": ConnectionError,
    "Unauthorized": PermissionError,
    "NonFinite": ArithmeticError,
    "Exhausted": RuntimeError,
    "NotInitialized": RuntimeError,
    "Unsupported": NotImplementedError,
    "InvalidArgument": ValueError,
}


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_are_of_a_family_and_can_be_pickled(name):
    kind = getattr(errors, name)
    assert issubclass(kind, offbeat.OffbeatError)
    if name != "OffbeatError":
        assert issubclass(kind, BUILTINS[name])
    of_kind = {
        "PeerLost": {"rank": 3, "host": "b"},
        "PeerFailed": {"rank": 3, "cause": "ValueError: no"},
        "Exhausted": {"ranks": [0, 2]},
    }
    fields = of_kind.get(name, {})
    error = kind("what happened; try: this", **fields)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == "what happened; try: this"
    assert {field: getattr(copy, field) for field in fields} == fields
