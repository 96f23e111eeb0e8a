"""Exchanges in the background: what they compute when every step waits for one, and how they begin, pause and end."""

import json

import pytest


def forced():
    """Every step waits for its exchange; the same is computed by hand beside it."""
    import copy
    import json
    import sys

    import torch
    from torch import nn

    import offbeat

    name, options, kind = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    offbeat.init(timeout=20.0)
    rank, _world = offbeat.rank(), offbeat.world_size()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5), nn.LayerNorm(5))
    twin = copy.deepcopy(model)
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind]
    algorithm = getattr(offbeat.algorithms, name)(**options)
    optimizer = offbeat.DistributedOptimizer(make(model.parameters(), lr=0.05), model, algorithm)
    optimizer._offbeat.replica.staleness = 0
    other = make(twin.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)

    def flat(model):
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def put(values):
        at = 0
        with torch.no_grad():
            for p in twin.parameters():
                p.copy_(values[at : at + p.numel()].view(p.shape))
                at += p.numel()

    worst, spread, sums, first = 0.0, 0.0, 0.0, flat(twin)
    for _step in range(12):
        x, y = torch.randn(8, 20, generator=generator), torch.randn(8, 5, generator=generator)
        before = flat(twin)
        for m, o in ((model, optimizer), (twin, other)):
            o.zero_grad()
            nn.functional.mse_loss(m(x), y).backward()
            if o is other:
                o.step()
        stepped = offbeat.all_gather(flat(twin))
        optimizer.step()
        mine = flat(model)
        if name == "AsyncModelAverage":
            put(torch.stack(stepped).mean(0))
        elif name == "AsyncServer":
            mean = torch.stack([values - before for values in stepped]).mean(0)
            put(before + mean)
        else:
            # whoever moved to the middle with somebody: the pair is found by what came of it
            middles = [(stepped[rank] + values) / 2 for values in stepped]
            put(min(middles, key=lambda middle: float((middle - mine).abs().max())))
        worst = max(worst, float((flat(twin) - mine).abs().max()))
        rows = torch.stack(offbeat.all_gather(mine))
        sums = max(sums, float((rows.sum(0) - torch.stack(stepped).sum(0)).abs().max()))
        spread = float((rows - rows.mean(0)).norm())
        if name == "AsyncModelAverage" or (name == "AsyncServer" and "codec" not in options):
            assert float((rows - rows[0]).abs().max()) < 1e-6
        put(mine)
    moved = float((flat(model) - first).abs().max())
    stats = offbeat.stats()["models"][0]
    print(json.dumps({"worst": worst, "sum": sums, "spread": spread, "moved": moved, "stats": stats["background"]}))
    print(json.dumps(stats["coding"]))
    optimizer.remove()
    offbeat.shutdown()


@pytest.mark.parametrize("hosts", ["aa", "ab", "aabb", "abc"])
@pytest.mark.parametrize(
    ("name", "options", "kind", "bound"),
    [
        ("AsyncModelAverage", {}, "adam", 1e-6),
        ("AsyncModelAverage", {"codec": "minmax8"}, "sgd", 5e-3),
        ("AsyncGossip", {"seed": 3}, "adam", 1e-6),
        ("AsyncGossip", {"codec": "modular"}, "sgd", 5e-3),
        ("AsyncServer", {"staleness": 0}, "sgd", 1e-6),
        ("AsyncServer", {"staleness": 0, "codec": "minmax8"}, "sgd", 5e-3),
    ],
)
def test_forced_it_is_what_it_should_be(ranks, name, options, kind, bound, hosts):
    arguments = [name, json.dumps(options), kind]
    job = ranks(forced, len(hosts), args=arguments, per_rank=lambda rank: {"OFFBEAT_HOST": hosts[rank]})
    for rank in job.ranks:
        told, coding = (json.loads(line) for line in rank.out.splitlines())
        assert told["worst"] <= bound, told
        assert told["moved"] > 0.01, told
        assert told["stats"]["staleness"] == 0, told
        assert told["stats"]["syncs"] >= (12 if name != "AsyncGossip" or len(hosts) % 2 == 0 else 5), told
        assert (coding is not None) == ("codec" in options), coding
        if name == "AsyncGossip":
            assert told["sum"] <= 1e-5, told
        if coding is not None and coding["plain"]:
            assert coding["coded"] < coding["plain"]


def free():
    """Nobody waits: ranks train at their own pace, pause, save, and end at different times."""
    import contextlib
    import gc
    import json
    import sys
    import time
    from pathlib import Path

    import torch
    from torch import nn

    import offbeat

    name, options = sys.argv[1], json.loads(sys.argv[2])
    offbeat.init(timeout=20.0)
    rank = offbeat.rank()
    torch.manual_seed(1)
    models, optimizers = [], []
    for _ in range(2):
        model = nn.Linear(50, 20)
        algorithm = getattr(offbeat.algorithms, name)(**options)
        optimizers.append(offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model, algorithm))
        models.append(model)

    def threads(wanted):
        """How many there are, once there are as many as wanted: a thread ends a little after it was told to."""
        count = 0
        for _ in range(500):
            with contextlib.suppress(OSError):  # one that ends while it is looked at
                names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
                count = sum(name.startswith("offbeat-backgro") for name in names)
                if count == wanted:
                    break
            time.sleep(0.01)
        return count

    target = torch.randn(50, 20, generator=torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(rank)
    evaluated = 0
    for step in range(200 + 50 * rank):
        for model, optimizer in zip(models, optimizers, strict=True):
            x = torch.randn(16, 50, generator=generator)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x @ target).backward()
            optimizer.step()
        if step % 40 == 20:
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.pause()
                before = [p.clone() for p in model.parameters()]
                with torch.no_grad():
                    model.eval()
                    model(torch.ones(1, 50))
                    model.train()
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
                optimizer.resume()
            evaluated += 1
        if step == 30:
            assert optimizers[0].state_dict()["offbeat"]["step"] == 31
        time.sleep(0.002)
    rows = [stats["background"] for stats in offbeat.stats()["models"]]
    losses = [float(((m.weight.T - target) ** 2).mean()) for m in models]
    two = threads(2)
    optimizers[0].remove()
    one = threads(1)
    del optimizers, optimizer
    gc.collect()
    print(json.dumps({"rows": rows, "losses": losses, "evaluated": evaluated, "threads": [two, one, threads(0)]}))
    offbeat.shutdown()


ALGORITHMS = [
    ("AsyncModelAverage", {"period": 0.02}),
    ("AsyncModelAverage", {"period": 0.02, "codec": "minmax8", "warmup_steps": 5}),
    ("AsyncGossip", {"period": 0.01}),
    ("AsyncGossip", {"period": 0.01, "codec": "modular"}),
    ("AsyncServer", {"period": 0.01}),
    ("AsyncServer", {"period": 0.01, "codec": "minmax8"}),
    ("AsyncServer", {"staleness": 4}),
]


# a bound makes ranks wait for each other, and so cannot go with a pace of one's own
@pytest.mark.parametrize(("name", "options"), [one for one in ALGORITHMS if "staleness" not in one[1]])
def test_two_models_at_their_own_pace(ranks, name, options):
    arguments = [name, json.dumps(options)]
    job = ranks(free, 3, args=arguments, per_rank=lambda rank: {"OFFBEAT_HOST": "aab"[rank]})
    for rank in job.ranks:
        told = json.loads(rank.out)
        assert told["evaluated"] >= 5
        assert told["threads"] == [2, 1, 0], told
        assert all(row["syncs"] > 5 for row in told["rows"]), told
        assert all(loss < 0.7 for loss in told["losses"]), told
        assert "is gone" not in rank.err, rank.err


def paused():
    """Everybody pauses, long after the next round was due."""
    import re
    import sys
    import time
    from pathlib import Path

    import torch
    from torch import nn

    import offbeat

    offbeat.init(timeout=20.0)
    model = nn.Linear(50, 20)
    algorithm = getattr(offbeat.algorithms, sys.argv[1])(period=0.01)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model, algorithm)

    def train():
        optimizer.zero_grad()
        model(torch.randn(8, 50)).square().mean().backward()
        optimizer.step()

    def wakings():
        """How often the background thread went to sleep."""
        tasks = Path("/proc/self/task").iterdir()
        (thread,) = (task for task in tasks if (task / "comm").read_text().startswith("offbeat-back"))
        return int(re.search(r"\nvoluntary_ctxt_switches:\s*(\d+)", (thread / "status").read_text())[1])

    for _ in range(50):
        train()
        time.sleep(0.002)
    optimizer.pause()
    offbeat.barrier()
    time.sleep(0.3)
    before = wakings()
    time.sleep(1.0)
    rested = wakings() - before
    offbeat.barrier()
    optimizer.resume()
    syncs = offbeat.stats()["models"][-1]["syncs"]
    for _ in range(100):
        train()
        time.sleep(0.002)
    print(rested, offbeat.stats()["models"][-1]["syncs"] - syncs)
    offbeat.barrier()
    offbeat.shutdown()


@pytest.mark.parametrize("name", ["AsyncModelAverage", "AsyncGossip", "AsyncServer"])
def test_a_thread_rests_in_a_pause(ranks, name):
    job = ranks(paused, 2, args=[name], per_rank=lambda rank: {"OFFBEAT_HOST": "ab"[rank]})
    for rank in job.ranks:
        wakings, syncs = map(int, rank.out.split())
        # it looks around every 20 ms
        assert wakings < 200, rank.out
        assert syncs > 0, "exchanges go on after the pause"


@pytest.mark.parametrize(
    "wrong",
    [
        "AsyncModelAverage(period=-1)",
        "AsyncModelAverage(codec='none')",
        "AsyncModelAverage(warmup_steps=-1)",
        "AsyncGossip(peers='star')",
        "AsyncGossip(peers='all')",
        "AsyncGossip(codec='minmax8')",
        "AsyncGossip(seed=-1)",
        "AsyncServer(staleness=-1)",
        "AsyncServer(feedback=True)",
        "AsyncServer(codec='x')",
        "AsyncServer(period=float('nan'))",
    ],
)
def test_bad_input_is_refused(wrong):
    import offbeat

    with pytest.raises(offbeat.errors.InvalidArgument, match="try"):
        eval(wrong, vars(offbeat.algorithms))


def test_arguments_come_in_the_order_in_which_they_are_documented():
    from offbeat.algorithms import AsyncGossip, AsyncModelAverage, AsyncServer

    assert AsyncModelAverage(0.5, "minmax8", 3) == AsyncModelAverage(period=0.5, codec="minmax8", warmup_steps=3)
    assert AsyncGossip("exponential", 0.5, "modular") == AsyncGossip(peers="exponential", period=0.5, codec="modular")
    assert AsyncServer(4, 0.5, "minmax8", True) == AsyncServer(staleness=4, period=0.5, codec="minmax8", feedback=True)
