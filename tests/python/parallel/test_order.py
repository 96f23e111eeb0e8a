"""Sums have one order, and so the same bits: on every rank, in every run, by every way the data can take."""


def test_the_order_of_a_sum_is_documented_and_the_same_everywhere(ranks):
    """Ranks of a host ascending, then hosts ascending; whatever memory the tensors are in."""

    def script():
        import os

        import torch
        from support import bits, tell

        import offbeat

        offbeat.init(timeout=30.0)
        me, world = offbeat.rank(), offbeat.world_size()
        hosts = offbeat.all_gather_object(os.environ["OFFBEAT_HOST"])
        if os.environ.get("OFFBEAT_SHM") == "0":
            hosts = list(range(world))  # ranks without shared memory count as hosts of their own
        layout = [[rank for rank in range(world) if hosts[rank] == host] for host in dict.fromkeys(hosts)]

        def noise(rank, count):
            generator = torch.Generator().manual_seed(rank)
            scale = 10.0 ** torch.randint(-6, 7, (count,), generator=generator)
            return torch.randn(count, generator=generator) * scale

        def in_order(parts):
            totals = []
            for host in layout:
                total = parts[host[0]].clone()
                for rank in host[1:]:
                    total += parts[rank]
                totals.append(total)
            for total in totals[1:]:
                totals[0] += total
            return totals[0]

        for count in (1, 13, 5001, 40_000, 300_003):
            want = in_order([noise(rank, count) for rank in range(world)])
            mine = noise(me, count)
            for name, tensor in {
                "plain": mine.clone(),
                "shared": offbeat.shared_empty(count).copy_(mine),
                "strided": torch.zeros(count, 2)[:, 0].copy_(mine),
                "part of shared": offbeat.shared_empty(count + 5)[3:-2].copy_(mine),
            }.items():
                offbeat.all_reduce(tensor)
                assert bits(tensor) == bits(want), (name, count, (tensor - want).abs().max())
            tensor = mine.clone()
            offbeat.all_reduce(tensor, async_op=True).wait()
            assert bits(tensor) == bits(want), ("async", count)
            tensor = mine.clone()
            offbeat.reduce(tensor, world - 1)
            assert me != world - 1 or bits(tensor) == bits(want), ("reduce", count)
            assert bits(offbeat.reduce_scatter([mine] * world)) == bits(want), ("reduce_scatter", count)
            tell(count=count, sum=hash(bits(want)))
        offbeat.shutdown()

    layouts = {
        "one host": ({}, lambda rank: "a"),
        "no shared memory": ({"OFFBEAT_SHM": "0"}, lambda rank: "a"),
        "a host each": ({}, lambda rank: f"h{rank}"),
        "two hosts": ({}, lambda rank: "ab"[rank // 2]),
        "two hosts, mixed": ({}, lambda rank: "abba"[rank]),
        "small chunks": ({"OFFBEAT_CHUNK_BYTES": "1024", "OFFBEAT_SEGMENT_BYTES": "4096"}, lambda rank: "aaab"[rank]),
        "three streams": ({"OFFBEAT_STREAMS": "3"}, lambda rank: "aabc"[rank]),
    }
    outputs = {}
    for name, (env, host) in layouts.items():
        job = ranks(
            script,
            4,
            env={"PYTHONHASHSEED": "0", **env},
            per_rank=lambda rank, host=host: {"OFFBEAT_HOST": host(rank)},
        )
        outputs[name] = {rank.out for rank in job.ranks}
        assert len(outputs[name]) == 1
    # each rank on its own, by two ways: the same order, so the same bits
    assert outputs["a host each"] == outputs["no shared memory"] == outputs["one host"]


def test_ways_agree_when_sums_are_exact(ranks):
    def script():
        import torch

        import offbeat

        offbeat.init(timeout=30.0)
        me, world = offbeat.rank(), offbeat.world_size()
        for count in (1, 511, 4096, 16384, 16385, 131_072, 300_001):
            mine = (torch.arange(count) % 1000 + me).float()
            want = ((torch.arange(count) % 1000) * world + sum(range(world))).float()
            for tensor in mine.clone(), offbeat.shared_empty(count).copy_(mine):
                offbeat.all_reduce(tensor)
                assert torch.equal(tensor, want), count
        # ranks may choose different memory
        tensor = offbeat.shared_empty(5000) if me % 2 else torch.empty(5000)
        offbeat.all_reduce(tensor.fill_(me))
        assert bool((tensor == sum(range(world))).all())
        offbeat.shutdown()

    for world in (2, 3, 4):
        ranks(script, world)
    ranks(script, 4, per_rank=lambda rank: {"OFFBEAT_HOST": "aab"[rank % 3]})
