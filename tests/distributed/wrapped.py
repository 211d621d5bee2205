"""One model in every wrapping, its true gradient norms, and a count of collectives."""

import contextlib

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


def true_norms(step, parts, model=Odd, micro_batches=1):
    """Layer norms of the unwrapped model in float64, on the whole batch; on several, from ``step`` on, if told so."""
    reference = make(model, torch.float64)
    for batch in range(step, step + micro_batches):
        for part in range(parts):
            (reference(rows(batch, part, parts).double()) / parts).backward()
    return norms_by_layer(reference)


def norms_by_layer(model):
    norms, seen = {}, set()
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.grad is not None and p not in seen]
        seen.update(own)
        if own:
            norms[name or "(root)"] = float(torch.cat([p.grad.flatten() for p in own]).norm())
    return norms


def local_part(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def local_gradients(model, unwrapped):
    """This rank's gradients, to read or to write, as pairs of a layer's name in ``unwrapped`` and a plain tensor."""
    for name, parameter in model.named_parameters():
        name = name.replace("_fsdp_wrapped_module.", "")
        name = name.removeprefix("module.") if isinstance(model, DistributedDataParallel) else name
        layer, _, name = name.rpartition(".")
        if parameter.grad is not None and name == "_flat_param":
            yield from _pieces(parameter.grad, layer, unwrapped)
        elif parameter.grad is not None:
            yield layer or "(root)", local_part(parameter.grad)


def _pieces(gradient, unit, unwrapped):
    """The same for a flat parameter of FSDP 1: the blocks have one each, the root has the rest."""
    parameters = [
        (layer or "(root)", parameter.numel())
        for name, parameter in unwrapped.named_parameters()
        for layer, _, _ in [name.rpartition(".")]
        if (f"{layer}.".startswith(f"{unit}.") if unit else not layer.startswith("blocks."))
    ]
    shards = round(sum(numel for _, numel in parameters) / gradient.numel())
    start = -gradient.numel() * (dist.get_rank() % shards)
    for layer, numel in parameters:
        yield layer, gradient[max(0, start) : max(0, start + numel)]
        start += numel


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
        self._is_paused = False

    @contextlib.contextmanager
    def paused(self):
        """What happens meanwhile is not counted."""
        self._is_paused = True
        yield
        self._is_paused = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self._is_paused and function.namespace in ("c10d", "_c10d_functional"):
            self.seen.append(function._opname)
        return function(*args, **(kwargs or {}))


def collectives_of(optimizer, **arguments):
    """The collectives of one ``step()``, without those of the base optimizer."""
    base, seen = optimizer.base_optimizer, Collectives()
    update = base.step

    def uncounted(*args, **kwargs):
        with seen.paused():
            return update(*args, **kwargs)

    base.step = uncounted
    with seen:
        optimizer.step(**arguments)
    base.step = update
    return seen.seen


def in_full(record):
    readings = record.layers
    tensors = [t.tolist() for t in (readings.norms, readings.baselines, readings.ratios, readings.present)]
    return repr((record, readings.places, tensors, readings.nan, readings.inf))


def assert_alike(records):
    told = {in_full(record) for record in records}
    assert len(told) == 1, told


def assert_norms(record, expected):
    norms = record.layer_norms
    assert norms.keys() == expected.keys(), (norms, expected)
    errors = {layer: abs(norms[layer] - norm) / norm for layer, norm in expected.items()}
    assert max(errors.values()) <= 1e-6, (errors, norms, expected)
