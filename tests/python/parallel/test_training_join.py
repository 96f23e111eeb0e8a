"""`join()`: ranks with fewer batches take part with zeros, and all end with the same model."""

import pytest
from support import told

# How many batches each rank has: also rank 0 the shortest, none at all, and all alike.
COUNTS = ["5,3,4", "1,4,3", "0,3,2", "3,3,3", "0,0,0"]


@pytest.mark.parametrize("layout", ["aaa", "aab"])
def test_ranks_with_fewer_batches(ranks, layout):
    """The bits of a simulation in one process; and training goes on from there on all ranks alike."""

    def script():
        import contextlib
        import os
        import sys

        import torch
        from support import (
            digest,
            loss_of,
            make_batch,
            make_model,
            make_optimizer,
            mean_in_order,
            same_everywhere,
            simulate,
            tell,
            train,
        )

        import offbeat

        offbeat.init(timeout=20.0, first_step_timeout=20.0)
        me = offbeat.rank()
        hosts = offbeat.all_gather_object(os.environ["OFFBEAT_HOST"])
        layout = [[rank for rank in range(3) if hosts[rank] == host] for host in dict.fromkeys(hosts)]

        def reference(choice, counts, parts):
            model = make_model("mlp")
            optimizer = make_optimizer(choice, model)
            parameters = list(model.parameters())
            for step in range(max(counts)):
                gradients = {rank: [torch.zeros_like(p) for p in parameters] for rank in range(3)}
                for rank in range(3):
                    for part in range(parts) if step < counts[rank] else ():
                        loss = loss_of(model, make_batch("mlp", rank, parts * step + part))
                        for total, new in zip(gradients[rank], torch.autograd.grad(loss, parameters), strict=True):
                            total += new
                for at, parameter in enumerate(parameters):
                    parameter.grad = mean_in_order({rank: each[at] for rank, each in gradients.items()}, layout)
                optimizer.step()
            simulate(model, optimizer, "mlp", range(100, 103), layout)
            return digest(model)

        for text in sys.argv[1:]:
            counts = [int(count) for count in text.split(",")]
            for choice, parts, warm in (("sgd", 1, False), ("adamw", 2, False), ("adamw", 1, True)):
                model = make_model("mlp")
                optimizer = make_optimizer(choice, model)
                wrapper = optimizer
                if parts == 2:
                    wrapper = offbeat.DataParallel(model, optimizer, bucket_bytes=400)
                else:
                    offbeat.DistributedOptimizer(optimizer, model, bucket_bytes=400)
                used = wrapper if parts == 2 else model
                if warm:  # buckets are final already when ranks run out; steps undone by starting from anew
                    train(used, optimizer, "mlp", range(2))
                    model.load_state_dict(make_model("mlp").state_dict())
                    optimizer.load_state_dict(make_optimizer(choice, make_model("mlp")).state_dict())
                with wrapper.join():
                    for step in range(counts[me]):
                        optimizer.zero_grad()
                        for part in range(parts):
                            with wrapper.no_sync() if part < parts - 1 else contextlib.nullcontext():
                                loss_of(used, make_batch("mlp", me, parts * step + part)).backward()
                        optimizer.step()
                equal = same_everywhere(*model.parameters())
                states = [optimizer.state.get(parameter, {}) for parameter in model.parameters()]
                equal &= same_everywhere(*(value for state in states for value in state.values()))
                train(used, optimizer, "mlp", range(100, 103))
                want = reference(choice, counts, parts)
                tell(counts=counts, choice=choice, parts=parts, warm=warm, equal=equal, found=digest(model), want=want)
                wrapper.remove()
        offbeat.shutdown()

    job = ranks(script, 3, args=COUNTS, per_rank=lambda rank: {"OFFBEAT_HOST": layout[rank]})
    for rank in job.ranks:
        cases = told(rank)
        assert len(cases) == 3 * len(COUNTS)
        for case in cases:
            assert case["equal"], case
            assert case["found"] == case["want"], case


def test_join_is_close_to_ddp(ranks):
    """With BatchNorm, whose statistics come from a rank that still works; then the same evaluation everywhere."""

    def script():
        import contextlib
        import sys

        import torch
        import torch.distributed as dist
        from support import differences, digest, loss_of, make_batch, make_model, make_optimizer, tell, train
        from torch.nn.parallel import DistributedDataParallel

        import offbeat

        dist.init_process_group("gloo")
        offbeat.init()
        for text in sys.argv[1:]:
            counts = [int(count) for count in text.split(",")]
            models, losses = {}, {}
            for way in ("ddp", "ours", "alone"):
                model = models[way] = make_model("cnn")
                optimizer = make_optimizer("sgd", model)
                wrapped, context = model, contextlib.nullcontext()
                if way == "ddp":
                    wrapped = DistributedDataParallel(model)
                    context = wrapped.join()
                elif way == "ours":
                    offbeat.DistributedOptimizer(optimizer, model)
                    context = optimizer.join()
                with context:
                    train(wrapped, optimizer, "cnn", range(counts[offbeat.rank()]))
                model.eval()
                with torch.no_grad():
                    losses[way] = float(loss_of(model, make_batch("cnn", 9, 9)))
            found = max(differences(models["ours"], models["ddp"]).values())
            apart = max(differences(models["alone"], models["ddp"]).values())
            # DDP's buffers differ between ranks at the end, ours do not
            tell(found=found, apart=apart, digest=digest(models["ours"]), loss=losses["ours"])
        offbeat.shutdown()
        dist.destroy_process_group()

    job = ranks(script, 3, args=["6,4,5", "2,6,4"])
    replicas = [told(rank) for rank in job.ranks]
    for cases in zip(*replicas, strict=True):
        assert len({case["digest"] for case in cases}) == 1
        assert len({case["loss"] for case in cases}) == 1
        for case in cases:
            assert case["found"] < 1e-5
            assert case["apart"] > 1e-2


def test_join_with_everything_else(ranks):
    """Unused parameters, frozen ones, checks of drift and a scheduler inside; two joins one after the other."""

    def script():
        import torch
        from support import digest, loss_of, make_batch, make_model, make_optimizer, same_everywhere, tell

        import offbeat

        offbeat.init(timeout=20.0, first_step_timeout=20.0)
        me = offbeat.rank()
        model = make_model("cnn")
        model.extra = torch.nn.Linear(3, 3)
        model.forward = lambda inputs: model[:9](inputs)
        model[0].requires_grad_(False)
        optimizer = make_optimizer("sgd", model)
        offbeat.DistributedOptimizer(optimizer, model, check_every=2, bucket_bytes=1000)
        for epoch in range(2):
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            with optimizer.join():
                for step in range(3 + 2 * ((me + epoch) % 2)):
                    optimizer.zero_grad()
                    loss_of(model, make_batch("cnn", me, 10 * epoch + step)).backward()
                    optimizer.step()
                    scheduler.step()
            assert model.extra.weight.grad is None
            # the settings of a rank that made all steps
            tell(digest=digest(model), rate=optimizer.param_groups[0]["lr"])
        assert same_everywhere(*model.parameters())
        offbeat.shutdown()

    job = ranks(script, 2)
    one, other = (told(rank) for rank in job.ranks)
    assert one == other
    assert [case["rate"] for case in one] == [pytest.approx(0.05 * 0.5**5), pytest.approx(0.05 * 0.5**10)]


def test_what_happens_when_data_runs_out_is_as_in_ddp(ranks):
    """Dividing by the ranks that are left, ending on all of them, or nothing at all; training goes on after each."""

    def script():
        import torch
        import torch.distributed as dist
        from support import differences, fails, loss_of, make_batch, make_model, make_optimizer, same_everywhere, tell
        from torch.nn.parallel import DistributedDataParallel

        import offbeat
        from offbeat.algorithms import GradientAllReduce, LocalSGD
        from offbeat.errors import Exhausted, InvalidArgument, Mismatch

        dist.init_process_group("gloo")
        offbeat.init(timeout=20.0, first_step_timeout=20.0)
        me = offbeat.rank()

        def batches(wrapped, optimizer, context, count, made):
            with context:
                for step in range(count):
                    optimizer.zero_grad()
                    with wrapped.no_sync():
                        loss_of(wrapped, make_batch("cnn", me, 2 * step)).backward()
                    loss_of(wrapped, make_batch("cnn", me, 2 * step + 1)).backward()
                    optimizer.step()
                    made.append(step)

        cases = [
            ({"divide_by_initial_world_size": False}, [6, 4, 5]),
            ({"throw_on_early_termination": True}, [5, 3, 4]),
            ({"throw_on_early_termination": True}, [4, 4, 4]),
            ({"enable": False}, [3, 3, 3]),
        ]
        for options, counts in cases:
            models, made = {}, {"ddp": [], "ours": [], "all": []}
            for way in made:
                model = models[way] = make_model("cnn")
                # without momentum: DDP would leave that of ranks that were done early behind
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                wrapped = DistributedDataParallel(model) if way == "ddp" else offbeat.DataParallel(model)
                # what it must not be: a mean over all ranks, until all are done
                context = wrapped.join(**({} if way == "all" else options))
                raised = None
                try:
                    batches(wrapped, optimizer, context, counts[me], made[way])
                except RuntimeError as error:
                    raised = error
                if way == "ours":
                    assert same_everywhere(*model.parameters())
                    ends_early = "throw_on_early_termination" in options and min(counts) < max(counts)
                    assert type(raised) is (Exhausted if ends_early else type(None)), raised
                    assert raised is None or (raised.ranks == [1] and "rank 1" in str(raised)), raised
                # later rounds divide by all ranks again, and end nowhere
                batches(wrapped, optimizer, wrapped.join(), 2, [])
            found = max(differences(models["ours"], models["ddp"]).values())
            apart = max(differences(models["all"], models["ddp"]).values())
            tell(options=options, made=made["ours"], of_ddp=made["ddp"], found=found, apart=apart)

        model = make_model("mlp")
        optimizer = make_optimizer("sgd", model)
        for algorithm in (GradientAllReduce(average=False), LocalSGD(2)):
            offbeat.DistributedOptimizer(optimizer, model, algorithm)
            context = optimizer.join(divide_by_initial_world_size=False)
            fails(InvalidArgument, "divide_by_initial_world_size|try", context.__enter__)
        offbeat.DistributedOptimizer(optimizer, model, offbeat.algorithms.AsyncModelAverage())
        with optimizer.join(enable=False):
            pass
        fails(InvalidArgument, "async|try: join()", optimizer.join(throw_on_early_termination=True).__enter__)
        offbeat.DistributedOptimizer(optimizer, model)
        different = optimizer.join(throw_on_early_termination=me == 1)
        fails(Mismatch, "arguments of join()|rank 1 against rank 0|try: the same ones", different.__enter__)
        offbeat.shutdown()
        dist.destroy_process_group()

    job = ranks(script, 3)
    for rank in job.ranks:
        divided, ended, even, disabled = told(rank)
        for case in (divided, ended, even, disabled):
            assert case["found"] < 1e-5, case
            assert case["made"] == case["of_ddp"], case
        assert divided["apart"] > 1e-3
        assert ended["apart"] > 1e-3
        assert ended["made"] == [0, 1, 2]
        assert even["made"] == [0, 1, 2, 3]


def test_the_loop_ends_early_whatever_is_exchanged(ranks):
    """Also where only backward tells that a rank is done, and where weights are exchanged; the next loop is whole."""

    def script():
        from support import fails, loss_of, make_batch, make_model, make_optimizer, same_everywhere

        import offbeat
        from offbeat.errors import Exhausted

        offbeat.init(timeout=20.0, first_step_timeout=20.0)
        me, made = offbeat.rank(), []
        for algorithm in (None, "allreduce", "local_sgd", "decentralized"):
            model = make_model("mlp")
            optimizer = make_optimizer("sgd", model)
            if algorithm is None:  # calls that go past the wrapper are not seen before backward
                joined = offbeat.DataParallel(model, broadcast_buffers=False)
            else:
                joined = offbeat.DistributedOptimizer(optimizer, model, algorithm)

            def loop(count, model=model, optimizer=optimizer, joined=joined):
                made.clear()
                with joined.join(throw_on_early_termination=True):
                    for step in range(count):
                        optimizer.zero_grad()
                        loss_of(model, make_batch("mlp", me, step)).backward()
                        optimizer.step()
                        made.append(step)

            assert fails(Exhausted, "rank 0 has no more data|try", loop, 3 + 2 * me).ranks == [0]
            assert len(made) == 3, algorithm
            loop(4)
            assert len(made) == 4, algorithm
            assert same_everywhere(*model.parameters()), algorithm
        offbeat.shutdown()

    ranks(script, 2)
