"""`offbeat doctor` on its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOREIGN = ("OFFBEAT_", "NCCL_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "MASTER_")


def offbeat(*arguments, **variables):
    env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    command = [sys.executable, "-m", "offbeat", *arguments]
    return subprocess.run(command, env=env | variables, capture_output=True, text=True, timeout=60, check=False)


def test_json_holds_everything():
    result = offbeat("doctor", "--json", OFFBEAT_TOKEN="very secret", OFFBEAT_TIMEOUT="7")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert {name for name, _ in report["versions"]} >= {"offbeat", "torch", "python", "kernel"}
    assert {name for name, _ in report["machine"]} >= {"cpus", "memory", "memfd", "open files"}
    assert ["lo", "127.0.0.1"] in report["interfaces"]
    assert ["OFFBEAT_TIMEOUT", "7"] in report["environment"]
    assert "very secret" not in result.stdout
    assert report["ranks"] == report["links"] == report["missing"] == []


def test_tables_and_how_to_see_links():
    result = offbeat("doctor")
    assert result.returncode == 0
    assert "torchrun" in result.stdout
    assert "nothing is missing" in result.stdout
    assert result.stderr == ""


def test_what_is_missing_of_cuda_is_one_line_and_no_fault(tmp_path):
    """Empty files where the driver should be hide one that the machine may have."""
    for name in ("libcuda.so", "libcuda.so.1"):
        (tmp_path / name).touch()
    result = offbeat("doctor", "--json", LD_LIBRARY_PATH=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "panicked" not in result.stderr
    gpu = dict(json.loads(result.stdout)["versions"])["GPU"]
    assert gpu.startswith("no CUDA: libcuda.so.1 is not there; try: ")
    assert "\n" not in gpu


@pytest.mark.parametrize("spec", ["wlan77", "10.0.0.0/99"])
def test_a_wrong_interface_is_told(spec):
    result = offbeat("doctor", "--json", OFFBEAT_SOCKET_IFNAME=spec)
    assert result.returncode == 1
    (missing,) = json.loads(result.stdout)["missing"]
    assert missing.startswith("interfaces: ")
    assert spec in missing


def test_the_installed_command():
    command = Path(sys.executable).with_name("offbeat")
    if not command.exists():
        pytest.skip("the package is not installed beside this interpreter")
    result = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("offbeat ")
