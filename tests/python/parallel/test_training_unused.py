"""Parameters that a step does not use: found without a flag, named once, and right on every rank."""

from support import told

# A model whose parts can be left out of a step. In a string, because scripts are functions without a module around.
PARTS = '''
import torch
from torch import nn

class Parts(nn.Module):
    """Which of four parts are used is a matter of the step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.parts = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.never = nn.Linear(2, 2)

    def forward(self, inputs, used):
        hidden = torch.tanh(self.first(inputs))
        for part in used:
            hidden = hidden + torch.tanh(self.parts[part](hidden))
        return hidden.pow(2).mean()

def inputs(rank, step):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + rank))
'''


def test_ranks_may_use_different_parameters(ranks, tmp_path):
    """Nobody used it: None. Somebody did: the mean with zeros, on every rank. By step, in all combinations."""
    (tmp_path / "parts.py").write_text(PARTS)

    def script():
        import sys

        sys.path.insert(0, sys.argv[1])
        import torch
        from parts import Parts, inputs
        from support import check_gradients, digest, mean_gradients, noted_warnings, tell

        import offbeat

        offbeat.init()
        me, world = offbeat.rank(), offbeat.world_size()
        plan = [  # for each step the parts that each rank uses
            ([0, 1, 2], [0, 1, 2], [0, 1, 2]),  # the same everywhere
            ([0], [1], [2]),
            ([], [1, 3], [3]),
            ([], [], []),
            ([3, 2, 1, 0], [0, 1, 2, 3], [1]),  # in other orders
            ([0, 1, 2, 3],) * 3,
            ([1], [1], []),
            ([2], [2], [2]),
        ]
        for size in (100, 1 << 20):
            model = Parts()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=size)
            texts = []
            for step, used in enumerate(plan * 2):
                losses = [lambda m, r=r, s=step, u=u: m(inputs(r, s), u) for r, u in enumerate(used)]
                want = mean_gradients(model, losses)
                optimizer.zero_grad(set_to_none=step % 3 != 1)
                if step % 3 == 1:  # zeros of before stay where nobody adds to them
                    old = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.grad is not None}
                    want = old | want
                with noted_warnings() as noted:
                    model(inputs(me, step), used[me]).backward()
                texts += noted
                check_gradients(model, want, f"step {step}, buckets of {size}")
                optimizer.step()
            tell(texts=texts, digest=digest(model))
        assert world == 3
        offbeat.shutdown()

    job = ranks(script, 3, args=[tmp_path])
    for rank in job.ranks:
        small, large = told(rank)
        assert small["digest"] == large["digest"] == told(job.ranks[0])[0]["digest"]
        for case in (small, large):
            (text,) = case["texts"]  # once, with names
            assert f"on rank {rank.rank}" in text
            assert "step 0" in text
            for name in ("never.weight", "never.bias", "parts.3.weight", "parts.3.bias"):
                assert name in text
            for name in ("first.weight", "parts.0.weight"):
                assert name not in text


def test_unused_parameters_hold_the_bits_of_ddp(ranks, tmp_path):
    """DDP needs find_unused_parameters for it."""
    (tmp_path / "parts.py").write_text(PARTS)

    def script():
        import sys

        sys.path.insert(0, sys.argv[1])
        import torch.distributed as dist
        from parts import Parts, inputs
        from support import digest, make_optimizer, tell
        from torch.nn.parallel import DistributedDataParallel

        import offbeat

        dist.init_process_group("gloo")
        offbeat.init()
        me = offbeat.rank()
        found = {}
        for way in ("ddp", "ours", "DataParallel"):
            model = Parts()
            optimizer = make_optimizer("adamw", model)
            wrapped = model
            if way == "ddp":
                wrapped = DistributedDataParallel(model, find_unused_parameters=True)
            elif way == "ours":
                offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=150)
            else:
                wrapped = offbeat.DataParallel(model, bucket_bytes=150)
            for step in range(12):
                optimizer.zero_grad()
                used = [part for part in range(4) if (step + me * part) % 3]
                wrapped(inputs(me, step), used).backward()
                optimizer.step()
            found[way] = digest(model)
        tell(**found)
        offbeat.shutdown()
        dist.destroy_process_group()

    job = ranks(script, 2, args=[tmp_path])
    for rank in job.ranks:
        (found,) = told(rank)
        assert found["ours"] == found["ddp"]
        assert found["DataParallel"] == found["ddp"]
        # the names stand on standard error when nobody catches the warning
        assert "got no gradient" in rank.err
        assert "never.weight" in rank.err


def test_a_rank_that_uses_nothing_takes_part(ranks):
    """A backward through nothing of the model on one rank; outputs without a gradient; a step that all use fully."""

    def script():
        import torch
        from support import check_gradients, loss_of, make_batch, make_model, mean_gradients, noted_warnings, tell

        import offbeat

        offbeat.init()
        me = offbeat.rank()
        model = make_model("mlp")
        optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        texts = []
        for step in range(4):
            losses = [lambda m, r=rank, s=step: loss_of(m, make_batch("mlp", r, s)) for rank in range(2)]
            if step == 2:  # rank 1 uses only the last layer, on which nothing before depends
                losses[1] = lambda m: m[4](torch.ones(2, 12)).sum() + 0 * m[0].bias.sum()
            want = mean_gradients(model, losses)
            optimizer.zero_grad()
            with noted_warnings() as noted:
                losses[me](model).backward()
            texts += noted
            check_gradients(model, want, f"step {step}")
            optimizer.step()
        tell(texts=texts)
        offbeat.shutdown()

    job = ranks(script, 2)
    assert told(job.ranks[0])[0]["texts"] == []
    (text,) = told(job.ranks[1])[0]["texts"]
    assert "3 parameters got no gradient on rank 1 in step 2: 0.weight, 2.weight, 2.bias" in text
