"""`offbeat trace merge` on files."""

import gzip
import json
from pathlib import Path

import pytest
from recorded import recording, world

from offbeat import files, merge
from offbeat.cli import main


@pytest.fixture
def saved(tmp_path):
    """Files of four ranks on two hosts, one of them compressed."""
    paths = []
    for each in world("aabb", skews={"b": 5 * 10**9}):
        path = tmp_path / f"rank{each.rank}.json{'.gz' if each.rank == 1 else ''}"
        files.replace(path, json.dumps(each.document()))
        paths.append(path)
    return paths


def write(path, document):
    path.write_text(json.dumps(document))
    return path


def test_one_file_and_one_line(saved, tmp_path, capsys):
    output = tmp_path / "new" / "merged.json"
    assert main(["trace", "merge", *map(str, saved), "-o", str(output)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("50 steps, 4 ranks: ")
    assert out.count("\n") == 1
    assert err == ""
    document = json.loads(output.read_text())
    names = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0 (host a)", "rank 1 (host a)", "rank 2 (host b)", "rank 3 (host b)"]
    labels = [event["args"]["labels"] for event in document["traceEvents"] if event["name"] == "process_labels"]
    assert len(labels) == 2
    assert all(label.startswith("clock ±") for label in labels)
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 4 * 50 * 6
    assert min(event["ts"] for event in spans) == 0
    # five seconds of skew are gone: everything fits into the time that the world took
    assert max(event["ts"] + event["dur"] for event in spans) < 2e6
    assert document["otherData"]["line"] + "\n" == out


def test_json(saved, tmp_path, capsys):
    output = tmp_path / "merged.json.gz"
    assert main(["trace", "merge", *map(str, saved), "-o", str(output), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ranks"], told["steps"], told["output"]) == (4, 50, str(output))
    assert [clock["ranks"] for clock in told["clocks"]] == [[0, 1], [2, 3]]
    assert told["clocks"][1]["offset"] == pytest.approx(5, abs=2e-3)
    assert 0 < told["clocks"][1]["uncertainty"] < 3e-3
    assert json.loads(gzip.decompress(output.read_bytes()))["otherData"]["line"] == told["line"]


def refused(arguments, capsys):
    assert main(["trace", "merge", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("offbeat trace merge: ")
    assert err.count("\n") == 1
    return err


def test_bad_files_are_told(saved, tmp_path, capsys):
    output = ["-o", tmp_path / "merged.json"]
    assert "rank9.json cannot be read (No such file" in refused([tmp_path / "rank9.json", *output], capsys)
    cut = tmp_path / "cut.json"
    cut.write_text(saved[0].read_text()[:5000])
    assert "cut.json is cut off or no JSON" in refused([saved[0], cut, *output], capsys)
    cut.write_bytes(saved[1].read_bytes()[:2000])
    assert "cut.json is cut off or no JSON" in refused([cut, *output], capsys)
    cut.write_bytes(b"\x93NUMPY")
    assert "cut.json is cut off or no JSON" in refused([cut, *output], capsys)
    foreign = write(tmp_path / "foreign.json", {"traceEvents": [], "otherData": {"version": "chrome"}})
    assert "foreign.json is no trace of a rank" in refused([saved[0], foreign, *output], capsys)
    assert "both of rank 2" in refused([saved[2], saved[0], saved[2], *output], capsys)
    other = write(tmp_path / "other.json", recording(1, world_size=4, job="2e").document())
    assert "of different jobs" in refused([saved[0], other, *output], capsys)
    assert "would overwrite" in refused([saved[0], "-o", saved[0]], capsys)
    (tmp_path / "empty").mkdir()
    assert "empty has no rank*.json" in refused([tmp_path / "empty", *output], capsys)
    assert not (tmp_path / "merged.json").exists()
    assert not list(Path(tmp_path).glob(".*"))


def test_a_directory_stands_for_the_files_in_it(saved, tmp_path, capsys):
    saved[1].write_text(gzip.decompress(saved[1].read_bytes()).decode())
    saved[1].rename(tmp_path / "rank1.json")
    assert main(["trace", "merge", str(tmp_path), "-o", str(tmp_path / "merged.json")]) == 0
    assert capsys.readouterr().out.startswith("50 steps, 4 ranks: ")


def test_a_merged_file_is_not_merged_again(saved, tmp_path, capsys):
    output = tmp_path / "merged.json"
    assert merge.run(saved, output, as_json=False) == 0
    capsys.readouterr()
    assert "is merged already" in refused([output, "-o", tmp_path / "again.json"], capsys)


@pytest.mark.parametrize("arguments", [[], ["merge"], ["merge", "-o", "x"], ["merge", "rank0.json"]])
def test_what_is_missing_is_told(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(["trace", *arguments])
    assert end.value.code == 2
    assert "required" in capsys.readouterr().err
