"""`init`: where rank, world and store come from, what is refused, and that it can be done again."""

import json
import socket

import pytest
from conftest import free_port
from support import told


def test_init_again_and_twice(ranks):
    def script():
        import torch
        from support import descriptors, fails

        import offbeat
        from offbeat.errors import InvalidArgument

        offbeat.shutdown()  # before init: nothing to do
        counts = []
        for i in range(5):
            offbeat.init()
            fails(InvalidArgument, "already|shutdown", offbeat.init)
            tensor = torch.full((1000,), float(i))
            offbeat.all_reduce(tensor)
            assert bool((tensor == 3 * i).all())
            offbeat.shared_empty(10)
            offbeat.all_reduce(tensor, async_op=True).wait()
            offbeat.shutdown()
            offbeat.shutdown()
            assert not offbeat.is_initialized()
            counts.append(len(descriptors()))
        # descriptors of the first rounds may still be closing; they must not pile up
        assert max(counts[2:]) <= counts[1] + 12, counts

    ranks(script, 3)


def test_arguments_win_over_the_environment(ranks):
    """Seen by what happens: a short timeout from either place ends a call that nobody joins."""

    def script():
        import os
        import time

        import torch
        from support import fails

        import offbeat
        from offbeat.errors import Timeout

        patient = os.environ["RANK"] == "0"
        for argument, variable in ((None, "0.5"), (0.5, "60"), (0.5, None)):
            os.environ.pop("OFFBEAT_TIMEOUT", None)
            if variable:
                os.environ["OFFBEAT_TIMEOUT"] = variable
            offbeat.init(**({} if argument is None else {"timeout": argument}))
            began = time.monotonic()
            received = False
            while patient and not received:
                try:
                    offbeat.recv(torch.ones(1), 1)
                    received = True
                except Timeout:
                    assert time.monotonic() - began < 10
            if not patient:
                fails(Timeout, "0.5 s", offbeat.recv, torch.ones(1), 0)
                assert 0.3 < time.monotonic() - began < 10
                offbeat.send(torch.ones(1), 0)
            offbeat.shutdown()

    ranks(script, 2)


def test_where_rank_and_world_come_from(ranks):
    def script():
        import json
        import os
        import sys
        from pathlib import Path

        import torch
        import torch.distributed as dist
        from support import fails

        import offbeat

        rank, world, ports = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), json.loads(sys.argv[1])

        def check():
            assert (offbeat.rank(), offbeat.world_size()) == (rank, world)
            tensor = torch.tensor([float(rank)])
            offbeat.all_reduce(tensor)
            assert tensor.item() == sum(range(world))
            offbeat.shutdown()

        offbeat.init()
        check()
        # an explicit store, with another numbering in the environment
        os.environ["RANK"] = str(world - 1 - rank)
        store = dist.TCPStore("127.0.0.1", ports[0], world, is_master=rank == 0)
        offbeat.init(store=store, rank=rank, world_size=world)
        check()
        offbeat.init(store=dist.PrefixStore("mine", store), rank=rank, world_size=world)
        check()
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
        offbeat.init(store=f"tcp://127.0.0.1:{ports[1]}", rank=rank, world_size=world)
        check()
        os.environ.update(OFFBEAT_RANK=str(rank), OFFBEAT_WORLD_SIZE=str(world))
        os.environ["OFFBEAT_STORE"] = f"file://{Path.cwd()}/store"
        offbeat.init()
        check()
        for name in ("OFFBEAT_RANK", "OFFBEAT_WORLD_SIZE", "OFFBEAT_STORE"):
            del os.environ[name]
        # torch's default group, with nothing in the environment
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[2]}", rank=rank, world_size=world)
        offbeat.init()
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        offbeat.all_reduce(tensor)
        assert tensor.tolist() == [world * world] * 2
        check()
        fails(offbeat.errors.InvalidArgument, "contradicts", offbeat.init, rank=rank, world_size=world + 1)
        dist.destroy_process_group()
        offbeat.init()  # nothing says anything: a world of one
        assert (offbeat.rank(), offbeat.world_size(), offbeat.local_size()) == (0, 1, 1)
        offbeat.shutdown()

    ranks(script, 3, args=[json.dumps([free_port() for _ in range(3)])])


WRONG = {
    "timeout=0": ({"timeout": 0}, {}, "timeout=|positive"),
    "timeout=nan": ({"timeout": float("nan")}, {}, "timeout=|finite"),
    "timeout=True": ({"timeout": True}, {}, "timeout="),
    "timeout=text": ({"timeout": "30"}, {}, "timeout="),
    "OFFBEAT_TIMEOUT=soon": ({}, {"OFFBEAT_TIMEOUT": "soon"}, "OFFBEAT_TIMEOUT='soon'|try"),
    "OFFBEAT_TIMEOUT=inf": ({}, {"OFFBEAT_TIMEOUT": "inf"}, "OFFBEAT_TIMEOUT|finite"),
    "OFFBEAT_CONNECT_TIMEOUT=-1": ({}, {"OFFBEAT_CONNECT_TIMEOUT": "-1"}, "OFFBEAT_CONNECT_TIMEOUT|positive"),
    "token=empty": ({"token": ""}, {}, "token="),
    "token=number": ({"token": 5}, {}, "token=|str or bytes"),
    "interface=empty": ({"interface": ""}, {}, "interface="),
    "interface=number": ({"interface": 5}, {}, "interface="),
    "store=dict": ({"store": {"a": 1}, "rank": 0, "world_size": 2}, {}, "torch.distributed.Store"),
    "store=unknown": ({"store": "ftp://x", "rank": 0, "world_size": 2}, {}, "ftp://x"),
    "store=with rank": ({"store": "tcp://127.0.0.1:1?rank=0", "rank": 0, "world_size": 2}, {}, "tcp://|already"),
    "rank=2 of 2": ({"rank": 2, "world_size": 2}, {}, "rank 2|world of 2"),
    "rank=-1": ({"rank": -1, "world_size": 2}, {}, "rank=|at least 0"),
    "rank=text": ({"rank": "0", "world_size": 2}, {}, "rank=|int"),
    "world_size=0": ({"rank": 0, "world_size": 0}, {}, "world_size=|at least 1"),
    "rank without world_size": ({"rank": 0}, {}, "rank|world_size"),
    "RANK without WORLD_SIZE": ({}, {"RANK": "0"}, "WORLD_SIZE|torchrun"),
    "WORLD_SIZE without RANK": ({}, {"WORLD_SIZE": "2"}, "RANK|torchrun"),
    "RANK=one": ({}, {"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
    "no MASTER_ADDR": ({}, {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT|torchrun"),
    "no MASTER_PORT": ({}, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT|torchrun"),
    "MASTER_PORT=many": (
        {},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "many"},
        "MASTER_PORT",
    ),
    "OFFBEAT_SHM=maybe": ({}, {"OFFBEAT_SHM": "maybe"}, "OFFBEAT_SHM|try"),
    "OFFBEAT_STREAMS=0": ({}, {"OFFBEAT_STREAMS": "0"}, "OFFBEAT_STREAMS|try"),
}


def test_wrong_settings_say_what_to_try(ranks):
    """All in one process: a refused `init` leaves nothing behind, and the next one works."""

    def script():
        import json
        import os
        import sys

        from support import fails

        import offbeat
        from offbeat.errors import InvalidArgument

        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        for name, (arguments, variables, words) in json.loads(sys.argv[1]).items():
            os.environ.update(variables)
            try:
                fails(InvalidArgument, words, offbeat.init, **arguments)
            except BaseException as error:
                error.add_note(f"with {name}")
                raise
            assert not offbeat.is_initialized()
            for variable in variables:
                del os.environ[variable]
        os.environ["OFFBEAT_TIMEOUT"] = ""  # empty counts as unset
        offbeat.init()
        offbeat.shutdown()

    ranks(script, 1, args=[json.dumps(WRONG)])


def test_a_profile_that_is_given_must_be_there(ranks):
    def script():
        from support import fails

        import offbeat

        fails(offbeat.errors.InvalidArgument, "x.json|profile=|offbeat tune", offbeat.init, profile="x.json")

    ranks(script, 1)


def test_calls_before_init_and_after_shutdown(ranks):
    def script():
        import torch
        from support import fails

        import offbeat
        from offbeat.errors import NotInitialized

        ones = torch.ones(2)
        calls = {
            "rank": (),
            "world_size": (),
            "local_rank": (),
            "local_size": (),
            "host": (),
            "shared_empty": (2,),
            "all_reduce": (ones,),
            "reduce": (ones, 0),
            "broadcast": (ones,),
            "all_gather": (ones,),
            "gather": (ones, 0),
            "scatter": ([ones], 0, ones),
            "reduce_scatter": ([ones],),
            "all_to_all": ([ones],),
            "send": (ones, 0),
            "recv": (ones, 0),
            "barrier": (),
            "broadcast_object": (1,),
            "all_gather_object": (1,),
            "Group": ([0],),
        }
        for _ in range(2):
            assert not offbeat.is_initialized()
            for name, args in calls.items():
                fails(NotInitialized, "offbeat.init()", getattr(offbeat, name), *args)
            offbeat.init()
            assert offbeat.is_initialized()
            offbeat.shutdown()

    ranks(script, 1)


@pytest.mark.parametrize("where", ["one host", "own hosts"])
@pytest.mark.parametrize("wrong", [0, 2])
def test_a_wrong_token_is_refused_and_all_are_told(ranks, where, wrong):
    def script():
        import time

        from support import report, tell

        import offbeat

        began = time.monotonic()
        report(offbeat.init, connect_timeout=40.0)
        tell(took=time.monotonic() - began)

    def mine(rank):
        host = {"OFFBEAT_HOST": f"h{rank}"} if where == "own hosts" else {}
        return {"OFFBEAT_TOKEN": "wrong" if rank == wrong else "right", **host}

    job = ranks(script, 3, per_rank=mine)
    for rank in job.ranks:
        error, took = told(rank)
        assert took["took"] < 15
        assert error["kind"] == "Unauthorized", error
        assert "OFFBEAT_TOKEN" in error["message"]
        assert f"rank {wrong} " in error["message"]
        assert "wrong" not in rank.out + rank.err  # a secret is never shown


def test_the_same_token_by_argument_and_environment(ranks):
    def script():
        import os

        import torch

        import offbeat

        if os.environ["RANK"] == "0":
            offbeat.init(token=b"sch\xc3\xb6n")
        else:
            offbeat.init()
        offbeat.all_reduce(torch.ones(1))
        offbeat.shutdown()

    ranks(script, 2, env={"OFFBEAT_TOKEN": "schön"}, per_rank=lambda rank: {"OFFBEAT_TOKEN": ["other", "schön"][rank]})


@pytest.mark.parametrize("host", ["rank 0", "somebody else"])
def test_ranks_that_do_not_come_are_named(ranks, host):
    """By all that have come, whoever hosts the store: rank 0, which knows, tells the others."""

    def script():
        import os
        import sys
        import time
        from datetime import timedelta

        import torch.distributed as dist
        from support import report, tell

        import offbeat

        options = {}
        if sys.argv[1] != "rank 0":
            rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
            wait = {"wait_for_workers": False, "timeout": timedelta(seconds=20)}
            options = {"store": dist.TCPStore("127.0.0.1", port, None, rank == 0, **wait), "rank": rank}
        began = time.monotonic()
        report(offbeat.init, connect_timeout=2.0, **options)
        tell(took=time.monotonic() - began)
        time.sleep(1)  # the store must outlive the last one who asks

    job = ranks(script, 2, args=[host], per_rank=lambda rank: {"WORLD_SIZE": "4"})
    for rank in job.ranks:
        error, took = told(rank)
        assert error["kind"] == "Timeout", error
        assert "2 of 4 ranks did not come within 2 s: 2, 3; try: " in error["message"], error
        assert "connect_timeout" in error["message"]
        assert 1.5 < took["took"] < 15


def test_a_store_that_is_not_there(ranks):
    """Torch's own client would take twice its time."""

    def script():
        import time

        from support import report, tell

        import offbeat

        began = time.monotonic()
        report(offbeat.init, connect_timeout=5.0)
        tell(took=time.monotonic() - began)

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = str(closed.getsockname()[1])
        mine = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": port}
        job = ranks(script, 1, per_rank=lambda rank: mine)
    error, took = told(job.ranks[0])
    assert error["kind"] == "Timeout", error
    assert f"127.0.0.1:{port}" in error["message"]
    assert "try:" in error["message"]
    assert 4.5 < took["took"] < 8, took


def test_torchrun_restarts(torchrun):
    """The second attempt meets in the same store as the first, and must not read what that left there."""

    def script():
        import os

        import torch

        import offbeat

        offbeat.init(connect_timeout=30.0)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if offbeat.rank() == 1:
                raise SystemExit("once")
            offbeat.recv(torch.ones(1), 1)
        tensor = torch.ones(1)
        offbeat.all_reduce(tensor)
        print(int(tensor.item()), os.environ["TORCHELASTIC_RESTART_COUNT"])
        offbeat.shutdown()

    job = torchrun(script, 2, max_restarts=1)
    assert [rank.out for rank in job.ranks] == ["2 1\n"] * 2
