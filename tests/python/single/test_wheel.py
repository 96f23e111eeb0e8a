"""The wheel that users get: its tag, what it links to, and a sum of two ranks in an environment without the rest."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# manylinux2014 allows a few more; we need no others, and neither CUDA, MPI nor libpython must ever be here
SYSTEM = re.compile(r"(libc|libm|libdl|libpthread|librt|libgcc_s|ld-linux[-\w]*)\.so\.\d+")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the portable wheel is built on Linux"),
    pytest.mark.timeout(1200),  # the first build of the wheel compiles everything
]


@pytest.fixture(scope="module")
def wheel():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    subprocess.run(["make", "wheel"], cwd=ROOT, env=env, check=True)  # does nothing if it is up to date
    (path,) = (ROOT / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a new environment with the wheel in it, and torch lent by the one that runs the tests."""
    home = tmp_path_factory.mktemp("wheel") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    # A directory named in a .pth file is searched after the environment's own, and .pth files in it are not read:
    # torch is lent, our editable install (itself a .pth file) is not.
    import torch

    (site,) = home.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python


def test_tag(wheel):
    assert re.fullmatch(r"offbeat-[\d.]+-cp311-abi3-manylinux2014_\w+\.manylinux_2_17_\w+\.whl", wheel.name)


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith(".so")] == ["offbeat/_core.abi3.so"]
    assert {"offbeat/__init__.py", "offbeat/_core.pyi", "offbeat/py.typed"} <= set(names)
    strays = [n for n in names if not n.startswith("offbeat/") and ".dist-info/" not in n]
    assert not strays
    assert any(n.endswith("dist-info/licenses/LICENSE") for n in names)


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf (binutils)")
def test_links_only_to_the_system(wheel, tmp_path):
    library = zipfile.ZipFile(wheel).extract("offbeat/_core.abi3.so", tmp_path)
    dynamic = subprocess.run(["readelf", "--dynamic", library], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert needed, dynamic
    assert [name for name in needed if not SYSTEM.fullmatch(name)] == []


def test_two_ranks(python, torchrun):
    def script():
        import sys

        import torch

        import offbeat

        offbeat.init(timeout=30.0)
        for tensor in torch.arange(1000.0), offbeat.shared_empty(1000).copy_(torch.arange(1000.0)):
            tensor += offbeat.rank()
            offbeat.all_reduce(tensor)
            assert torch.equal(tensor, 2 * torch.arange(1000.0) + 1)
        print(sys.prefix, offbeat.__file__, offbeat._core.__file__, sep="\n")
        offbeat.shutdown()

    job = torchrun(script, 2, python=python)
    for rank in job.ranks:
        prefix, package, core = rank.out.splitlines()
        assert Path(prefix) == python.parents[1]
        assert Path(package).is_relative_to(prefix)
        assert Path(core).is_relative_to(prefix)


def test_command_line(python):
    command = [python.with_name("offbeat"), "--help"]
    assert "doctor" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
