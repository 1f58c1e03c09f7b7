"""Ranks on two emulated hosts: they share no memory, and get what one process gets, over the network alone."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moefuse.comm import CommContext, context_for
from tests.comm.hosts import NoNamespaces, two_hosts
from tests.comm.layers import spread
from tests.comm.steps import MAX_TOKENS, check

WORLD, PORT = 4, 29517
TOKENS = [(6, 0, 0, 0), (0, 0, 0, 6), (0, 0, 0, 0), (9, 2, 16, 1)]


def wire_bytes(interface: str) -> int:
    """Bytes that left this host on the cable."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == interface:
            return int(fields.split()[8])
    raise AssertionError(f"no interface {interface}")


def run_rank(rank: int, interface: str, master: str) -> dict[str, object]:
    torch.set_num_threads(1)
    store = dist.TCPStore(master, PORT, WORLD, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    contexts: list[CommContext] = []
    before = wire_bytes(interface)
    for top_k in (1, 2, 8):
        layer = spread(top_k, top_k=top_k)
        for counts in TOKENS:
            for target in ("cpu", "reference"):
                check(layer, rank, counts, "auto", target=target)
        contexts.append(context_for(None, layer.capacity(WORLD, MAX_TOKENS), timeout=30))
    dist.barrier()
    said = {
        "transports": [context.transport for context in contexts],
        "moved": sum(sum(context.traffic) for context in contexts),
        "wire": wire_bytes(interface) - before,
    }
    dist.barrier()
    dist.destroy_process_group()
    return said


def test_two_hosts_give_what_one_process_gives() -> None:
    command = "import sys, json; from tests.comm.test_hosts import run_rank; "
    command += "print(json.dumps(run_rank(int(sys.argv[1]), sys.argv[2], sys.argv[3])))"
    try:
        with two_hosts() as hosts:
            ranks = []
            for rank in range(WORLD):
                host = hosts[rank // 2]
                call = [*host.enter, "env", f"GLOO_SOCKET_IFNAME={host.interface}", "OMP_NUM_THREADS=1"]
                call += [sys.executable, "-c", command, str(rank), host.interface, hosts[0].address]
                ranks.append(
                    subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                )
            outcomes = [process.communicate(timeout=200) for process in ranks]
    except NoNamespaces as reason:
        pytest.skip(f"this machine makes no network namespaces: {reason}")
    for rank, (process, (_, error)) in enumerate(zip(ranks, outcomes, strict=True)):
        assert process.returncode == 0, f"rank {rank}:\n{error}"
    said = [json.loads(out.splitlines()[-1]) for out, _ in outcomes]
    for rank in said:
        assert rank["transports"] == ["collectives"] * 3
    # What crossed the cable is the rows and not much more: headers, the rendezvous, the group's own words.
    moved = sum(rank["moved"] for rank in said)
    assert 0 < said[0]["wire"] + said[2]["wire"] < 4 * moved + 2**20
