"""Two emulated hosts: network namespaces joined by one cable, each with a /dev/shm of its own.

In: nothing but the rights to make them. Out: `two_hosts`, a context manager whose hosts run commands; it raises
`NoNamespaces` with the reason where the machine can't make them. Nothing is left when it ends: the namespaces live as
long as the process that holds them.
"""

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

_SETUP = "mount -t tmpfs -o size=256m tmpfs /dev/shm && ip link set lo up && echo ready && exec sleep 600"


class NoNamespaces(Exception):
    """Why there are none."""


class Host(NamedTuple):
    """pid: of the process that holds the namespaces. interface, address: its end of the cable."""

    pid: int
    interface: str
    address: str

    @property
    def enter(self) -> list[str]:
        """What goes before a command that is to run there."""
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", f"--wdns={_here()}"]


def _here() -> str:
    import os

    return os.getcwd()


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNamespaces(f"{' '.join(command)}: {error}") from None
    if done.returncode:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other at their addresses, and nothing else."""
    holders: list[subprocess.Popen[str]] = []
    tag = secrets.token_hex(3)
    try:
        for _ in range(2):
            try:
                command = ["unshare", "--net", "--mount", "sh", "-c", _SETUP]
                holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            except OSError as error:
                raise NoNamespaces(f"unshare: {error}") from None
            holders.append(holder)
            assert holder.stdout is not None
            assert holder.stderr is not None
            if holder.stdout.readline() != "ready\n":
                raise NoNamespaces(f"unshare: {holder.stderr.read().strip()}")
        hosts = tuple(
            Host(holder.pid, f"mf{i}{tag}", f"10.213.77.{i + 1}") for i, holder in enumerate(holders)
        )
        # made inside the first namespace, so that it is gone with it whatever happens
        first, second = hosts
        _run(
            *first.enter,
            "ip",
            "link",
            "add",
            first.interface,
            "type",
            "veth",
            "peer",
            "name",
            second.interface,
        )
        _run(*first.enter, "ip", "link", "set", second.interface, "netns", str(second.pid))
        for host in hosts:
            _run(*host.enter, "ip", "address", "add", f"{host.address}/24", "dev", host.interface)
            _run(*host.enter, "ip", "link", "set", host.interface, "up")
        yield first, second
    finally:
        for holder in holders:
            holder.kill()
            with suppress(subprocess.TimeoutExpired):
                holder.wait(10)
