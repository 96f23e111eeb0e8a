"""Arguments win over the environment, which wins over defaults; both are checked."""

import pytest

from offbeat import settings
from offbeat.errors import InvalidArgument


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in ("OFFBEAT_TIMEOUT", "OFFBEAT_TOKEN", "OFFBEAT_RANK", *settings.INTERFACE_VARIABLES):
        monkeypatch.delenv(name, raising=False)


DEFAULT = settings.Default(30.0)


@pytest.mark.parametrize(
    ("variable", "argument", "result"),
    [
        (None, DEFAULT, 30.0),
        ("7.5", DEFAULT, 7.5),
        ("", DEFAULT, 30.0),
        ("7.5", 2, 2.0),
        ("nonsense", 2.0, 2.0),
        ("7", 30.0, 30.0),
    ],
)
def test_seconds(monkeypatch, variable, argument, result):
    if variable is not None:
        monkeypatch.setenv("OFFBEAT_TIMEOUT", variable)
    assert settings.seconds("timeout", argument) == result


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5", None, True])
def test_wrong_seconds(value):
    with pytest.raises(InvalidArgument, match="timeout="):
        settings.seconds("timeout", value)


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", "1e999"])
def test_wrong_seconds_in_the_environment(monkeypatch, text):
    monkeypatch.setenv("OFFBEAT_TIMEOUT", text)
    with pytest.raises(InvalidArgument, match="OFFBEAT_TIMEOUT"):
        settings.seconds("timeout", DEFAULT)


def test_interfaces_come_from_the_first_variable_that_is_set(monkeypatch):
    assert settings.interface(None) is None
    for name in reversed(settings.INTERFACE_VARIABLES):
        monkeypatch.setenv(name, f"from {name}")
        assert settings.interface(None) == f"from {name}"
    assert settings.interface("eth0") == "eth0"


def test_tokens(monkeypatch):
    assert settings.token(None) is None
    assert settings.token(b"\xff\x00") == b"\xff\x00"
    monkeypatch.setenv("OFFBEAT_TOKEN", "schön\udcff")  # a byte that is no UTF-8, as os.environ shows it
    assert settings.token(None) == "schön".encode() + b"\xff"
    assert settings.token("other") == b"other"
    for wrong in ("", b"", 5):
        with pytest.raises(InvalidArgument, match="token="):
            settings.token(wrong)


def test_whole_numbers(monkeypatch):
    variables = ("OFFBEAT_RANK",)
    assert settings.whole("rank", None, variables=variables, least=0) is None
    monkeypatch.setenv("OFFBEAT_RANK", "3")
    assert settings.whole("rank", None, variables=variables, least=0) == 3
    assert settings.whole("rank", 1, variables=variables, least=0) == 1
    for wrong in ("x", "-1", "1.5"):
        monkeypatch.setenv("OFFBEAT_RANK", wrong)
        with pytest.raises(InvalidArgument, match="OFFBEAT_RANK"):
            settings.whole("rank", None, variables=variables, least=0)
