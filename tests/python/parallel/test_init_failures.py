"""Ranks that end while others meet or link with them: who is named, and how soon."""

import itertools

import pytest
import torch.distributed as dist
from support import told

KILLED = [*itertools.product((3, 1, 0), ("card", "attached")), (3, "hello"), (1, "hello"), (0, "gathered")]


@pytest.mark.parametrize(("dies", "after"), KILLED)
@pytest.mark.parametrize("hosts", ["one", "many"])
def test_a_rank_that_is_killed_while_ranks_link_is_named_soon(ranks, dies, after, hosts):
    """And not when the time to connect is up. The store goes with rank 0."""

    def script():
        import os
        import signal
        import sys
        import time

        from support import report, tell

        import offbeat
        from offbeat import rendezvous

        dies, after = int(sys.argv[1]), sys.argv[2]
        if int(os.environ["RANK"]) == dies:
            leave = rendezvous.Adapter.set

            def set_and_die(self, key, value):
                leave(self, key, value)
                # the first hello has no name yet: it may be that of an attempt before
                if key.startswith(after) and (after != "hello" or b" " in value):
                    os.kill(os.getpid(), signal.SIGKILL)

            rendezvous.Adapter.set = set_and_die
        tell(began=time.monotonic())
        report(offbeat.init, connect_timeout=60)

    named = {"per_rank": lambda rank: {"OFFBEAT_HOST": f"host{rank}"}} if hosts == "many" else {}
    job = ranks(script, 4, args=[dies, after], check=False, **named)
    assert [rank.code for rank in job.ranks] == [-9 if rank.rank == dies else 0 for rank in job.ranks], job.report()
    for rank in job.ranks:
        if rank.rank != dies:
            began, story = told(rank)
            assert (story["kind"], story["rank"]) == ("PeerLost", dies), story
            assert "try:" in story["message"], story
            assert story["at"] - began["began"] < 20, story


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_rank_0_that_ends_while_others_come_is_named_soon(ranks, how):
    """Where the store is torchrun's, it does not go with rank 0, and nobody would answer until the time is up."""

    def script():
        import os
        import signal
        import sys
        import time

        from support import report, tell

        import offbeat
        from offbeat import rendezvous

        if os.environ["RANK"] == "0":
            leave, answered = rendezvous.Adapter.set, []

            def set_and_end(self, key, value):
                leave(self, key, value)
                answered.extend([key] * key.startswith("answer"))
                if len(answered) == 2:
                    os.kill(os.getpid(), signal.SIGKILL if sys.argv[1] == "killed" else signal.SIGINT)

            rendezvous.Adapter.set = set_and_end
        tell(began=time.monotonic())
        report(offbeat.init, connect_timeout=60)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    job = ranks(script, 3, args=[how], check=False, per_rank=lambda rank: agents)
    for rank in job.ranks[1:]:
        began, story = told(rank)
        assert (story["kind"], story["rank"]) == ("PeerLost", 0), story
        assert "try:" in story["message"], story
        assert story["at"] - began["began"] < 20, story
