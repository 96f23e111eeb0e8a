"""Traces of real ranks: frames, spans of Python's own, files of several ranks merged into one."""

import json

from support import told

from offbeat.cli import main


def reduce_and_save():
    import torch
    from support import tell

    import offbeat
    from offbeat import _core
    from offbeat.runtime import current

    offbeat.init()
    core = current()
    tensor = torch.ones(1 << 20)
    for step in range(5):
        begin = _core.now()
        offbeat.all_reduce(tensor)
        end = _core.now()
        # as the engine will record it
        core.mark("reduce", 0, step, begin, end, of=0, nbytes=tensor.nbytes)
        core.mark("wait", 0, step, begin, (begin + end) // 2)
    offbeat.trace.names[0] = ["all of it"]
    offbeat.barrier()
    path = offbeat.trace.save("traces/")
    tell(path=str(path), stats=offbeat.stats(), dropped=core.trace_dropped())
    offbeat.trace.clear()
    assert not [span for span in core.trace() if span[0] == "reduce"]
    offbeat.shutdown()


def host(rank):
    return {"OFFBEAT_HOST": "ab"[rank]}


def test_two_hosts(ranks, capsys):
    job = ranks(reduce_and_save, 2, per_rank=host, env={"OFFBEAT_METRICS": "{rank}.prom"})
    paths = []
    for rank in job.ranks:
        (said,) = told(rank)
        assert said["path"] == f"traces/rank{rank.rank}.json"
        assert said["dropped"] == 0
        (link,) = said["stats"]["links"]
        # a swap: everybody sends its 4 MiB once, with the headers of frames
        assert 5 * 4 << 20 <= link["sent"] < 5.1 * 4 * (1 << 20)
        assert said["stats"]["bytes"] == {"sent": link["sent"], "received": link["received"]}
        assert f'rank="{rank.rank}",peer="{1 - rank.rank}"' in (job.directory / f"{rank.rank}.prom").read_text()
        path = job.directory / said["path"]
        document = json.loads(path.read_text())
        about = document["otherData"]
        assert (about["rank"], about["world_size"], about["host"]) == (rank.rank, 2, "ab"[rank.rank])
        tracks = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
        peer = 1 - rank.rank
        assert {"compute", "model 0 bucket 0: all of it", f"send to {peer}", f"receive from {peer}"} <= tracks
        frames = [event for event in document["traceEvents"] if event.get("cat") in ("send", "receive")]
        for kind in ("send", "receive"):
            assert sum(event["args"]["bytes"] for event in frames if event["cat"] == kind) == 5 * 4 << 20
        reduces = [event for event in document["traceEvents"] if event.get("cat") == "reduce"]
        # what is received may come before this rank is there
        first = min(event["ts"] for event in reduces)
        assert all(first <= event["ts"] for event in frames if event["cat"] == "send")
        paths.append(path)
    output = job.directory / "merged.json"
    assert main(["trace", "merge", *map(str, paths), "-o", str(output)]) == 0
    line = capsys.readouterr().out
    assert line.startswith("5 steps, 2 ranks: ")
    assert "slowest link " in line
    assert "50 % of the communication was hidden behind compute" in line
    merged = json.loads(output.read_text())
    names = [event["args"]["name"] for event in merged["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0 (host a)", "rank 1 (host b)"]
    assert [clock["by"] for clock in merged["otherData"]["clocks"]] == ["the same clock"]


def test_clocks_of_two_hosts_are_set_by_frames(ranks, capsys):
    """One machine has one clock, so the file of rank 1 is changed as if its host had been started at another time."""
    job = ranks(reduce_and_save, 2, per_rank=host)
    first, second = (job.directory / "traces" / f"rank{rank}.json" for rank in range(2))
    document = json.loads(second.read_text())
    document["otherData"]["clock"] = "another boot"
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            event["ts"] -= 1234e6
    second.write_text(json.dumps(document))
    output = job.directory / "merged.json"
    assert main(["trace", "merge", str(first), str(second), "-o", str(output), "--json"]) == 0
    clock = json.loads(capsys.readouterr().out)["clocks"][1]
    assert clock["by"] == "frames"
    assert abs(clock["offset"] - 1234) <= clock["uncertainty"] < 0.05


def test_a_trace_after_a_failure_and_during_a_hang(ranks):
    def script():
        import os
        import signal
        import threading
        import time
        from pathlib import Path

        import torch
        from support import report

        import offbeat

        offbeat.init(timeout=60.0)
        me = offbeat.rank()
        offbeat.all_reduce(torch.ones(1 << 18))
        if me == 1:
            while not Path("handler0.json").exists():
                time.sleep(0.01)
            os._exit(1)
        # while the call below hangs: from another thread, and in a signal handler of the thread that hangs
        signal.signal(signal.SIGUSR1, lambda *_: offbeat.trace.save("handler{rank}.json"))

        def meanwhile():
            time.sleep(0.3)
            offbeat.trace.save("thread{rank}.json.gz")
            os.kill(os.getpid(), signal.SIGUSR1)

        threading.Thread(target=meanwhile).start()
        report(offbeat.all_reduce, torch.ones(1 << 18))
        offbeat.trace.save("after{rank}.json")

    job = ranks(script, 2, per_rank=host, check=False)
    assert told(job.ranks[0])[0]["kind"] == "PeerLost", job.report()
    for name in ("handler0.json", "after0.json"):
        events = json.loads((job.directory / name).read_text())["traceEvents"]
        assert any(event["ph"] == "X" for event in events)
    assert (job.directory / "thread0.json.gz").read_bytes().startswith(b"\x1f\x8b")


def test_neighbours_have_no_frames_to_show(ranks, capsys):
    job = ranks(reduce_and_save, 2, env={"OFFBEAT_HOST": "a"})
    paths = [str(job.directory / "traces" / f"rank{rank}.json") for rank in range(2)]
    assert main(["trace", "merge", *paths, "-o", str(job.directory / "merged.json")]) == 0
    assert "no link carried 1 MB" in capsys.readouterr().out


def test_where_a_trace_cannot_be_written(ranks):
    def script():
        from pathlib import Path

        from support import fails

        import offbeat
        from offbeat.errors import InvalidArgument

        offbeat.init()
        Path("file").touch()
        fails(InvalidArgument, "not 3|try:", offbeat.trace.save, 3)
        for path in ("file/", "file/trace.json", "file/deeper/trace.json"):
            fails(InvalidArgument, "cannot write file|try:", offbeat.trace.save, path)
        assert [path.name for path in Path().glob("*file*")] == ["file"]
        offbeat.shutdown()

    ranks(script, 1)
