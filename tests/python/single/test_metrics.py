"""`offbeat.stats()` and its text for Prometheus, read by a parser as strict as the format."""

import os
import re
import subprocess
import sys
import time

import pytest

from offbeat import counters, files, metrics

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"'
NUMBER = r"[+-]?(?:\d+\.?\d*(?:e[+-]?\d+)?|Inf|NaN)"


def read(text):
    """{name: (type, {labels: value})} of text in Prometheus' format; anything that it does not allow fails."""
    assert text.endswith("\n")
    found = {}
    helped = name = None
    for line in text.splitlines():
        if match := re.fullmatch(rf"# HELP ({NAME}) (\S.*)", line):
            helped = match[1]
            assert helped not in found, f"{helped} comes twice"
        elif match := re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge)", line):
            name = match[1]
            assert name == helped, "TYPE follows HELP of the same name"
            assert (match[2] == "counter") == name.endswith("_total")
            found[name] = (match[2], {})
        else:
            match = re.fullmatch(rf"({NAME})\{{({LABEL}(?:,{LABEL})*)\}} ({NUMBER})", line)
            assert match, line
            assert match[1] == name, "samples stand below their own TYPE"
            labels = re.findall(LABEL, match[2])
            assert len(dict(labels)) == len(labels), "a label comes twice"
            key = tuple(sorted((label, unescape(value)) for label, value in labels))
            assert key not in found[name][1], "a sample comes twice"
            found[name][1][key] = float(match[match.lastindex])
    assert all(samples for _, samples in found.values())
    return found


def unescape(text):
    return re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), text)


def model(number=0, **changes):
    told = {"model": number, "algorithm": "allreduce", "step": 120, "parameters": 1000, "buckets": 3}
    told |= {"bucket_bytes": 4000, "unused": ["head.weight"], "seconds": {"communication": 8.0, "exposed": 2.0}}
    return told | changes


TRAFFIC = [(0, "tcp", 10, 20), (1, "self", 0, 0), (2, "shared memory", 300, 400)]


def test_numbers_are_summed_up():
    stats = counters.assemble(1, 3, TRAFFIC, [model(), model(1, step=7, seconds={"communication": 2, "exposed": 2})])
    assert stats["seconds"] == {"communication": 10.0, "exposed": 4.0, "hidden": pytest.approx(0.6)}
    assert stats["bytes"] == {"sent": 310, "received": 420}
    assert [link["rank"] for link in stats["links"]] == [0, 2]
    assert stats["steps"] == 120


@pytest.mark.parametrize(("communication", "exposed", "hidden"), [(0.0, 0.0, None), (4.0, 9.0, 0.0), (4.0, 0.0, 1.0)])
def test_hidden_is_a_part(communication, exposed, hidden):
    part = model(seconds={"communication": communication, "exposed": exposed})
    assert counters.assemble(0, 1, [], [part])["seconds"]["hidden"] == hidden


def test_the_text():
    found = read(metrics.render(counters.assemble(1, 3, TRAFFIC, [model(), model(1, step=7)])))
    kind, samples = found["offbeat_bytes_total"]
    assert kind == "counter"
    assert samples[("direction", "sent"), ("kind", "shared memory"), ("peer", "2"), ("rank", "1")] == 300
    assert len(samples) == 4
    assert found["offbeat_steps_total"][1] == {
        (("model", "0"), ("rank", "1")): 120,
        (("model", "1"), ("rank", "1")): 7,
    }
    assert found["offbeat_communication_seconds_total"] == ("counter", {(("rank", "1"),): 16.0})
    assert found["offbeat_exposed_seconds_total"] == ("counter", {(("rank", "1"),): 4.0})
    assert found["offbeat_unused_parameters"][1][("model", "0"), ("rank", "1")] == 1


def test_the_text_of_a_rank_without_models_and_peers():
    found = read(metrics.render(counters.assemble(0, 1, [(0, "self", 0, 0)], [])))
    assert found.keys() == {
        "offbeat_info",
        "offbeat_communication_seconds_total",
        "offbeat_exposed_seconds_total",
    }


def test_labels_are_escaped():
    name = 'a "b"\\n\nc{},='
    found = read(metrics.render(counters.assemble(0, 1, [], [model(algorithm=name)])))
    ((labels, _),) = found["offbeat_model_info"][1].items()
    assert dict(labels)["algorithm"] == name


def test_models_that_are_gone_are_left_out(monkeypatch):
    class Core:
        rank, world_size = 0, 1

        def traffic(self):
            return []

    monkeypatch.setattr(counters, "models", {0: lambda: None, 1: lambda: model(1)})
    assert [part["model"] for part in counters.collect(Core())["models"]] == [1]


def test_the_file_is_rewritten_and_written_a_last_time(tmp_path):
    numbers = iter(range(1, 1000))
    path = tmp_path / "metrics.prom"
    writer = metrics.Writer(path, lambda: counters.assemble(0, 1, [], [model(step=next(numbers))]), every=0.01)

    def step():
        return read(path.read_text())["offbeat_steps_total"][1][("model", "0"), ("rank", "0")]

    deadline = time.monotonic() + 10
    while not path.exists() or step() < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    writer.stop()
    assert step() == next(numbers) - 1
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.prom"]


def test_a_file_that_cannot_be_written_is_told_once(tmp_path, caplog):
    writer = metrics.Writer(tmp_path / "nowhere" / "x", lambda: counters.assemble(0, 1, [], []), every=0.001)
    time.sleep(0.05)
    writer.stop()
    (record,) = caplog.records
    assert "cannot write metrics" in record.getMessage()


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    files.replace(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.replace(path, "new \ud800")
    path.with_name(f".file.{os.getpid()}").mkdir()
    with pytest.raises(OSError, match="file"):
        files.replace(path, "new")
    assert path.read_text() == "old"


SCRIPT = """
import threading, offbeat
offbeat.init()
print(sorted(thread.name for thread in threading.enumerate() if "offbeat" in thread.name), offbeat.stats()["links"])
{end}
"""


def run(tmp_path, target, end):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OFFBEAT_", "RANK", "WORLD"))}
    env |= {"OFFBEAT_METRICS": target} if target else {}
    command = [sys.executable, "-c", SCRIPT.format(end=end)]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("end", ["offbeat.shutdown()", ""])
def test_the_environment_switches_it_on(tmp_path, end):
    result = run(tmp_path, "metrics/offbeat-{rank}.prom", end)
    assert (result.stdout, result.stderr) == ("['offbeat-metrics'] []\n", "")
    assert "offbeat_info" in read((tmp_path / "metrics" / "offbeat-0.prom").read_text())


def test_it_is_off_by_default(tmp_path):
    result = run(tmp_path, None, "")
    assert (result.stdout, result.stderr) == ("[] []\n", "")
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for target in (".", "file/metrics"):
        result = run(tmp_path, target, "")
        assert result.returncode == 1
        assert f"InvalidArgument: OFFBEAT_METRICS='{target}'" in result.stderr
