"""Bucket sizes are found while training, by one rank's word for all, and change no bit of the result."""

import importlib.util
import json
import sys

import pytest
from conftest import Job, Launcher, write
from support import told

from offbeat import profile

KIB = 1 << 10


def train():
    """Trains layers of 384 × 384; arguments: steps, then what to do besides."""
    import contextlib
    import hashlib
    import sys

    import torch
    from support import bits, tell

    import offbeat

    steps, how = int(sys.argv[1]), sys.argv[2:]
    offbeat.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(384, 384) for _ in range(4)))
    model[0].requires_grad_("thaw" not in how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    size = next((word for word in how if word == "auto" or word.isdigit()), None)
    optimizer = offbeat.DistributedOptimizer(
        optimizer, model, bucket_bytes=int(size) if size and size != "auto" else size
    )
    replica = optimizer._offbeat.replica
    first = replica.bucket_bytes
    numbers = torch.Generator().manual_seed(offbeat.rank())

    def step():
        for accumulate in (True, False) if "accumulate" in how else (False,):
            with optimizer.no_sync() if accumulate else contextlib.nullcontext():
                model(torch.randn(4, 384, generator=numbers)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none="zeros" not in how)

    seen = []
    for at in range(steps):
        if at == 20 and "join" in how:
            with optimizer.join():
                for _ in range(3 + 2 * offbeat.rank()):
                    step()
        if at == 10 and "thaw" in how:
            model[0].requires_grad_(True)
        step()
        seen.append(replica.bucket_bytes)
    weights = hashlib.sha256(b"".join(bits(parameter) for parameter in model.parameters())).hexdigest()
    tell(first=first, last=seen[-1], tried=sorted(set(seen)), weights=weights, done=replica._sweep._tuner is None)
    offbeat.shutdown()


def weights(job):
    """Those of every rank must be the same."""
    (one,) = {told(rank)[0]["weights"] for rank in job.ranks}
    return one


@pytest.mark.parametrize("how", [(), ("accumulate", "zeros"), ("join",), ("thaw",)], ids=lambda how: "-".join(how))
def test_auto_keeps_one_size_on_all_ranks_and_every_bit(ranks, how):
    steps = 40 if not how else 55
    job = ranks(train, 2, args=[steps, "auto", *how], env={"OFFBEAT_DEBUG": "info"}, timeout=100)
    one, other = (told(rank)[0] for rank in job.ranks)
    assert one == other
    assert one["done"]
    assert one["first"] == 8 << 20
    # with 2 and 4 MiB the buckets are those of 8 MiB
    assert one["tried"] == [512 * KIB, 1024 * KIB, 8192 * KIB]
    (line,) = [line for line in job.ranks[0].err.splitlines() if "auto" in line]
    assert line.startswith('offbeat: rank 0: info: bucket_bytes="auto" keeps buckets of ')
    assert "auto" not in job.ranks[1].err
    fixed = ranks(train, 2, args=[steps, 1 << 20, *how], timeout=100)
    assert weights(fixed) == weights(job)
    assert told(fixed.ranks[0])[0]["tried"] == [1 << 20]


def test_rank_0_has_the_word(ranks, tmp_path):
    """Profiles, variables and arguments may differ: all ranks make rank 0's buckets, also the first ones."""
    for name, size in (("small", 512 * KIB), ("large", 1 << 20)):
        profile.save(profile.Profile(size), tmp_path / f"{name}.json")
    paths = [str(tmp_path / "small.json"), str(tmp_path / "large.json")]
    job = ranks(train, 2, args=[3], per_rank=lambda rank: {"OFFBEAT_PROFILE": paths[rank]})
    assert {(told(rank)[0]["first"], told(rank)[0]["last"]) for rank in job.ranks} == {(512 * KIB, 512 * KIB)}
    said = [[line for line in rank.err.splitlines() if line.startswith("offbeat")] for rank in job.ranks]
    assert said == [[f"offbeat: profile {paths[0]} (OFFBEAT_PROFILE): buckets of 512 KiB"], []]
    same = weights(job)
    for sizes in (("auto", "1024"), ("1024", "auto")):
        job = ranks(train, 2, args=[3], per_rank=lambda rank, sizes=sizes: {"OFFBEAT_BUCKET_BYTES": sizes[rank]})
        one, other = (told(rank)[0] for rank in job.ranks)
        assert one == other
        assert (one["first"], one["done"]) == ((8 << 20, False) if sizes[0] == "auto" else (1024, True))
        assert weights(job) == same


def test_the_profile_is_where_auto_begins(ranks, tmp_path):
    profile.save(profile.Profile(3 << 20), tmp_path / "p.json")
    job = ranks(train, 2, args=[2, "auto"], env={"OFFBEAT_PROFILE": str(tmp_path / "p.json")})
    assert told(job.ranks[1])[0]["first"] == 3 << 20


class Tune(Launcher):
    """The command, in a directory of its own."""

    def __call__(self, script, *arguments, steps=None, env=None, command=None, timeout=110):
        job, program = self.prepare(Job, script, 1, env, [] if steps is None else [steps])
        program = [sys.executable, *program] if command is None else command(program)
        job.spawn([sys.executable, "-m", "offbeat", "tune", *arguments, "--", *program], "0")
        job.wait(timeout, check=False)
        assert not job.leftovers(), job.report()
        return job


@pytest.fixture
def tune(tmp_path):
    launcher = Tune(tmp_path)
    yield launcher
    launcher.close()


SIZES = "4K,1M,8M,16M"


@pytest.mark.slow
def test_tune_a_script(tune, ranks):
    job = tune(train, "--nproc-per-node", "2", "--steps", "3", "--sizes", SIZES, steps=100_000)
    (result,) = job.ranks
    assert result.code == 0, job.report()
    assert "Traceback" not in result.err
    assert "2 ranks, 2.256 MiB of gradients, 4 sizes" in result.err
    assert "16 MiB: the same buckets as with 8 MiB" in result.err
    assert "offbeat.init() takes it" in result.out
    assert result.out.count("*") == 3  # the curve
    path = job.directory / "offbeat-profile.json"
    made = profile.load(path)
    assert [size for size, _ in made.measured] == [4 * KIB, 1 << 20, 8 << 20]
    assert made.bucket_bytes in dict(made.measured)
    assert all(0 < seconds < 10 for _, seconds in made.measured)
    assert made.machine["ranks"] == 2
    assert made.made_by.startswith("offbeat tune")
    picture = job.directory / "offbeat-profile.png"
    if importlib.util.find_spec("matplotlib"):
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"picture: {picture.name}" in result.out
    else:
        assert "pip install" in result.out
    # and init takes it
    again = ranks(train, 2, args=[2], env={"OFFBEAT_PROFILE": str(path)})
    assert told(again.ranks[0])[0]["last"] == made.bucket_bytes


@pytest.mark.slow
def test_tune_under_a_launcher_of_the_users(tune):
    def torchrun(program):
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]

    options = ("--steps", "2", "--sizes", "64K,8M", "--output", "mine.json", "--json")
    job = tune(train, *options, steps=100_000, command=torchrun)
    (result,) = job.ranks
    assert result.code == 0, job.report()
    facts = json.loads(result.out)
    assert (facts["profile"], facts["error"]) == ("mine.json", None)
    assert facts["bucket_bytes"] == profile.load(job.directory / "mine.json").bucket_bytes
    assert [size for size, _ in facts["measured"]] == [64 * KIB, 8 << 20]


@pytest.mark.slow
def test_tune_on_ranks_that_are_started_already(ranks, tmp_path):
    """Each rank has a command of its own, as on hosts of their own; that of rank 0 speaks and writes."""
    write(train, tmp_path / "train.py")

    def script():
        import sys

        from offbeat import cli

        options = ["--steps", "2", "--sizes", "64K,8M", "--output", f"{sys.argv[1]}/mine.json"]
        sys.exit(cli.main(["tune", *options, "--", sys.executable, f"{sys.argv[1]}/train.py", "100000"]))

    job = ranks(script, 2, args=[tmp_path], timeout=110, per_rank=lambda rank: {"OFFBEAT_HOST": f"h{rank}"})
    assert "mine.json" in job.ranks[0].out
    assert job.ranks[1].out == ""
    assert profile.load(tmp_path / "mine.json").machine["ranks"] == 2


@pytest.mark.slow
def test_a_script_that_ends_too_early(tune):
    job = tune(train, "--nproc-per-node", "2", "--steps", "3", "--sizes", SIZES, "--json", steps=9)
    (result,) = job.ranks
    assert result.code == 1
    facts = json.loads(result.out)
    assert [size for size, _ in facts["measured"]] == [8 << 20]  # what was measured so far
    assert facts["bucket_bytes"] is facts["profile"] is None
    assert "let it train longer" in facts["error"]
    assert "let it train longer" in result.err
    assert not (job.directory / "offbeat-profile.json").exists()


@pytest.mark.slow
def test_a_script_that_fails(tune):
    def script():
        import offbeat

        offbeat.init()
        if offbeat.rank() == 1:
            raise ValueError("the data is gone")
        offbeat.barrier()

    job = tune(script, "--nproc-per-node", "2")
    (result,) = job.ranks
    assert result.code == 1
    assert "ValueError: the data is gone" in result.err
    assert "the script failed with exit code 1" in result.err
    assert "Traceback" not in result.out


@pytest.mark.slow
def test_a_script_that_wraps_no_model(tune):
    job = tune("import offbeat\noffbeat.init()\n", "--nproc-per-node", "2")
    (result,) = job.ranks
    assert result.code == 1
    assert "wrapped no model" in result.err
    assert "DistributedOptimizer" in result.err


def test_a_world_of_one_has_nothing_to_tune(tune):
    job = tune(train, steps=2, command=lambda program: [sys.executable, *program], env={"RANK": "0", "WORLD_SIZE": "1"})
    assert job.ranks[0].code == 1
    assert "a world of one" in job.ranks[0].err


@pytest.mark.parametrize(
    ("arguments", "program", "words"),
    [
        ([], [], "no command"),
        ([], ["no-such-program"], "no-such-program"),
        (["--nproc-per-node", "1"], ["true"], "try: --nproc-per-node 2"),
        (["--nproc-per-node", "2"], ["torchrun", "train.py"], "give it to the launcher"),
        (["--steps", "0"], ["true"], "--steps"),
        (["--sizes", "many"], ["true"], "'many'"),
        (["--output", "/nowhere/p.json"], ["true"], "cannot write /nowhere/p.json"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_started(capsys, monkeypatch, arguments, program, words):
    from offbeat import cli, tune

    monkeypatch.setattr(tune.shutil, "which", lambda name: None if name == "no-such-program" else name)
    assert cli.main(["tune", *arguments, "--", *program]) == 2
    assert words in capsys.readouterr().err
