"""Whoever connects without the token is logged and dropped, and the job goes on with right results."""

import contextlib
import os
import socket
import time
from pathlib import Path

import pytest

GARBAGE = {
    "nothing": b"",
    "one byte": b"\x00",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(5000),
    "ones": b"\xff" * 5000,
    "TLS": bytes.fromhex("1603010200010001fc0303") + os.urandom(500),
    "huge length": b"offbeat\x00" + b"\xff" * 8 + os.urandom(200),
    "noise": os.urandom(100_000),
}


def script():
    """Collectives until the test says that it is enough, then a last one."""
    from pathlib import Path

    import torch
    from support import note_time

    import offbeat

    offbeat.init(timeout=30.0)
    me, world = offbeat.rank(), offbeat.world_size()
    shared = offbeat.shared_empty(5000)
    note_time(f"ready{me}")
    rounds, more = 0, True
    while more:
        for tensor in torch.full((3000,), float(me)), shared.fill_(float(me)):
            offbeat.all_reduce(tensor)
            assert bool((tensor == sum(range(world))).all())
        assert [int(part[0]) for part in offbeat.all_gather(torch.full((20_000,), me))] == list(range(world))
        rounds += 1
        more = offbeat.broadcast_object(not Path("enough").exists())
    print(rounds)
    offbeat.shutdown()


def inodes(pid):
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def tcp_ports(pid):
    """Ports on which a process listens."""
    mine, ports = inodes(pid), set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in mine:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def abstract_names(pid):
    """Abstract Unix sockets on which a process listens."""
    mine, names = inodes(pid), set()
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[6] in mine and fields[7].startswith("@") and int(fields[3], 16) & 0x10000:
            names.add(fields[7])
    return names


def connect(door):
    if isinstance(door, int):
        return socket.create_connection(("127.0.0.1", door), timeout=5)
    unix = socket.socket(socket.AF_UNIX)
    try:
        unix.settimeout(5)
        unix.connect("\0" + door[1:])
    except OSError:
        unix.close()
        raise
    return unix


@pytest.mark.parametrize("where", ["one host", "own hosts"])
def test_strangers_are_dropped_and_the_job_goes_on(ranks, where):
    per_rank = (lambda rank: {"OFFBEAT_HOST": f"h{rank}"}) if where == "own hosts" else (lambda rank: {})
    job = ranks.start(script, 3, per_rank=per_rank)
    store = int(job.env.get("MASTER_PORT", 0))
    deadline = time.monotonic() + 30
    while not all((job.directory / f"ready{rank}").exists() for rank in range(3)):
        assert time.monotonic() < deadline, job.report()
        time.sleep(0.01)
    held, visited = [], 0
    for process in job.processes:
        # rank 0 also hosts torch's store, which is not ours to defend: its port is fixed, ours are ephemeral
        ports = {port for port in tcp_ports(process.pid) if port >= 30_000 and port != store}
        doors = [*ports, *abstract_names(process.pid)]
        assert len(doors) == 2, (doors, job.report())
        for door in doors:
            for data in GARBAGE.values():
                visited += 1
                with connect(door) as stranger, contextlib.suppress(OSError):
                    stranger.sendall(data)
                    stranger.shutdown(socket.SHUT_WR)
                    stranger.settimeout(5)
                    assert len(stranger.recv(1 << 16)) < 256  # it learns next to nothing
            for data in (b"", b"\x00" * 3, b"o"):
                holder = connect(door)  # and never goes away by itself
                holder.sendall(data)
                held.append(holder)
            for _ in range(50):
                connect(door).close()
    (job.directory / "enough").touch()
    job.wait(60)
    for holder in held:
        holder.close()
    assert all(int(rank.out) > 0 for rank in job.ranks)
    for rank in job.ranks:
        assert "dropped a connection from" in rank.err, rank.err
        assert "127.0.0.1" in rank.err
        assert "panicked" not in rank.err
        assert "Traceback" not in rank.err


def test_strangers_while_ranks_link(ranks):
    """A port scanner that finds a door before the peers have come through it."""

    def late(rank):
        return {"LATE": "1"} if rank == 1 else {}

    def script():
        import os
        import time

        import torch
        from support import note_time

        import offbeat

        if os.environ.get("LATE"):
            note_time("waits")
            time.sleep(1.5)
        offbeat.init(connect_timeout=30.0)
        tensor = torch.ones(10)
        offbeat.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 10
        offbeat.shutdown()

    job = ranks.start(script, 3, per_rank=late)
    visits = 0
    while any(process.poll() is None for process in job.processes):
        for process in job.processes:
            with contextlib.suppress(OSError):
                for door in [
                    *(port for port in tcp_ports(process.pid) if port >= 30_000),
                    *abstract_names(process.pid),
                ]:
                    with connect(door) as stranger:
                        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
                        visits += 1
        time.sleep(0.005)
    job.wait(30)
