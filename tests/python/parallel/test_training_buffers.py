"""Buffers travel as in DDP, and only in training: evaluation on one rank alone waits for nobody."""

from support import told


def test_buffers_travel_before_a_forward_in_training(ranks):
    """The bits of DDP at the beginning of each forward, on each rank; also integers, bools, and None."""

    def script():
        import torch
        import torch.distributed as dist
        from support import bits, tell
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        import offbeat

        dist.init_process_group("gloo")
        offbeat.init()
        me = offbeat.rank()

        class Counting(nn.Module):
            def __init__(self, first):
                super().__init__()
                torch.manual_seed(me)
                self.layer = nn.Linear(4, 3)
                self.norm = nn.BatchNorm1d(3)
                self.register_buffer("seen", torch.tensor([first, 10]))
                self.register_buffer("flags", torch.tensor([bool(first), True, False]))
                self.register_buffer("hidden", torch.full((2, 2), float(first), dtype=torch.float64), persistent=False)
                self.register_buffer("nothing", None)
                self.found = []

            def forward(self, inputs):
                if self.training and torch.is_grad_enabled():
                    self.found.append([bits(buffer).hex() for buffer in self.buffers()])
                self.seen += me + 1
                self.hidden *= 1.5
                self.flags = self.flags.logical_not()
                return self.norm(self.layer(inputs)).pow(2).sum()

        def inputs(step):
            return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + me))

        for broadcasts in (True, False):
            found = {}
            for way in ("ddp", "ours", "DataParallel"):
                if way == "ours" and not broadcasts:
                    continue
                # DDP leaves buffers alone when it does not broadcast them, also at the beginning
                model = Counting(first=me if broadcasts else 1)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                wrapped = holder = model
                if way == "ddp":
                    wrapped = holder = DistributedDataParallel(model, broadcast_buffers=broadcasts)
                elif way == "ours":
                    holder = offbeat.DistributedOptimizer(optimizer, model)
                else:
                    wrapped = holder = offbeat.DataParallel(model, broadcast_buffers=broadcasts)
                for step in range(6):
                    optimizer.zero_grad()
                    with holder.no_sync():  # not again in the same accumulation
                        wrapped(inputs(step)).backward()
                    wrapped(inputs(step + 50)).backward()
                    optimizer.step()
                found[way] = [model.found, [bits(tensor).hex() for tensor in model.state_dict().values()]]
            tell(broadcasts=broadcasts, found=found)
        offbeat.shutdown()
        dist.destroy_process_group()

    job = ranks(script, 2)
    one, other = (told(rank) for rank in job.ranks)
    for mine, theirs in zip(one, other, strict=True):
        for case in (mine, theirs):
            for way, result in case["found"].items():
                assert result == case["found"]["ddp"], (case["broadcasts"], way)
        at_first, in_second = mine["found"]["ddp"][0][::2], mine["found"]["ddp"][0][1::2]
        assert (at_first == theirs["found"]["ddp"][0][::2]) == mine["broadcasts"]
        assert in_second != theirs["found"]["ddp"][0][1::2]


def test_evaluation_on_one_rank_alone(ranks):
    """In eval mode, without gradients, for the inputs' gradient, or in no_sync(): nobody waits, nothing changes."""

    def script():
        import torch
        from support import digest, gradients_of, loss_of, make_batch, make_model, make_optimizer, tell, train

        import offbeat

        offbeat.init(timeout=20.0, first_step_timeout=20.0)
        me = offbeat.rank()
        for way in ("DistributedOptimizer", "DataParallel"):
            found = {}
            for evaluates in (False, True):
                model = make_model("cnn")
                optimizer = make_optimizer("sgd", model)
                wrapped, holder = model, optimizer
                if way == "DataParallel":
                    wrapped = holder = offbeat.DataParallel(model, optimizer)
                else:
                    offbeat.DistributedOptimizer(optimizer, model)

                def look(model=model, wrapped=wrapped, holder=holder, optimizer=optimizer):
                    before = digest(model)
                    wrapped.eval()
                    results = [float(loss_of(wrapped, make_batch("cnn", 5, 0)))]  # with gradients enabled
                    with torch.no_grad():
                        results += [float(loss_of(wrapped, make_batch("cnn", 5, step))) for step in range(3)]
                    with torch.inference_mode():
                        wrapped(make_batch("cnn", 5, 4)[0])
                    image, label = make_batch("cnn", 5, 5)
                    image.requires_grad_()
                    (sensitivity,) = torch.autograd.grad(loss_of(wrapped, (image, label)), image)
                    assert float(sensitivity.abs().sum()) > 0
                    optimizer.zero_grad()
                    with holder.no_sync():
                        loss_of(wrapped, make_batch("cnn", 5, 6)).backward()
                    want = gradients_of(model, loss_of(wrapped, make_batch("cnn", 5, 6)))
                    for name, parameter in model.named_parameters():
                        assert torch.equal(parameter.grad, want[name]), name
                    optimizer.zero_grad()
                    wrapped.train()
                    assert digest(model) == before
                    return results

                for step in range(5):
                    if evaluates and me == step % 2:  # also before the first step
                        assert look()[0] == look()[0]
                    train(wrapped, optimizer, "cnn", [step])
                found[evaluates] = digest(model)
                holder.remove()
            tell(way=way, found=[found[False], found[True]])
        offbeat.shutdown()

    job = ranks(script, 2)
    for rank in job.ranks:
        for case in told(rank):
            assert case["found"][0] == case["found"][1], case["way"]


def test_a_forward_without_gradients_in_training_mode(ranks):
    """BatchNorm learns from it on the rank that does it, rank 0's statistics count, and nobody waits."""

    def script():
        import torch
        from support import bits, make_batch, make_model, make_optimizer, same_everywhere, train

        import offbeat

        offbeat.init(timeout=20.0, first_step_timeout=20.0)
        me = offbeat.rank()
        model = make_model("cnn")
        optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model)
        seen = []
        model[1].register_forward_pre_hook(lambda module, _: seen.append(module.running_mean.clone()))
        for step in range(4):
            alone = step % 2
            if me == alone:
                with torch.no_grad():
                    for part in range(3):
                        model(make_batch("cnn", 8, 10 * step + part)[0])
            expected = offbeat.broadcast_object(bits(model[1].running_mean), src=0)
            seen.clear()
            train(model, optimizer, "cnn", [step])
            assert len(seen) == 1
            assert bits(seen[0]) == expected
            assert same_everywhere(seen[0])
        offbeat.shutdown()

    ranks(script, 2)
