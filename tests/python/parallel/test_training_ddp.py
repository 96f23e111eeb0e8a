"""What users of torch's DDP write: its arguments mean the same, say nothing, or are refused with what to write."""


def test_arguments_of_ddp(ranks):
    """Gradients are those of plain torch whatever is passed; nothing that is refused leaves a model half wrapped."""

    def script():
        import copy
        import warnings

        import torch
        import torch.distributed as dist
        from support import check_gradients, fails, loss_of, make_batch, make_model, make_optimizer, mean_gradients
        from torch.distributed.device_mesh import init_device_mesh

        import offbeat
        from offbeat.errors import InvalidArgument, Unsupported

        dist.init_process_group("gloo")
        offbeat.init()
        me = offbeat.rank()
        alone = dist.new_group([0])
        ours = offbeat.Group([0, 1])
        accepted = [
            {"device_ids": None, "output_device": None, "dim": 0, "init_sync": True},
            {"device_ids": [], "find_unused_parameters": True, "gradient_as_bucket_view": True, "static_graph": True},
            {"device_ids": ["cpu"], "output_device": torch.device("cpu"), "check_reduction": False},
            {"process_group": dist.group.WORLD, "bucket_cap_mb": 0.001, "mixed_precision": None},
            {"process_group": ours, "bucket_cap_mb": None, "bucket_bytes": 500},
            {"device_mesh": init_device_mesh("cpu", (2,)), "forward_sync_buffers": None},
        ]
        for options in accepted:
            model = make_model("cnn", seed=me)
            wrapped = offbeat.DataParallel(model, **options)
            wrapped._set_static_graph()
            for step in range(3):
                plain = copy.deepcopy(model)
                batches = [make_batch("cnn", rank, step) for rank in (0, 1)]
                want = mean_gradients(plain, [lambda m, batch=batch: loss_of(m, batch) for batch in batches])
                wrapped.zero_grad()
                loss_of(wrapped, make_batch("cnn", me, step)).backward()
                check_gradients(model, want, str(options))
        assert offbeat.stats()["models"][-1]["bucket_bytes"] == 8 << 20
        assert [each["bucket_bytes"] for each in offbeat.stats()["models"][-3:-1]] == [1048, 500]

        # buffers, by either name: those of rank 0 in the beginning, and then only where that is asked for
        for options in ({"forward_sync_buffers": False}, {"broadcast_buffers": False}, {"forward_sync_buffers": True}):
            model = make_model("mlp")
            model.register_buffer("offset", torch.full((3,), float(me)))
            wrapped = offbeat.DataParallel(model, **options)
            assert torch.equal(model.offset, torch.zeros(3))
            model.offset.add_(5.0 + me)
            loss_of(wrapped, make_batch("mlp", me, 0)).backward()
            assert torch.equal(model.offset, torch.full((3,), 5.0 if all(options.values()) else 5.0 + me)), options

        refused = [
            ({"device_ids": [me]}, InvalidArgument, f"device_ids=[{me}]|on cpu|try: model.to("),
            ({"output_device": "cuda:0"}, InvalidArgument, "output_device|on cpu|inputs.to("),
            ({"dim": 1}, InvalidArgument, "dim=1|as they are"),
            ({"init_sync": False}, InvalidArgument, "init_sync=False|rank 0"),
            ({"mixed_precision": "fp16"}, InvalidArgument, "mixed_precision|torch.autocast"),
            ({"bucket_cap_mb_list": [1, 2]}, InvalidArgument, "bucket_cap_mb_list|bucket_bytes="),
            ({"bucket_cap_mb": -1}, InvalidArgument, "bucket_cap_mb=-1|25"),
            ({"bucket_cap_mb": 25, "bucket_bytes": 9}, InvalidArgument, "bucket_cap_mb|bucket_bytes=9|one"),
            ({"optimizer": [0]}, InvalidArgument, "not list|device_ids"),
            ({"find_unused": True}, InvalidArgument, "find_unused=|help("),
            ({"process_group": alone}, Unsupported, "process_group=|of 2 ranks|offbeat.Group"),
        ]
        model = make_model("mlp", seed=me)
        before = copy.deepcopy(model.state_dict())
        for options, kind, words in refused:
            fails(kind, words, offbeat.DataParallel, model, **options)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

        # what is every rank's own
        offbeat.DataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
        wrapped = offbeat.DataParallel(model, make_optimizer("sgd", model))
        assert torch.equal(model[0].weight, before["0.weight"])
        assert torch.equal(model[2].weight, before["2.weight"]) == (me == 0)
        fails(Unsupported, "algorithm=|offbeat.algorithms", wrapped.register_comm_hook, state=None, hook=print)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_of(wrapped, make_batch("mlp", me, 0)).backward()
        want = mean_gradients(model, [lambda m, r=r: loss_of(m, make_batch("mlp", r, 0)) for r in (0, 1)])
        assert not torch.equal(model[0].weight.grad, want["0.weight"])
        offbeat.shutdown()
        dist.destroy_process_group()

    ranks(script, 2)
