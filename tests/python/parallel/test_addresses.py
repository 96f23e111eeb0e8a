"""Which addresses ranks use: IPv6 only, several interfaces of which some are wrong, and the choice between them."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys

import pytest
from conftest import Job, Launcher
from support import told

pytestmark = pytest.mark.slow


class Cable:
    """Two hosts as network namespaces with a cable between them; each gets interfaces and addresses as asked."""

    def __init__(self):
        self.lab = f"ob{secrets.token_hex(3)}"
        self.hosts = [f"{self.lab}{side}" for side in "ab"]

    def open(self):
        for host in self.hosts:
            self.ip("netns", "add", host)
            self.ip("-n", host, "link", "set", "lo", "up")

    def ip(self, *words):
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    def join(self, name, *addresses):
        """A cable whose ends have the same name on both hosts; the first address is for the first host."""
        ends = [f"{self.lab}{name[-2:]}{side}" for side in "ab"]
        self.ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end, address in zip(self.hosts, ends, addresses, strict=True):
            self.ip("link", "set", end, "netns", host)
            self.ip("-n", host, "link", "set", end, "name", name)
            self.ip("-n", host, "addr", "add", address, "dev", name, *(["nodad"] if ":" in address else []))
            self.ip("-n", host, "link", "set", name, "up")

    def bridge(self, name, address):
        """An interface with the same address on both hosts, as docker makes one."""
        for host in self.hosts:
            self.ip("-n", host, "link", "add", name, "type", "veth", "peer", "name", "inside")
            self.ip("-n", host, "addr", "add", address, "dev", name)
            for end in (name, "inside"):
                self.ip("-n", host, "link", "set", end, "up")

    def close(self):
        for host in self.hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.ip("netns", "del", host)


@pytest.fixture
def cable():
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the command ip (iproute2)")
    cable = Cable()
    try:
        cable.open()
        cable.join("probe", "10.9.9.1/24", "10.9.9.2/24")
        cable.ip("-n", cable.hosts[0], "link", "del", "probe")
    except subprocess.CalledProcessError as error:
        cable.close()
        pytest.skip(f"network namespaces with veth do not work here: {error.stderr.strip()}")
    yield cable
    cable.close()


@pytest.fixture
def launch(tmp_path, cable):
    """Runs the script with one rank on each host."""
    launcher = Launcher(tmp_path)

    def run(script, master, *, env=None, check=True, timeout=60):
        job, command = launcher.prepare(Job, script, 2, env, ())
        for rank, host in enumerate(cable.hosts):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": master, "MASTER_PORT": "29500"}
            job.spawn(["ip", "netns", "exec", host, sys.executable, *command], str(rank), **place)
        return job.wait(timeout, check=check)

    yield run
    launcher.close()


def script():
    import torch
    from support import report, tell

    import offbeat

    def work():
        offbeat.init(connect_timeout=15.0, timeout=10.0)
        tensor = torch.arange(50_000.0)
        offbeat.all_reduce(tensor)
        assert torch.equal(tensor, 2 * torch.arange(50_000.0))
        (link,) = [link for link in offbeat.runtime.current().links() if link["kind"] != "self"]
        tell(**link)
        offbeat.shutdown()

    report(work)


def links(job):
    """How each rank reached the other; both must agree."""
    first, second = (told(rank)[0] for rank in job.ranks)
    assert first.get("kind") == second.get("kind") == "tcp", (first, second)
    assert (first["local"], first["remote"]) == (second["remote"], second["local"])
    return first["local"], first["remote"]


def test_ipv6_only(cable, launch):
    cable.join("eth0", "fd77::1/64", "fd77::2/64")
    local, remote = links(launch(script, "fd77::1"))
    assert local.startswith("[fd77::1]:")
    assert remote.startswith("[fd77::2]:")


def test_a_bridge_with_the_same_address_on_both_hosts(cable, launch):
    """Dialing it reaches oneself; the handshake notices, and the other address wins."""
    cable.join("eth0", "10.5.0.1/24", "10.5.0.2/24")
    cable.bridge("virbr0", "192.168.122.1/24")
    local, remote = links(launch(script, "10.5.0.1"))
    assert local.startswith("10.5.0.1:")
    assert remote.startswith("10.5.0.2:")


CHOICES = {
    "default, by the route to the store": (None, "10.5."),
    "prefix": ("ib", "10.6."),
    "exact": ("=ib0", "10.6."),
    "all but": ("^eth,docker", "10.6."),
    "CIDR": ("10.6.0.0/16", "10.6."),
    "list": ("wlan0,ib0", "10.6."),
}


def test_the_choice_of_interfaces(cable, launch):
    """One job; ranks meet again with each choice."""
    cable.join("eth0", "10.5.0.1/24", "10.5.0.2/24")
    cable.join("ib0", "10.6.0.1/24", "10.6.0.2/24")
    cable.bridge("docker0", "172.17.0.1/16")

    def script():
        import json
        import os

        import torch
        from support import tell

        import offbeat

        for name, (spec, _) in json.loads(os.environ["CHOICES"]).items():
            for variable in ("OFFBEAT_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.pop(variable, None)
                if spec is not None:
                    os.environ[variable] = spec
                offbeat.init(connect_timeout=20.0)
                offbeat.all_reduce(torch.ones(10))
                (link,) = [link for link in offbeat.runtime.current().links() if link["kind"] != "self"]
                tell(name=name, local=link["local"], remote=link["remote"])
                offbeat.shutdown()
                os.environ.pop(variable, None)
            offbeat.init(interface=spec)
            offbeat.barrier()
            offbeat.shutdown()
        os.environ["OFFBEAT_SOCKET_IFNAME"] = "wlan0"
        try:
            offbeat.init(connect_timeout=3.0)
        except offbeat.errors.OffbeatError as error:
            tell(name="none", kind=type(error).__name__, message=str(error))

    job = launch(script, "10.5.0.1", env={"CHOICES": json.dumps(CHOICES)}, timeout=100)
    for rank in job.ranks:
        *seen, none = told(rank)
        assert len(seen) == 2 * len(CHOICES)
        for line in seen:
            network = CHOICES[line["name"]][1]
            assert line["local"].startswith(network), line
            assert line["remote"].startswith(network), line
        assert none["kind"] == "InvalidArgument", none
        assert all(name in none["message"] for name in ("eth0", "ib0", "OFFBEAT_SOCKET_IFNAME"))
