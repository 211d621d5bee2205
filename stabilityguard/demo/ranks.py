"""The ranks of a demonstration that was launched on several; a process by itself is the only one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stabilityguard.distributed.peers import GLOO_NEEDS


@contextmanager
def joined() -> Iterator[None]:
    """Makes this process one of the ranks that torchrun started, on a GPU of its own where there are any."""
    if torch.cuda.is_available():
        torch.cuda.set_device(_local_rank())
        dist.init_process_group("nccl", device_id=device())
    else:
        dist.init_process_group("gloo")
    yield  # after an error nothing more: other ranks may be waiting in a collective
    leave()


def leave() -> None:
    """Ends what the ranks have in common, at the end of the process."""
    dist.destroy_process_group()
    if device().type == "cpu":
        time.sleep(GLOO_NEEDS)


def rank() -> int:
    """The number of this rank."""
    return dist.get_rank() if _several() else 0


def count() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if _several() else 1


def device() -> torch.device:
    """Where this rank computes; one process by itself stays on the CPU."""
    on_gpu = torch.cuda.is_available() and "LOCAL_RANK" in os.environ
    return torch.device("cuda", _local_rank()) if on_gpu else torch.device("cpu")


def mesh(**sizes: int) -> DeviceMesh:
    """All ranks, in as many dimensions as there are names. A collective."""
    return init_device_mesh(device().type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def total(*values: float) -> list[float]:
    """Each value summed over the ranks. A collective."""
    sums = torch.tensor(values, dtype=torch.float64, device=device())
    if _several():
        dist.all_reduce(sums)
    return sums.tolist()


def say(*lines: str) -> None:
    """Prints on the first rank alone."""
    if rank() == 0:
        print(*lines, sep="\n", flush=True)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized()


def _local_rank() -> int:
    return int(os.environ["LOCAL_RANK"])
