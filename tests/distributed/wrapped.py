"""One model in every wrapping, its true gradient norms, and a count of collectives."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = 4


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Odd(nn.Module):
    """Sizes that no number of ranks divides, and parameters smaller than the number of ranks."""

    def __init__(self, width=13, hidden=36, depth=3):
        super().__init__()
        self.inp = nn.Linear(5, width)
        self.blocks = nn.ModuleList([Block(width, hidden) for _ in range(depth)])
        self.gain = nn.Parameter(torch.ones(1))
        self.tri = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return (self.head(x * self.gain) * self.tri.sum()).square().mean()


def make(model=Odd, dtype=torch.float32):
    torch.manual_seed(0)
    return model().to(dtype)


def rows(step, part=None, parts=1):
    """The batch of a step, or one rank's part of it."""
    batch = torch.randn(ROWS * parts, 5, generator=torch.Generator().manual_seed(100 + step))
    return batch if part is None else batch[part * ROWS : (part + 1) * ROWS]


def true_norms(step, parts, model=Odd):
    """Layer norms of the unwrapped model in float64, on the whole batch."""
    reference = make(model, torch.float64)
    reference(rows(step, parts=parts).double()).backward()
    return norms_by_layer(reference)


def norms_by_layer(model):
    norms = {}
    for name, module in model.named_modules():
        gradients = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
        if gradients:
            norms[name or "(root)"] = float(torch.cat([g.flatten() for g in gradients]).norm())
    return norms


def ddp(**options):
    return lambda model: DistributedDataParallel(model, **options)


def fsdp1(strategy, *, use_orig_params, **options):
    def wrap(model):
        hybrid = "HYBRID" in strategy
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2)) if hybrid else None
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            **options,
        )

    return wrap


def _fully_shard(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fsdp2(**options):
    return lambda model: _fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)


def hsdp():
    return lambda model: _fully_shard(
        model, mesh=init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicas", "shards"))
    )


def _tensor_parallel(model, mesh, sequence=False):
    plain = {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())}
    split = {"up": ColwiseParallel(), "norm": SequenceParallel(sequence_dim=0), "down": RowwiseParallel()}
    split["up"] = ColwiseParallel(output_layouts=torch.distributed.tensor.Shard(0), use_local_output=False)
    split["down"] = RowwiseParallel(input_layouts=torch.distributed.tensor.Shard(0))
    for block in model.blocks:
        parallelize_module(block, mesh, split if sequence else plain)
    return model


def tensor_parallel(**options):
    return lambda model: _tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)), **options)


def fsdp2_tensor_parallel():
    def wrap(model):
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        return _fully_shard(_tensor_parallel(model, mesh["tp"]), mesh=mesh["dp"])

    return wrap


class Collectives(TorchDispatchMode):
    """Names of the collectives that reach the dispatcher."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            self.seen.append(function._opname)
        return function(*args, **(kwargs or {}))
