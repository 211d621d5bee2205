"""Guarded DeepSpeed engines of models that are not simply a stack: pipelines, experts, checkpointing, zero.Init."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stabilityguard import CheckpointPolicy, GradientSpikeError, SnapshotPolicy
from stabilityguard.distributed.deepspeed import guard_engine
from tests.distributed import wrapped
from tests.distributed.engines import RANKS, Trainer, adamw, deepspeed, held, settings, silence
from tests.distributed.ranks import run
from tests.support import Net, batch

ROOT = Path(__file__).parent.parent.parent


# Pipelines ------------------------------------------------------------------------------------------------------------


def make_pipeline(stage, **options):
    silence()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)]
    model = deepspeed.pipe.PipelineModule(
        layers, num_stages=RANKS, loss_fn=lambda out, target: (out - target).square().mean(), partition_method="uniform"
    )
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings(stage, accumulation=2))
    return engine, guard_engine(engine, verbose=False, warmup_steps=2, **options)


def micro_batches(number, factor=1.0):
    for part in range(2):
        rows = wrapped.rows(10 * number + part)
        yield rows, factor * rows.sum(1, keepdim=True)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_pipeline_is_guarded_over_all_stages_and_goes_back_on_all(stage):
    def job(rank):
        engine, guard = make_pipeline(
            stage, nan_action="rollback", snapshots=SnapshotPolicy(every=1, keep=2, quarantine=0)
        )
        for number in (1, 2, 3):
            engine.train_batch(micro_batches(number))
        before = {name: tensor.detach().clone() for name, tensor in held(engine).items()}
        healthy = guard.last_record
        engine.train_batch(micro_batches(4, torch.nan))
        bad, after = guard.last_record, held(engine)
        unchanged = all(torch.equal(before[name], after[name]) for name in before)
        engine.train_batch(micro_batches(5))
        return {
            "layers": list(healthy.layer_norms),
            "rank_losses": [loss is not None for loss in healthy.rank_losses],
            "bad": (bad.action, bad.kind, bad.restored_step, bad.trigger_layer),
            "unchanged": unchanged,
            "next": guard.last_record.action,
        }

    first, second = run(RANKS, job)
    assert first == second
    assert first == {
        "layers": ["0", "2", "4"],
        "rank_losses": [False, True],
        "bad": ("rollback", "nan", 3, "4"),
        "unchanged": True,
        "next": "step",
    }


def test_raising_leaves_train_batch_once_it_has_ended():
    def job(rank):
        engine, guard = make_pipeline(0, nan_action="raise")
        engine.train_batch(micro_batches(1))
        with pytest.raises(GradientSpikeError):
            engine.train_batch(micro_batches(2, torch.nan))
        engine.train_batch(micro_batches(3))
        guard.close()
        return guard.last_record.action, engine.global_steps, "train_batch" in vars(engine)

    assert run(RANKS, job) == [("step", 3, False)] * RANKS


# Other models ---------------------------------------------------------------------------------------------------------


class Checkpointed(wrapped.Odd):
    """Computes its blocks anew in backward."""

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return (self.head(x * self.gain) * self.tri.sum()).square().mean()


class Frozen(wrapped.Odd):
    """With a layer that is not trained, and one that no forward uses."""

    def __init__(self):
        super().__init__()
        self.inp.requires_grad_(False)
        self.spare = nn.Linear(2, 2)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("model", [Checkpointed, Frozen])
def test_the_layer_is_named_and_nothing_changes(model, stage):
    def job(rank):
        trainer = Trainer(rank, settings(stage), model=model, optimizer=lambda m: adamw(m), nan_action="rollback")
        for number in (1, 2, 3):
            trainer.step(number)
        norms, before = dict(trainer.guard.last_record.layer_norms), trainer.digest()
        trainer.step(4, factor=torch.nan if rank == 1 else None)
        record = trainer.guard.last_record
        return sorted(norms), record.action, record.trigger_layer, record.restored_step, before == trainer.digest()

    first, second = run(RANKS, job)
    assert first == second
    layers, *rest = first
    assert rest == ["rollback", "head", 0, False]
    assert ("inp" in layers) == (model is Checkpointed)


def test_a_model_that_is_made_in_pieces_has_true_norms():
    def job(rank):
        silence()
        configuration = settings(3)
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=configuration):
            model = wrapped.Odd()
        whole = wrapped.make()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if rank == 0:
                for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
                    parameter.data.copy_(other)
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=adamw(model), config=configuration)
        guard = guard_engine(engine, verbose=False)
        engine.backward(engine(wrapped.rows(1, rank, RANKS)))
        engine.step()
        return dict(guard.last_record.layer_norms)

    expected = wrapped.true_norms(1, RANKS)
    assert run(RANKS, job) == [pytest.approx(expected, rel=1e-6)] * RANKS


class Experts(nn.Module):
    """Every rank has another expert of the same name."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.moe = deepspeed.moe.layer.MoE(8, nn.Linear(8, 8), num_experts=RANKS, ep_size=RANKS, k=1, min_capacity=0)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x, balance, _ = self.moe(torch.tanh(self.inp(x)))
        return self.head(x).square().mean() + 0.01 * balance


def make_experts(stage, **options):
    silence()
    torch.manual_seed(0)
    model = Experts()
    groups = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=settings(stage)
    )
    return engine, guard_engine(engine, verbose=False, **options)


@pytest.mark.parametrize("stage", [0, 1])
def test_experts_of_one_name_are_told_apart(stage):
    def job(rank):
        engine, guard = make_experts(stage, nan_action="skip")
        for number in (1, 2):
            engine.backward(engine(wrapped.rows(number, rank, RANKS)))
            if number == 1:
                engine.step()
        expert = next(p for n, p in engine.module.named_parameters() if "experts" in n and n.endswith("weight"))
        before = expert.detach().clone()
        if rank == 1:
            guard._partition.gradients()[expert].view(-1)[0] = torch.inf
        engine.step()
        record = guard.last_record
        return record.action, record.trigger_layer, record.bad_ranks, torch.equal(expert, before)

    first, second = run(RANKS, job)
    assert first == second
    assert first[0] == "skip"
    assert "experts" in first[1]
    assert first[2:] == ((1,), True)


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_experts_go_back_on_every_rank_bit_for_bit(stage, place, tmp_path):
    if place == "ram":
        options = {"snapshots": SnapshotPolicy(every=2, keep=2, quarantine=1)}
    else:
        options = {"snapshots": False, "checkpoints": CheckpointPolicy(directory=str(tmp_path), every=2, quarantine=1)}

    def train(rank, numbers, bad=None, **options):
        engine, guard = make_experts(stage, **options)
        for number in numbers:
            factor = torch.nan if (number, rank) == (bad, 1) else 1.0
            engine.backward(engine(wrapped.rows(number, rank, RANKS)) * factor)
            engine.step()
        restored = [report.record.restored_step for report in guard.reports]
        guard.close()
        return restored, {name: tensor.detach().clone() for name, tensor in held(engine).items()}

    def job(rank):
        restored, after = train(rank, range(1, 8), bad=4, nan_action="rollback", **options)
        _, calm = train(rank, [1, 2, 5, 6, 7])
        return restored, after.keys() == calm.keys(), all(torch.equal(after[name], calm[name]) for name in calm)

    assert run(RANKS, job) == [([2], True, True)] * RANKS


# What is documented ---------------------------------------------------------------------------------------------------


def test_the_example_of_the_manual_runs_as_printed():
    manual = (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", manual, flags=re.DOTALL).group(1)

    def job(rank):
        silence()
        names = {"model": Net(), "batches": [batch(n).bfloat16() for n in range(8)]}
        exec(code, names)
        return names["guard"].last_record.step, names["guard"].last_record.action

    assert run(RANKS, job) == [(4, "step")] * RANKS


@pytest.mark.timeout(300)
def test_the_job_names_the_layer_goes_back_and_goes_on_where_it_was(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [ROOT / "distributed" / "train_deepspeed.py", "--stage", "3", "--width", "16", "--depth", "1"]
    command += ["--checkpoints", "checkpoints", "--every", "4", "--quarantine", "2", "--nan-action", "rollback"]

    def launch(*options):
        done = subprocess.run(
            [*map(str, command), *options], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    out = launch("--steps", "10", "--poison", "7")
    assert "NAN DETECTED @ step 7" in out
    assert "Trigger layer  : head" in out
    assert "Bad ranks      : 1" in out
    assert "ROLLED BACK to the end of step 4" in out
    assert "7 steps, 0 of them skipped" in out
    with contextlib.suppress(FileNotFoundError):
        (tmp_path / "sg_logs" / "journal.jsonl").unlink()
    launch("--steps", "12")
    journal = (tmp_path / "sg_logs" / "journal.jsonl").read_text()
    assert '"step": 5,' in journal
    assert '"step": 4,' not in journal
