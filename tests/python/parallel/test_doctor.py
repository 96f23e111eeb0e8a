"""`offbeat doctor` under a launcher: how ranks reach each other, and why so."""

import json

import pytest


def script():
    import runpy

    runpy.run_module("offbeat", run_name="__main__")  # python -m offbeat


def doctor(ranks, world, **options):
    return ranks(script, world, args=["doctor", "--json"], check=False, **options)


def test_shared_memory_with_its_reason(ranks):
    job = doctor(ranks, 3)
    assert [rank.code for rank in job.ranks] == [0, 0, 0], job.report()
    assert [rank.out for rank in job.ranks[1:]] == ["", ""]  # one table is enough
    report = json.loads(job.ranks[0].out)
    assert [row["rank"] for row in report["ranks"]] == [0, 1, 2]
    assert [row["pid"] for row in report["ranks"]] == [process.pid for process in job.processes]
    assert len({row["host"] for row in report["ranks"]}) == 1
    assert sorted((link["from"], link["to"]) for link in report["links"]) == [
        (a, b) for a in range(3) for b in range(3) if a != b
    ]
    for link in report["links"]:
        assert link["kind"] == "shared memory"
        assert "proven" in link["why"]
    assert report["missing"] == []
    assert report["error"] is None


@pytest.mark.parametrize("off", [{0, 1, 2}, {1}], ids=["everywhere", "on one rank"])
def test_without_shared_memory_links_say_why(ranks, off):
    job = doctor(ranks, 3, per_rank=lambda rank: {"OFFBEAT_SHM": "0" if rank in off else "1"})
    report = json.loads(job.ranks[0].out)
    for link in report["links"]:
        assert link["kind"] == "tcp"
        assert "no shared memory" in link["why"]
        assert "shared memory is faster" in link["try"]
        assert link["local"].rpartition(":")[0] == link["remote"].rpartition(":")[0] == "127.0.0.1"
        assert link["streams"] >= 1
    assert any("OFFBEAT_SHM=0" in link["why"] for link in report["links"])
    assert any("OFFBEAT_SHM=0" in text for text in report["missing"])
    assert job.ranks[0].code == 1


def test_hosts_of_their_own(ranks):
    job = doctor(ranks, 2, per_rank=lambda rank: {"OFFBEAT_HOST": f"h{rank}"})
    report = json.loads(job.ranks[0].out)
    assert [row["host"] for row in report["ranks"]] == ["h0", "h1"]
    assert {(link["kind"], link["why"], link["try"]) for link in report["links"]} == {("tcp", "another host", "")}
    assert job.code == 0


def test_a_world_that_cannot_be_joined(ranks):
    job = doctor(ranks, 1, env={"OFFBEAT_CONNECT_TIMEOUT": "1.5"}, per_rank=lambda rank: {"WORLD_SIZE": "2"})
    report = json.loads(job.ranks[0].out)
    assert report["error"].startswith("Timeout: ")
    assert report["error"] in report["missing"][-1]
    assert job.code == 1


def test_under_torchrun(torchrun):
    job = torchrun(script, 2, args=["doctor"], env={"OFFBEAT_TOKEN": "very secret"})
    table = job.ranks[0].out
    for words in ("versions", "machine", "environment", "ranks", "links", "shared memory", "nothing is missing"):
        assert words in table, table
    assert "0 → 1" in table
    assert "very secret" not in table
