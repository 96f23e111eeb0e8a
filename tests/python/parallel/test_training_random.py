"""A long random walk through everything that users do between two steps, against a simulation of all ranks."""

import pytest


@pytest.mark.parametrize("layout", ["abb", "aaa"])
def test_a_random_walk_keeps_every_bit(ranks, layout):
    """Backwards in and out of no_sync(), other parts on each rank, clearing, freezing, evaluating, wrapping anew."""

    def script():
        import contextlib
        import copy
        import os
        import random
        import sys
        import time
        import warnings

        import torch
        from support import bits, mean_in_order, same_everywhere
        from torch import nn

        import offbeat

        warnings.simplefilter("ignore")
        offbeat.init(timeout=20.0, first_step_timeout=20.0)
        me, world = offbeat.rank(), offbeat.world_size()
        hosts = offbeat.all_gather_object(os.environ["OFFBEAT_HOST"])
        layout = [[rank for rank in range(world) if hosts[rank] == host] for host in dict.fromkeys(hosts)]

        class Parts(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.first = nn.Linear(5, 4)
                self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

            def forward(self, inputs, used):
                hidden = torch.tanh(self.first(inputs))
                for part in used:
                    hidden = hidden + torch.tanh(self.parts[part](hidden))
                    if hidden.requires_grad and random.random() < 0.05:  # another moment on each rank
                        hidden.register_hook(lambda _: time.sleep(0.002))
                return hidden.pow(2).mean()

        def loss(model, rank, number, used):
            generator = torch.Generator().manual_seed(10 * number + rank)
            return model(torch.randn(3, 5, generator=generator), used)

        def walk(seed, length):
            dice = random.Random(seed)  # the same on all ranks
            model = Parts()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=dice.choice([1, 100, 300, 10_000]))
            # what every rank should have; the values are the same on all as long as only agreed gradients are used
            twin = Parts()
            of_twin = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
            found = [dict.fromkeys(dict(twin.named_parameters())) for _ in range(world)]
            agreed, story = True, []

            def backward(number):
                """The backward of all ranks, the exchange of this one."""
                nonlocal agreed
                used = [dice.sample(range(4), dice.randint(0, 4)) for _ in range(world)]
                inside, late = dice.random() < 0.4, dice.random() < 0.3
                story.append(f"backward {number} of {used}, no_sync {inside}, backward outside {late}")
                before = [
                    {name: None if value is None else value.clone() for name, value in each.items()} for each in found
                ]
                for rank in range(world):
                    fresh = copy.deepcopy(twin)
                    for name, parameter in fresh.named_parameters():
                        parameter.grad = before[rank][name]
                    loss(fresh, rank, number, used[rank]).backward()
                    found[rank] = {name: parameter.grad for name, parameter in fresh.named_parameters()}
                with optimizer.no_sync() if inside else contextlib.nullcontext():
                    mine = loss(model, me, number, used[me])
                    if not late:
                        mine.backward()
                if late:
                    mine.backward()
                if inside:
                    agreed = False
                    return
                for name, parameter in twin.named_parameters():
                    values = [each[name] for each in found]
                    if parameter.requires_grad and any(value is not None for value in values):
                        parts = [torch.zeros_like(parameter) if value is None else value for value in values]
                        mean = mean_in_order([part.detach() for part in parts], layout)
                        for each in found:
                            each[name] = mean.clone()
                agreed = True

            def clear(none):
                nonlocal agreed
                story.append(f"zero_grad {none}")
                optimizer.zero_grad(set_to_none=none)
                for each in found:
                    for name, value in each.items():
                        each[name] = None if none or value is None else torch.zeros_like(value)
                zeros = [[name for name, value in each.items() if value is None] for each in found]
                agreed = all(names == zeros[0] for names in zeros)

            def drop_one():
                """One rank forgets a gradient, another replaces one."""
                nonlocal agreed
                rank, name = dice.randrange(world), dice.choice(list(found[0]))
                story.append(f"rank {rank} drops {name}")
                found[rank][name] = None
                if me == rank:
                    model.get_parameter(name).grad = None
                other, name = dice.randrange(world), dice.choice(list(found[0]))
                if twin.get_parameter(name).requires_grad:
                    story.append(f"rank {other} replaces {name}")
                    found[other][name] = torch.full_like(twin.get_parameter(name), 0.25)
                    if me == other:
                        model.get_parameter(name).grad = torch.full_like(model.get_parameter(name), 0.25)
                agreed = False

            def freeze():
                part = dice.choice([model.first, *model.parts])
                names = [name for name, p in model.named_parameters() if any(p is q for q in part.parameters())]
                thaws = not part.weight.requires_grad
                story.append(f"{'thaws' if thaws else 'freezes'} {names}")
                for name in names:
                    for each in (model, twin):
                        each.get_parameter(name).requires_grad_(thaws)
                        each.get_parameter(name).grad = None
                    for each in found:
                        each[name] = None

            def step():
                if agreed:
                    story.append("step")
                    for name, parameter in twin.named_parameters():
                        parameter.grad = None if found[0][name] is None else found[0][name].clone()
                    of_twin.step()
                    optimizer.step()

            def evaluate():
                alone = dice.randrange(world)
                story.append(f"rank {alone} evaluates")
                if me == alone:
                    model.eval()
                    float(loss(model, me, 9, [0, 1]))
                    model.train()
                    with torch.no_grad():
                        float(loss(model, me, 9, [2]))

            def wrap():
                size = dice.choice([1, 100, 300, 10_000])
                story.append(f"wraps with {size}")
                if dice.random() < 0.5:
                    optimizer.remove()
                offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=size)

            for number in range(length):
                if not any(p.requires_grad for p in model.parameters()) or not model.first.weight.requires_grad:
                    model.first.requires_grad_(True)  # so that there is always something to learn
                    twin.first.requires_grad_(True)
                act = dice.choices(
                    [lambda n=number: backward(n), lambda: clear(True), lambda: clear(False), drop_one, freeze, step],
                    [10, 3, 2, 1, 1, 5],
                )[0]
                act = dice.choices([act, evaluate, wrap], [30, 2, 1])[0]
                act()
                for name, parameter in model.named_parameters():
                    want = found[me][name]
                    where = f"seed {seed}, rank {me}, {name}, after:\n" + "\n".join(story[-12:])
                    assert (parameter.grad is None) == (want is None), f"{parameter.grad} and not {want}: {where}"
                    assert want is None or bits(parameter.grad) == bits(want), f"{parameter.grad} not {want}: {where}"
                    assert bits(parameter) == bits(twin.get_parameter(name)), where
            assert same_everywhere(*model.parameters())
            assert sum(line.startswith("step") for line in story) > length // 20, "hardly anything was learned"
            optimizer.remove()

        for seed in sys.argv[1:]:
            walk(int(seed), 150)
        offbeat.shutdown()

    ranks(script, 3, args=range(4), per_rank=lambda rank: {"OFFBEAT_HOST": layout[rank]})
