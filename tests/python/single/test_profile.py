"""Profiles: what is written is read again, what is wrong is said, and the nearest one counts."""

import json
import os
import subprocess
import sys

import pytest

from offbeat import profile, settings
from offbeat.errors import InvalidArgument
from offbeat.profile import Profile


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    """An empty working directory and no configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("OFFBEAT_PROFILE", raising=False)
    monkeypatch.delenv("OFFBEAT_BUCKET_BYTES", raising=False)
    return tmp_path


def test_there_and_back(tmp_path):
    made = Profile(4 << 20, ((1 << 20, 0.5), (4 << 20, 0.25)), "a test", {"cores": 2, "processor": 'the "best"'})
    profile.save(made, tmp_path / "p.json")
    assert profile.load(tmp_path / "p.json") == made
    data = json.loads((tmp_path / "p.json").read_text())
    assert data["offbeat_profile"] == 1
    assert data["measured"] == [[1 << 20, 0.5], [4 << 20, 0.25]]
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
    assert {"cores", "processor", "system"} <= set(profile.machine())


def test_only_the_size_is_needed_and_more_is_allowed(tmp_path):
    path = tmp_path / "p.json"
    path.write_text('{"offbeat_profile": 1, "bucket_bytes": 1000, "from_the_future": true}')
    assert profile.load(path) == Profile(1000)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "offbeat_profile"),
        ("{}", "offbeat_profile"),
        ('{"offbeat_profile": 2, "bucket_bytes": 1}', "version 2|update"),
        ('{"offbeat_profile": 1}', "bucket_bytes|None"),
        ('{"offbeat_profile": 1, "bucket_bytes": 0}', "bucket_bytes|positive"),
        ('{"offbeat_profile": 1, "bucket_bytes": 1.5}', "bucket_bytes|whole"),
        ('{"offbeat_profile": 1, "bucket_bytes": true}', "bucket_bytes|True"),
        ('{"offbeat_profile": 1, "bucket_bytes": "4M"}', "bucket_bytes|'4M'"),
        ('{"offbeat_profile": 1, "bucket_bytes": 1, "measured": [[1]]}', "measured|seconds"),
        ('{"offbeat_profile": 1, "bucket_bytes": 1, "measured": {}}', "measured"),
        ('{"offbeat_profile": 1, "bucket_bytes": 1, "measured": [[1, "x"]]}', "measured"),
        ('{"offbeat_profile": 1, "bucket_bytes": 1, "made_by": 5}', "made_by"),
        ('{"offbeat_profile": 1, "bucket_bytes": 1, "machine": []}', "machine"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, words):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        profile.find(path)
    for word in (str(path), "profile=", "offbeat tune", *words.split("|")):
        assert word in str(caught.value)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match="not JSON"):
        profile.load(tmp_path / "bad.json")


def test_where_it_cannot_be_written(tmp_path):
    with pytest.raises(InvalidArgument, match="cannot write"):
        profile.save(Profile(1), tmp_path / "nowhere" / "p.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidArgument, match="cannot write"):
        profile.save(Profile(1), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_nearest_one_counts(monkeypatch, tmp_path):
    assert profile.find(None) is None
    (tmp_path / "config" / "offbeat").mkdir(parents=True)
    places = [
        (tmp_path / "config" / "offbeat" / "profile.json", 1, "in the user's configuration"),
        (tmp_path / "offbeat-profile.json", 2, "in the working directory"),
        (tmp_path / "variable.json", 3, "OFFBEAT_PROFILE"),
        (tmp_path / "argument.json", 4, "profile="),
    ]
    for path, size, why in places:
        profile.save(Profile(size << 20), path)
        if why == "OFFBEAT_PROFILE":
            monkeypatch.setenv("OFFBEAT_PROFILE", "variable.json")
        found = profile.find("argument.json" if why == "profile=" else None)
        assert (found.path, found.why, found.profile.bucket_bytes) == (path, why, size << 20)
        assert str(found) == f"profile {path} ({why}): buckets of {size} MiB"


def test_what_is_given_must_be_there(monkeypatch):
    with pytest.raises(InvalidArgument, match=r"gone.json \(profile=\) cannot be read: No such file"):
        profile.find("gone.json")
    monkeypatch.setenv("OFFBEAT_PROFILE", "gone.json")
    with pytest.raises(InvalidArgument, match=r"gone.json \(OFFBEAT_PROFILE\)"):
        profile.find(None)
    monkeypatch.setenv("OFFBEAT_PROFILE", "")
    assert profile.find(None) is None
    for wrong in ("", 5, b"x"):
        with pytest.raises(InvalidArgument, match="profile="):
            profile.find(wrong)


def test_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.delenv("HOME", raising=False)
    profile.find(None)
    monkeypatch.setenv("HOME", "/proc/1/root/nobody")
    assert profile.find(None) is None


def test_the_order_of_sizes(monkeypatch):
    assert settings.bucket_bytes(None) == settings.BUCKET_BYTES
    assert settings.bucket_bytes(None, 5) == 5
    monkeypatch.setenv("OFFBEAT_BUCKET_BYTES", "6")
    assert settings.bucket_bytes(None, 5) == 6
    assert settings.bucket_bytes(7, 5) == 7
    assert settings.bucket_bytes("auto", 5) == "auto"
    for text in ("auto", " AUTO "):
        monkeypatch.setenv("OFFBEAT_BUCKET_BYTES", text)
        assert settings.bucket_bytes(None, 5) == "auto"
    for wrong in ("manual", 0, -1, 1.5, True, b"auto"):
        with pytest.raises(InvalidArgument, match="auto"):
            settings.bucket_bytes(wrong)
    monkeypatch.setenv("OFFBEAT_BUCKET_BYTES", "4M")
    with pytest.raises(InvalidArgument, match="OFFBEAT_BUCKET_BYTES"):
        settings.bucket_bytes(None)


def initialise(directory, argument="", **variables):
    """`init` in a world of one."""
    foreign = ("OFFBEAT_", "RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    code = f"""
import offbeat
from offbeat import runtime
try:
    offbeat.init({argument})
    print(runtime.profiled_bucket_bytes())
    offbeat.shutdown()
    print(runtime.profiled_bucket_bytes())
except offbeat.errors.InvalidArgument as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=env | variables, cwd=directory, capture_output=True, text=True, timeout=60, check=True
    )


def test_init_says_which_one_it_uses(tmp_path):
    quiet = initialise(tmp_path)
    assert (quiet.stdout, quiet.stderr) == ("None\nNone\n", "")
    profile.save(Profile(4 << 20), tmp_path / "offbeat-profile.json")
    found = initialise(tmp_path)
    assert found.stdout == f"{4 << 20}\nNone\n"
    assert found.stderr == (
        f"offbeat: profile {tmp_path}/offbeat-profile.json (in the working directory): buckets of 4 MiB\n"
    )
    assert "gone.json (OFFBEAT_PROFILE) cannot be read" in initialise(tmp_path, OFFBEAT_PROFILE="gone.json").stdout
    # whoever tunes must not be kept from it by a profile that is wrong
    (tmp_path / "offbeat-profile.json").write_text("?")
    assert "is not JSON" in initialise(tmp_path).stdout
    assert initialise(tmp_path, "profile='gone.json'", OFFBEAT_TUNE="x").stdout == "None\nNone\n"
