"""DeepSpeed engines on a CPU: one model in every stage, its state in full, and a loop."""

import hashlib
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported

import copy
import logging
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

import torch

from stabilityguard.distributed.deepspeed import guard_engine
from tests.distributed import wrapped

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does without; building it takes minutes
get_accelerator().is_fp16_supported = lambda: True  # torch computes in float16 on a CPU as well

RANKS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def settings(stage, dtype="fp32", *, accumulation=1, clipping=0.0, offload=(), **others):
    """A configuration; ``offload`` names ``"optimizer"`` and ``"param"``."""
    zero = {"stage": stage, "reduce_bucket_size": 500, "allgather_bucket_size": 1000}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    zero |= {f"offload_{what}": {"device": "cpu"} for what in offload}
    zero |= others.pop("zero", {})
    configuration = {
        "train_micro_batch_size_per_gpu": wrapped.ROWS,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
    }
    if dtype != "fp32":
        configuration[dtype] = {"enabled": True}
    if dtype == "fp16":
        configuration[dtype] |= {"initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 1}
    return configuration | others


def adamw(model):
    """Two groups, as is common."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def fused_adam(model):
    return deepspeed.ops.adam.FusedAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def cpu_adam(model):
    return deepspeed.ops.adam.DeepSpeedCPUAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)


class Trainer:
    """One rank's part of a training; ``guards=False`` is the same without a guard."""

    def __init__(
        self, rank, configuration, optimizer=adamw, *, model=wrapped.Odd, guards=True, schedule=True, **options
    ):
        silence()
        self.rank, self.accumulation = rank, configuration["gradient_accumulation_steps"]
        self.model = wrapped.make(model)
        base = optimizer(self.model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(base, lambda step: 1 / (1 + 0.1 * step))
        self.engine, _, _, self.scheduler = deepspeed.initialize(
            model=self.model, optimizer=base, lr_scheduler=scheduler, config=copy.deepcopy(configuration)
        )
        torch.manual_seed(100 + rank)
        defaults = {"verbose": False, "warmup_steps": 2, "nan_action": "skip"}
        self.guard = guard_engine(self.engine, **(defaults | options)) if guards else None
        self.dtype = next((n for n in ("bf16", "fp16") if configuration.get(n, {}).get("enabled")), "fp32")

    def step(self, number, *, factor=None, before=None):
        """The step on batch ``number``; ``factor`` is this rank's loss's, ``before`` is called before the update."""
        losses = []
        for micro in range(self.accumulation):
            x = wrapped.rows(1000 * number + micro, self.rank, torch.distributed.get_world_size()).to(
                DTYPES[self.dtype]
            )
            loss = self.engine(x if factor is None else x * factor)
            self.engine.backward(loss)
            if before is not None and micro == self.accumulation - 1:
                before()
            self.engine.step()
            losses.append(loss.item())
        return losses

    def digest(self):
        """Of the bits of all that this rank holds."""
        digest = hashlib.sha256()
        for name, tensor in sorted(held(self.engine).items()):
            digest.update(name.encode() + bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()))
        return digest.hexdigest()

    def close(self):
        if self.guard is not None:
            self.guard.close()
        self.engine.destroy()


class Noisy(wrapped.Odd):
    """With random numbers, and with a buffer that every forward writes to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        return super().forward(torch.nn.functional.dropout(x, 0.2, training=self.training))


def silence():
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:
        handler.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def held(engine):
    """All that an engine's rank holds, read off DeepSpeed's attributes and not by what is tested; padding is zeroed."""
    optimizer = engine.optimizer
    found = {f"parameter {n}": _without_padding(p) for n, p in engine.module.named_parameters()}
    found |= {f"buffer {n}": b for n, b in engine.module.named_buffers()}
    base = getattr(optimizer, "optimizer", optimizer)
    for i, master in enumerate(_masters(optimizer, base)):
        found[f"master {i}"] = _mask(optimizer, i, master)
        found |= {
            f"state {i} {k}": _mask(optimizer, i, torch.as_tensor(v)) for k, v in base.state.get(master, {}).items()
        }
    return found


def _masters(optimizer, base):
    for name in (
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat",
        "fp32_groups_flat_partition",
        "fp32_groups_flat",
    ):
        if hasattr(optimizer, name):
            return getattr(optimizer, name)
    return [p for group in base.param_groups for p in group["params"]]


def _without_padding(parameter):
    if not hasattr(parameter, "ds_tensor"):
        return parameter
    size = parameter.partition_numel()
    kept = parameter.ds_tensor.detach().clone().view(-1)
    kept[max(0, parameter.ds_numel - torch.distributed.get_rank() * size) :] = 0
    return kept


def _mask(optimizer, i, flat):
    """A flat tensor of stage 3 without what pads each of its parameters; any other as it is."""
    if not hasattr(optimizer, "fp32_partitioned_groups_flat") or flat.dim() == 0:
        return flat
    kept = flat.detach().clone()
    offset = 0
    for parameter in optimizer.fp16_groups[i]:
        size = parameter.partition_numel()
        kept[offset + max(0, min(size, parameter.ds_numel - torch.distributed.get_rank() * size)) : offset + size] = 0
        offset += size
    return kept


def fragments(guard):
    """The live gradients of a guarded engine's rank, by parameter."""
    return guard._partition.gradients()
