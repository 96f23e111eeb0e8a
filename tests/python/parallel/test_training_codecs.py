"""Training with codecs between hosts: replicas stay equal, runs repeat and resume, buckets do not matter."""

import json

import pytest

# the optimizer; at most so much of the bytes, and so far from training without encoding
ALGORITHMS = {
    "ByteGrad()": ("sgd", 0.27, 0.02),
    "QSGD(seed=7)": ("sgd", 0.27, 0.02),
    "ByteGrad(feedback=True)": ("sgd", 0.27, 0.02),
    "QAdam(warmup_steps=3)": ("adamw", 0.27, 0.02),
    "QAdam(warmup_steps=3, codec='int4')": ("adamw", 0.15, 0.1),
    "OneBitAdam(warmup_steps=3)": ("adamw", 0.05, 0.3),
    "PowerSGD(rank=1, warmup_steps=1)": ("sgd", 0.5, 0.3),
    # two numbers for each that is sent, to two others: a tenth of the matrices, and of this small model's vectors all
    "TopK(ratio=0.1)": ("sgd", 0.27, 0.3),
}
HOSTS = {"two hosts": "ab", "three hosts": "abc", "two each": "aabb"}


def script():
    import json
    import sys

    import torch
    from support import make_model, make_optimizer, train

    import offbeat

    algorithm, choice = eval(sys.argv[1], vars(offbeat.algorithms)), sys.argv[2]
    offbeat.init(timeout=20.0)

    def start(algorithm, **options):
        model = make_model("cnn")
        optimizer = make_optimizer(choice, model)
        return model, offbeat.DistributedOptimizer(optimizer, model, algorithm, **options)

    def weights(model):
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def run(algorithm, steps=8, **options):
        model, optimizer = start(algorithm, **options)
        train(model, optimizer, "cnn", range(steps))
        result, stats = weights(model), offbeat.stats()["models"][0]
        optimizer.remove()
        return result, stats

    exact, _ = run("allreduce")
    usual, stats = run(algorithm)
    rows = offbeat.all_gather(usual)
    # stopped after four steps, and resumed by others
    model, optimizer = start(algorithm)
    train(model, optimizer, "cnn", range(4))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, f"saved{offbeat.rank()}.pt")
    optimizer.remove()
    model, optimizer = start(algorithm)
    loaded = torch.load(f"saved{offbeat.rank()}.pt", weights_only=True)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    train(model, optimizer, "cnn", range(4, 8))
    resumed = weights(model)
    optimizer.remove()
    print(
        json.dumps(
            {
                "replicas equal": all(torch.equal(row, usual) for row in rows),
                "repeats": torch.equal(run(algorithm)[0], usual),
                "other buckets": torch.equal(run(algorithm, bucket_bytes=3000)[0], usual),
                "resumes": torch.equal(resumed, usual),
                "differs from exact": not torch.equal(exact, usual),
                "distance": float((exact - usual).norm() / exact.norm()),
                "coding": stats["coding"],
            }
        )
    )
    offbeat.shutdown()


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS.keys())
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_coded_training(ranks, algorithm, hosts):
    choice, bytes_left, away = ALGORITHMS[algorithm]
    job = ranks(script, len(hosts), per_rank=lambda rank: {"OFFBEAT_HOST": hosts[rank]}, args=[algorithm, choice])
    facts = [json.loads(rank.out.splitlines()[-1]) for rank in job.ranks]
    coded, plain = (sum(told["coding"][what] for told in facts) for what in ("coded", "plain"))
    assert coded < bytes_left * plain, (coded, plain)
    for told in facts:
        for what in ("replicas equal", "repeats", "other buckets", "resumes", "differs from exact"):
            assert told[what], (what, told)
        assert told["distance"] < away, told
        coding = told["coding"]
        assert 0 <= coding["error"] < 1, coding
        assert coding["seconds"] > 0, coding
        assert coding["non_finite"] == 0, coding


def test_a_codec_on_one_host_is_idle_and_says_so(ranks):
    def script():
        import warnings

        from support import make_model, make_optimizer, train

        import offbeat

        offbeat.init(timeout=20.0)
        model = make_model("cnn")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer = offbeat.DistributedOptimizer(make_optimizer("sgd", model), model, "bytegrad")
        train(model, optimizer, "cnn", range(2))
        warned = [w for w in said if "all 2 ranks are on one" in str(w.message)]
        print(len(warned), offbeat.stats()["models"][0]["coding"])
        offbeat.shutdown()

    job = ranks(script, 2)
    assert [rank.out for rank in job.ranks] == ["1 None\n", "0 None\n"]
