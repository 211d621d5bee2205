"""The files of an engine's own ``save_checkpoint`` inside checkpoints, as DeepSpeed and its tools read them."""

import errno
import logging
import re
import subprocess
import sys

import pytest
import torch

from stabilityguard import CheckpointPolicy, ConfigurationError, GuardedOptimizer
from stabilityguard.distributed.deepspeed.overrides import overridden
from stabilityguard.recover.listing import table
from tests.distributed import wrapped
from tests.distributed.engines import RANKS, Noisy, Trainer, settings
from tests.distributed.ranks import run
from tests.support import Net, refusal


def policy(directory, **options):
    return CheckpointPolicy(
        **{"directory": str(directory), "every": 2, "keep": 2, "quarantine": 1, "format": "deepspeed", **options}
    )


class Counting(wrapped.Odd):
    """With a buffer that every forward moves, alike on all ranks, and that a bad batch spoils."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1 + 0 * x.detach().sum().to(self.seen.dtype)
        return super().forward(x)


def after_every_step(trainer, numbers, bad=()):
    states = []
    for number in numbers:
        losses = trainer.step(number, factor=torch.nan if number in bad else None)
        states.append((trainer.digest(), losses, trainer.engine.global_steps, trainer.scheduler.last_epoch))
    return states


CONFIGURATIONS = {
    "0 fp32": settings(0),
    "1 bf16, BF16_Optimizer": settings(1, "bf16", data_types={"grad_accum_dtype": "fp32"}),
    "2 fp16, 2 micro-batches": settings(2, "fp16", accumulation=2),
    "3 bf16, offload": settings(3, "bf16", offload=["optimizer", "param"]),
}


@pytest.mark.parametrize("configuration", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_an_engine_that_loads_them_goes_on_bit_for_bit(configuration, tmp_path):
    bad = set() if "fp16" in configuration else {5}  # there it would lower the loss scale

    def job(rank):
        first = Trainer(rank, configuration, model=Counting, checkpoints=policy(tmp_path))
        expected = after_every_step(first, range(1, 9), bad)
        first.close()
        second = Trainer(rank, configuration, model=Counting, guards=False)
        second.engine.load_checkpoint(str(tmp_path / "step_00000004" / "deepspeed"))
        good = [number for number in range(5, 9) if number not in bad]
        found = [second.digest(), *(state[:2] for state in after_every_step(second, good))]
        return found == [expected[3][0], *(expected[number - 1][:2] for number in good)]

    assert run(RANKS, job) == [True] * RANKS
    lines, whole = table(tmp_path, verify=True)
    assert whole, lines
    assert ["clean" in line for line in lines[1:]] == [True, True]


def test_what_they_hold_belongs_to_the_checkpoint(tmp_path):
    def job(rank):
        trainer = Trainer(rank, settings(1), checkpoints=policy(tmp_path))
        after_every_step(trainer, range(1, 8))
        trainer.close()
        return sorted(path.name for path in (tmp_path / "step_00000006" / "deepspeed").rglob("*.pt"))

    names = run(RANKS, job)[0]
    assert len(names) == RANKS + 1
    path = next((tmp_path / "step_00000006").rglob(names[0]))
    path.write_bytes(path.read_bytes()[:-1])
    lines, whole = table(tmp_path)
    assert not whole
    assert names[0] in lines[2]

    def again(rank):
        trainer = Trainer(rank, settings(1), checkpoints=policy(tmp_path))
        return trainer.guard.resume().step

    assert run(RANKS, again) == [4] * RANKS


def weights_after_two_steps(stage, directory):
    """Whole ones, of which a checkpoint is in ``directory``."""

    def job(rank):
        import deepspeed  # noqa: PLC0415 (after the ranks have been made)

        trainer = Trainer(rank, settings(stage), model=Noisy, checkpoints=policy(directory, quarantine=0))
        after_every_step(trainer, (1, 2))
        parameters = dict(trainer.model.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=stage == 3):
            weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        trainer.step(3)
        trainer.close()
        return weights

    return run(RANKS, job)[0]


def call(*arguments):
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_script_finds_whole_float32_weights_in_them(stage, tmp_path):
    weights = weights_after_two_steps(stage, tmp_path)
    files = tmp_path / "step_00000002" / "deepspeed"
    call(files / "zero_to_fp32.py", files, tmp_path / "whole")
    whole = torch.load(tmp_path / "whole" / "pytorch_model.bin")
    assert all(torch.equal(whole[name], weight) for name, weight in weights.items())


def test_they_become_a_universal_checkpoint(tmp_path):
    weights, universal = weights_after_two_steps(2, tmp_path), tmp_path / "universal"
    files = tmp_path / "step_00000002" / "deepspeed" / "global_step2"
    workers = ["--num_extract_workers", 1, "--num_merge_workers", 1, "--inject_missing_state"]
    tool = ["-m", "deepspeed.checkpoint.ds_to_universal"]
    call(*tool, "--input_folder", files, "--output_folder", universal, *workers)
    for name, weight in weights.items():
        assert torch.equal(torch.load(universal / "zero" / name / "fp32.pt")["param"], weight)


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


CALLS = {
    "a shard": (1, lambda engine: (engine.checkpoint_engine, "save", full)),
    "its directory": (0, lambda engine: (engine.checkpoint_engine, "makedirs", full)),
    "memory for weights": (1, lambda engine: (engine, "module_state_dict", full)),
    "memory for state": (0, lambda engine: (engine.optimizer, "state_dict", full)),
    "a script": (0, lambda engine: (engine, "_copy_recovery_script", full)),
    "what comes last": (0, lambda engine: (engine.checkpoint_engine, "commit", full)),
}
"""What fails, and on which rank."""


@pytest.mark.parametrize(("place", "call"), CALLS.values(), ids=CALLS)
def test_a_rank_that_cannot_write_costs_that_checkpoint_alone(place, call, tmp_path, capfd):
    configuration = settings(3, zero={"stage3_param_persistence_threshold": 20})

    def job(rank):
        logging.getLogger("stabilityguard").handlers = [logging.StreamHandler()]
        trainer = Trainer(rank, configuration, checkpoints=policy(tmp_path))
        states = after_every_step(trainer, range(1, 5))
        with overridden(*([call(trainer.engine)] if rank == place else [])):
            states += after_every_step(trainer, (5,))
        states += after_every_step(trainer, range(6, 9))
        trainer.close()
        bare = Trainer(rank, configuration, guards=False)
        return states == after_every_step(bare, range(1, 9))

    assert run(RANKS, job) == [True] * RANKS
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step_00000002", "step_00000006"]
    assert re.search(r"checkpoint of step 4 failed.*No space left on device", capfd.readouterr().err)


def test_who_cannot_write_them_is_told_so(tmp_path):
    with pytest.raises(ConfigurationError, match="asynchronous=False"):
        policy(tmp_path, asynchronous=True)
    with pytest.raises(ConfigurationError, match="'dcp', 'deepspeed', but is 'zip'"):
        policy(tmp_path, format="zip")
    with pytest.raises(ConfigurationError, match="format='deepspeed' is for guard_engine alone"):
        GuardedOptimizer(torch.optim.SGD((model := Net()).parameters()), model, checkpoints=policy(tmp_path))

    def job(rank):
        nodes = settings(1, checkpoint={"use_node_local_storage": True})
        return refusal(lambda: Trainer(rank, nodes, checkpoints=policy(tmp_path)))

    assert "use_node_local_storage" in run(RANKS, job)[0]
