"""When ranks make different calls: what each is told, and that nobody hangs."""

import json

import pytest
from support import PLACES, place, told

# What ranks 0 and 2 call, what rank 1 calls, and what the diff must show of both.
MISMATCHES = {
    "shapes": ("all_reduce(ones(2))", "all_reduce(ones(3))", "float32[2]|float32[3]"),
    "large shapes": ("all_reduce(ones(100_000))", "all_reduce(ones(100_001))", "float32[100000]|float32[100001]"),
    "dimensions": ("all_reduce(ones(6))", "all_reduce(ones(2, 3))", "float32[6]|float32[2, 3]"),
    "nine dimensions": ("all_reduce(ones(*[1] * 8, 2))", "all_reduce(ones(*[1] * 8, 3))", "2]|3]"),
    "empty": ("all_reduce(ones(0))", "all_reduce(ones(1))", "float32[0]|float32[1]"),
    "memory": ("all_reduce(ones(2))", "all_reduce(shared_empty(3))", "float32[2]|float32[3]"),
    "types": ("all_reduce(ones(2))", "all_reduce(ones(2).int())", "float32[2]|int32[2]"),
    "ops": ("all_reduce(ones(2), 'sum')", "all_reduce(ones(2), 'max')", "sum|max"),
    "codecs": ("all_reduce(ones(2), codec='float16')", "all_reduce(ones(2))", "codec"),
    "order": ("all_reduce(ones(2))", "barrier()", "all_reduce(float32[2], sum)|barrier()"),
    "kinds": ("all_gather(ones(2))", "all_to_all([ones(2)] * 3)", "all_gather|all_to_all"),
    "sources": ("broadcast(ones(2), 0)", "broadcast(ones(2), 1)", "rank 0)|rank 1)"),
    "destinations": ("reduce(ones(2), 0)", "reduce(ones(2), 1)", "rank 0)|rank 1)"),
    "gatherers": ("gather(ones(2), 2)", "gather(ones(2), 1)", "rank 2)|rank 1)"),
    "gathered columns": ("all_gather(ones(2, 1))", "all_gather(ones(5, 2))", "float32[*, 1]|float32[*, 2]"),
    "gathered types": ("all_gather(ones(2))", "all_gather(ones(2).double())", "float32[*]|float64[*]"),
    "lists": ("reduce_scatter([ones(1)] * 3)", "reduce_scatter([ones(2)] * 3)", "float32[1]|float32[2]"),
    "later in a list": (
        "reduce_scatter([ones(1), ones(1), ones(1)])",
        "reduce_scatter([ones(1), ones(1), ones(2)])",
        "reduce_scatter(float32[1]",
    ),
    "swapped types": ("all_to_all([ones(1)] * 3)", "all_to_all([ones(1).int()] * 3)", "float32|int32"),
}


@pytest.mark.parametrize("where", PLACES)
def test_different_calls_give_a_diff_on_every_rank(ranks, where):
    """Each pair of calls has a group of its own, which it poisons; the world stays usable."""

    def script():
        import functools
        import json
        import sys

        import torch
        from support import report, tell

        import offbeat

        collectives = [
            "all_reduce",
            "reduce",
            "broadcast",
            "all_gather",
            "gather",
            "scatter",
            "reduce_scatter",
            "all_to_all",
            "barrier",
        ]
        offbeat.init(timeout=20.0)
        for name, calls in json.loads(sys.argv[1]).items():
            group = offbeat.Group([0, 1, 2])
            names = {name: functools.partial(getattr(offbeat, name), group=group) for name in collectives}
            names |= {"ones": torch.ones, "shared_empty": offbeat.shared_empty}
            tell(name=name)
            report(eval, calls[offbeat.rank() == 1], names)
            report(offbeat.barrier, group=group)
        tensor = torch.ones(2)
        offbeat.all_reduce(tensor)
        assert tensor.tolist() == [3.0, 3.0]
        offbeat.shutdown()

    calls = {name: (usual, other) for name, (usual, other, _) in MISMATCHES.items()}
    job = place(ranks, where, script, 3, args=[json.dumps(calls)])
    for rank in job.ranks:
        lines = told(rank)
        assert [line["name"] for line in lines[::3]] == list(MISMATCHES)
        for name, first, second in zip(MISMATCHES, lines[1::3], lines[2::3], strict=True):
            words = ["rank 1 (host", *MISMATCHES[name][2].split("|"), "try:"]
            assert second["kind"] == "Mismatch", (name, second)
            assert all(word in second["message"] for word in words), (name, words, second["message"])
            assert first["kind"] == "Mismatch", (name, first)
            assert first["message"] == second["message"], name


@pytest.mark.parametrize("where", PLACES)
def test_a_scattered_tensor_that_does_not_fit_is_a_mismatch(ranks, where):
    def script():
        import torch
        from support import report

        import offbeat

        offbeat.init(timeout=20.0)
        me = offbeat.rank()
        report(offbeat.scatter, [torch.ones(2)] * 3 if me == 0 else None, 0, torch.ones(3 if me == 1 else 2))
        report(offbeat.barrier)

    job = place(ranks, where, script, 3)
    for rank in job.ranks:
        first, second = told(rank)
        # only the receiver sees it at once
        assert rank.rank != 1 or first["kind"] == "Mismatch", first
        assert second["kind"] == "Mismatch", second
        assert "float32[2] to rank 1, whose out is float32[3]" in second["message"]


@pytest.mark.parametrize("where", PLACES)
def test_different_groups_are_a_mismatch(ranks, where):
    def script():
        from support import report

        import offbeat

        offbeat.init(timeout=20.0)
        report(offbeat.Group, [0, 1] if offbeat.rank() == 0 else [1, 2])

    job = place(ranks, where, script, 3)
    for rank in job.ranks:
        (error,) = told(rank)
        assert error["kind"] == "Mismatch", error
        assert "[0, 1]" in error["message"]
        assert "[1, 2]" in error["message"]


@pytest.mark.parametrize("where", PLACES)
def test_messages_that_do_not_fit_are_a_mismatch(ranks, where):
    def script():
        import torch
        from support import report

        import offbeat

        offbeat.init(timeout=20.0)
        for theirs, mine in (((3,), (4,)), ((100_000,), (100_001,)), ((3,), (3, 1))):
            if offbeat.rank() == 0:
                report(offbeat.send, torch.ones(theirs), 1)
            else:
                report(offbeat.recv, torch.ones(mine), 0)
        offbeat.barrier()  # the collectives are not touched by it

    job = place(ranks, where, script, 2)
    for error in told(job.ranks[1]):
        assert error["kind"] == "Mismatch", error
        assert "try:" in error["message"]
