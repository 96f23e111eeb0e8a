"""Hosts as network namespaces, joined by emulated cables: right sums, cut cables, killed ranks."""

import time

import pytest
from support import told

pytestmark = pytest.mark.slow


def test_two_hosts_with_two_ranks(netlab):
    def script():
        import torch
        from support import bits, same_everywhere, tell

        import offbeat

        offbeat.init(timeout=60.0)
        me, world = offbeat.rank(), offbeat.world_size()
        assert (world, offbeat.local_size(), offbeat.local_rank()) == (4, 2, me % 2)
        kinds = {link["rank"]: link["kind"] for link in offbeat.runtime.current().links()}
        assert kinds[me ^ 1] == "shared memory"
        assert kinds[me ^ 2] == kinds[me ^ 3] == "tcp"
        addresses = [link["remote"] for link in offbeat.runtime.current().links() if link["kind"] == "tcp"]
        assert all(address.startswith("10.77.0.") for address in addresses), addresses

        def noise(rank, count):
            return torch.randn(count, generator=torch.Generator().manual_seed(rank))

        for count in (1, 1000, 20_000, 500_000):
            want = (noise(0, count) + noise(1, count)) + (noise(2, count) + noise(3, count))
            for tensor in noise(me, count), offbeat.shared_empty(count).copy_(noise(me, count)):
                offbeat.all_reduce(tensor)
                assert bits(tensor) == bits(want), count
            half = noise(me, count)
            offbeat.all_reduce(half, codec="bfloat16")
            assert same_everywhere(half)
            parts = offbeat.all_gather(torch.full((count + me,), me))
            assert [(len(part), int(part[-1])) for part in parts] == [(count + rank, rank) for rank in range(4)]
            tensor = torch.full((count,), me)
            offbeat.broadcast(tensor, 3)
            assert int(tensor.min()) == int(tensor.max()) == 3
            mine = offbeat.reduce_scatter([torch.full((count,), rank) for rank in range(4)])
            assert int(mine.min()) == int(mine.max()) == 4 * me
            parts = offbeat.all_to_all([torch.full((count,), 10 * me + rank) for rank in range(4)])
            assert [int(part[0]) for part in parts] == [10 * rank + me for rank in range(4)]
        tell(right=True)
        offbeat.shutdown()

    job = netlab(script, hosts=2, ranks=2, delay="1ms", timeout=100)
    assert all(told(rank) == [{"right": True}] for rank in job.ranks)


def blocked_until_it_fails():
    """All ranks reduce until something happens to the network; they tell what they see."""
    import os
    import time

    import torch
    from support import note_time, report, tell

    import offbeat

    offbeat.init()
    note_time(f"joined{offbeat.rank()}")
    tell(pid=os.getpid())

    def reduce_for_ever():
        while True:
            globals()["last"] = time.monotonic()
            offbeat.all_reduce(torch.ones(10_000))
            time.sleep(0.01)

    report(reduce_for_ever)
    tell(blocked=time.monotonic() - globals()["last"])


def test_a_cut_cable_is_noticed_within_the_timeout(netlab):
    options = ["--cut", "14s:1"]
    job = netlab(blocked_until_it_fails, hosts=2, ranks=2, options=options, env={"OFFBEAT_TIMEOUT": "4"}, check=False)
    for rank in job.ranks:
        _, error, took = told(rank)
        others = (2, 3) if rank.rank < 2 else (0, 1)
        assert error["kind"] in ("PeerLost", "Timeout"), error
        assert any(f"rank {other} (host" in error["message"] for other in others), error
        assert took["blocked"] < 4 + 3, took


def test_a_killed_rank_on_another_host(netlab):
    began = time.monotonic()
    job = netlab(blocked_until_it_fails, hosts=2, ranks=2, options=["--kill", "14s:3"], check=False)
    assert time.monotonic() - began < 60
    pid = told(job.ranks[3])[0]["pid"]
    for rank in job.ranks[:3]:
        _, error, took = told(rank)
        assert error["kind"] == "PeerLost", error
        assert error["rank"] == 3
        assert f"pid {pid}" in error["message"]
        assert took["blocked"] < 2.0, took
