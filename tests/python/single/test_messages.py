"""Every error says what to try."""

import ast
import inspect
from pathlib import Path

import offbeat
from offbeat import errors

SOURCES = sorted(Path(offbeat.__file__).parent.glob("*.py"))
ERRORS = {
    name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.OffbeatError)
}
# What these stand for says it: a story of another rank, or advice that several messages share.
SAID_BY = {"instead", "advice", "story"}


def messages():
    """(file and line, source, names in it) of each error that is made."""
    for path in SOURCES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
                names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
                yield f"{path.name}:{node.lineno}", ast.get_source_segment(text, node), names


def test_every_error_says_what_to_try():
    found = list(messages())
    assert len(found) > 100
    assert {"InvalidArgument", "Unsupported", "Timeout", "PeerLost"} <= ERRORS
    silent = [where for where, source, names in found if "try:" not in source and not names & SAID_BY]
    assert silent == []
