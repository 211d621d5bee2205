"""A guarded DeepSpeed engine: real engines of all stages on two ranks.

``scripts/test_deepspeed_matrix`` goes through all combinations of settings; these are some that differ inside.
"""

import json

import pytest
import torch

from stabilityguard import (
    CheckpointPolicy,
    GradientSpikeError,
    GuardedOptimizer,
)
from stabilityguard.distributed.deepspeed import guard_engine
from stabilityguard.distributed.deepspeed.state import MASTER, Books, EngineState
from tests.distributed import wrapped
from tests.distributed.engine_trials import corrupt_a_shard, go, replay, through_faults
from tests.distributed.engines import RANKS, Noisy, Trainer, fragments, settings, sgd, silence
from tests.distributed.launched import launch
from tests.distributed.ranks import run
from tests.support import refusal

BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}

CONFIGURATIONS = {
    "0 fp32": settings(0),
    "0 bf16, 3 micro-batches": settings(0, "bf16", accumulation=3, clipping=0.5),
    "1 fp32, 3 micro-batches, offload": settings(1, accumulation=3, clipping=0.5, offload=["optimizer"]),
    "1 bf16, BF16_Optimizer": settings(1, "bf16", clipping=0.5, **BF16_OPTIMIZER),
    "2 fp32": settings(2),
    "2 bf16, 3 micro-batches, offload": settings(2, "bf16", accumulation=3, clipping=0.5, offload=["optimizer"]),
    "2 fp32, round robin": settings(2, zero={"round_robin_gradients": True}),
    "3 fp32, offload": settings(3, clipping=0.5, offload=["optimizer", "param"]),
    "3 bf16, 3 micro-batches": settings(3, "bf16", accumulation=3, clipping=0.5),
    "3 fp32, sub-groups, whole parameters": settings(
        3, zero={"sub_group_size": 300, "stage3_param_persistence_threshold": 20}
    ),
}
in_every_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS.values(), ids=CONFIGURATIONS)


# Decisions ------------------------------------------------------------------------------------------------------------


@in_every_configuration
def test_a_bad_step_is_skipped_bit_for_bit_and_a_healthy_one_is_the_engines_own(configuration):
    told, error = through_faults(configuration)
    healthy = ("step", None, ())
    assert told == [("skip", "spike", (1,)), healthy, ("skip", "nan", (1,)), healthy]
    assert error < (2e-2 if "bf16" in configuration else 1e-6)


def test_ranks_that_torchrun_starts_meet_faults_alike_and_go_back_bit_for_bit(tmp_path):
    configuration = settings(3, clipping=0.5, offload=["optimizer", "param"])
    told, error = through_faults(configuration, run=launch)
    healthy = ("step", None, ())
    assert told == [("skip", "spike", (1,)), healthy, ("skip", "nan", (1,)), healthy]
    assert error < 1e-6
    expected = {"ram": [True, True], "disk": [True, True]}
    assert launch(RANKS, replay, configuration, tmp_path, expected) == [expected] * RANKS


def test_four_ranks_decide_alike(tmp_path):
    told, error = through_faults(CONFIGURATIONS["3 fp32, offload"], ranks=4)
    assert [(action, kind, ranks) for action, kind, ranks in told if action == "skip"] == [
        ("skip", "spike", (1,)),
        ("skip", "nan", (1,)),
    ]
    assert error < 1e-6
    assert run(4, replay, CONFIGURATIONS["2 fp32"], tmp_path, ["disk"]) == [{"disk": [True, True]}] * 4


@pytest.mark.parametrize("name", ["2 fp32", "3 bf16, 3 micro-batches"])
def test_the_layer_and_the_rank_of_a_corrupted_shard_are_named(name):
    (first, _, alike), (second, spoiled, still) = run(RANKS, corrupt_a_shard, CONFIGURATIONS[name])
    assert first == second == ("skip", "inf", *spoiled, (1,))
    assert alike
    assert still


@pytest.mark.parametrize("name", ["0 fp32", "1 bf16, BF16_Optimizer", "2 fp32", "3 bf16, 3 micro-batches"])
def test_a_healthy_step_makes_one_collective_more_and_a_skip_none_of_the_engines(name):
    def job(rank):
        seen = {}
        for guards in (False, True):
            trainer = Trainer(rank, CONFIGURATIONS[name], guards=guards)
            trainer.step(1)
            take = trainer.engine._take_model_step

            def counted(*arguments, take=take, guards=guards):
                with wrapped.Collectives() as collectives:
                    take(*arguments)
                seen.setdefault(guards, []).append(collectives.seen)

            trainer.engine._take_model_step = counted
            trainer.step(2)
            if guards:
                trainer.step(3, factor=torch.nan if rank == 1 else None)
        return seen

    for seen in run(RANKS, job):
        assert seen[True][0] == ["allreduce_", *seen[False][0]]
        assert seen[True][1][0] == "allreduce_"
        assert not any("reduce" in name for name in seen[True][1][1:])


# Raise, veto, close ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_raising_leaves_the_engines_books_in_order(stage):
    def job(rank):
        trainer = Trainer(rank, settings(stage, accumulation=2), nan_action="raise")
        trainer.step(1)
        before = trainer.digest()
        with pytest.raises(GradientSpikeError, match=r"nan at step 2 in layer head .*on rank 1"):
            trainer.step(2, factor=torch.nan if rank == 1 else None)
        assert trainer.digest() == before
        counts = trainer.engine.micro_steps, trainer.engine.global_steps, trainer.engine.skipped_steps
        trainer.step(3)
        return counts, trainer.engine.micro_steps, trainer.guard.last_record.action

    assert run(RANKS, job) == [((4, 2, 1), 6, "step")] * RANKS


def test_a_veto_of_one_rank_skips_on_all_and_after_close_the_engine_is_alone():
    def job(rank):
        trainer = Trainer(rank, settings(2))
        trainer.step(1)
        if rank == 1:
            trainer.guard.veto("a bad batch")
        before = trainer.digest()
        trainer.step(2)
        record = trainer.guard.last_record
        assert trainer.digest() == before
        trainer.guard.close()
        trainer.guard.close()
        trainer.step(3, factor=torch.nan)
        return record.kind, record.reason, trainer.guard.last_record.step, "step" in vars(trainer.engine)

    assert run(RANKS, job) == [("veto", "veto of rank 1: a bad batch", 2, False)] * RANKS


# The loss scale -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_is_left_to_deepspeeds_loss_scale_which_no_spike_moves(stage):
    def job(rank):
        trainer = Trainer(rank, settings(stage, "fp16"))
        seen = []
        for number, factor in ((1, None), (2, None), (3, None), (4, 12.0), (5, 1000.0), (6, None)):
            before, scale = trainer.digest(), trainer.engine.optimizer.loss_scale
            trainer.step(number, factor=factor if rank == 1 else None)
            record = trainer.guard.last_record
            moved = trainer.engine.optimizer.loss_scale / scale
            seen.append((record.action, record.kind, moved, trainer.digest() == before))
        return seen, dict(trainer.guard.last_record.layer_norms), trainer.engine.skipped_steps

    (seen, norms, skipped), other = run(RANKS, job)
    assert seen == other[0]
    healthy = ("step", None, 1.0, False)
    assert seen[:3] == [healthy] * 3
    assert seen[3:] == [("skip", "spike", 1.0, True), ("skip", "scaler_overflow", 0.5, True), healthy]
    assert skipped == 2
    assert max(norms.values()) < 1  # without the scale


@pytest.mark.parametrize("offload", [[], ["optimizer"]], ids=["", "offload"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_that_deepspeeds_own_look_has_missed_is_one_all_the_same(stage, offload):
    def job(rank):
        trainer = Trainer(rank, settings(stage, "fp16", clipping=0.5, offload=offload))
        trainer.step(1)

        def overflow():
            if rank == 1:
                next(iter(fragments(trainer.guard).values())).view(-1)[0] = torch.inf

        engine, before, scale = trainer.engine, trainer.digest(), trainer.engine.optimizer.loss_scale
        trainer.step(2, before=overflow)
        record = trainer.guard.last_record
        bad = record.action, record.kind, engine.was_step_applied(), trainer.digest() == before
        books = engine.skipped_steps, engine.optimizer.loss_scale / scale
        trainer.step(3)
        return bad, books, trainer.guard.last_record.action, engine.was_step_applied()

    assert run(RANKS, job) == [(("skip", "scaler_overflow", False, True), (1, 0.5), "step", True)] * RANKS


def test_a_loss_scale_at_its_minimum_ends_the_run_on_all_ranks_as_it_does_without_a_guard():
    def job(rank):
        scale = {"enabled": True, "initial_scale_power": 0, "min_loss_scale": 1, "hysteresis": 1}
        trainer = Trainer(rank, settings(2, "fp16") | {"fp16": scale})
        trainer.step(1)

        def overflow():
            if rank == 1:
                next(iter(fragments(trainer.guard).values()))[0] = torch.inf

        with pytest.raises(Exception, match="loss scale already at minimum"):
            trainer.step(2, before=overflow)
        return trainer.guard.last_record.step

    assert run(RANKS, job) == [1] * RANKS


# Ways back ------------------------------------------------------------------------------------------------------------


REPLAYED = {
    name: CONFIGURATIONS[name]
    for name in (
        "0 bf16, 3 micro-batches",
        "1 bf16, BF16_Optimizer",
        "2 bf16, 3 micro-batches, offload",
        "3 fp32, sub-groups, whole parameters",
    )
} | {"2 fp16": settings(2, "fp16", clipping=0.5)}


@pytest.mark.parametrize("configuration", REPLAYED.values(), ids=REPLAYED)
def test_what_follows_a_rollback_is_bit_for_bit_what_it_would_have_been(configuration, tmp_path):
    expected = {"ram": [True, True], "disk": [True, True]}
    assert run(RANKS, replay, configuration, tmp_path, expected) == [expected] * RANKS


@pytest.mark.parametrize("stage", [1, 3])
def test_so_it_is_with_another_optimizer(stage, tmp_path):
    assert run(RANKS, replay, settings(stage), tmp_path, ["disk"], sgd) == [{"disk": [True, True]}] * RANKS


LEFT_OUT = {
    "masters": lambda tensors: [place for place in tensors if place[2] == MASTER],
    "moments": lambda tensors: [place for place in tensors if place[0] == "optimizer" and place[2] == "exp_avg"],
    "buffers": lambda tensors: [place for place in tensors if place[0] == "buffer"],
}


@pytest.mark.parametrize("left_out", [*LEFT_OUT, "random numbers", "learning rate", "schedule"])
def test_it_would_not_be_so_with_anything_left_out(left_out, tmp_path, monkeypatch):
    def restore_tensors(state, tensors, small):
        live = state.tensors()
        kept = {place: live[place].clone() for place in LEFT_OUT.get(left_out, lambda _: [])(live)}
        generators = torch.get_rng_state()
        real_restore(state, {**tensors, **kept}, small)
        if left_out == "random numbers":
            torch.set_rng_state(generators)

    real_restore, real_load, real_settings = (
        EngineState.restore_tensors,
        Books.load_state_dict,
        EngineState.restore_settings,
    )
    monkeypatch.setattr(EngineState, "restore_tensors", restore_tensors)
    if left_out == "schedule":
        monkeypatch.setattr(Books, "load_state_dict", lambda books, s: real_load(books, {**s, "lr_scheduler": None}))
    if left_out == "learning rate":

        def without_groups(state, small, **options):
            rates = [group["lr"] for group in state._optimizer.param_groups]
            real_settings(state, small, **options)
            for group, rate in zip(state._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

        monkeypatch.setattr(EngineState, "restore_settings", without_groups)
    for same in run(RANKS, replay, settings(0, "bf16"), tmp_path, ["ram"]):
        assert not all(same["ram"])


@pytest.mark.parametrize("name", ["0 bf16, 3 micro-batches", "2 bf16, 3 micro-batches, offload", "3 fp32, offload"])
def test_a_fresh_process_goes_on_bit_for_bit(name, tmp_path):
    policy = CheckpointPolicy(directory=str(tmp_path), every=4, keep=2, quarantine=1)

    def first(rank):
        return go(rank, CONFIGURATIONS[name], [1, 2, 3, 4, 5, 6, 7], snapshots=False, checkpoints=policy)

    def second(rank):
        trainer = Trainer(rank, CONFIGURATIONS[name], model=Noisy, checkpoints=policy)
        resumed = trainer.guard.resume()
        states = []
        for number in range(resumed.step + 1, 8):
            losses = trainer.step(number)
            states.append((trainer.digest(), losses))
        counts = trainer.engine.global_steps, trainer.scheduler.last_epoch
        trainer.close()
        return resumed.step, states, counts

    uninterrupted = run(RANKS, first)
    for before, (step, states, counts) in zip(uninterrupted, run(RANKS, second), strict=True):
        assert step == 4
        assert states == [state[:2] for state in before[4:]]
        assert counts == (7, 7)


@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), ((3, 2), (2, 1)), ((1, 1), (3, 2))])
def test_another_number_of_ranks_and_another_stage_go_on_from_the_same_weights(before, after, tmp_path):
    policy = CheckpointPolicy(directory=str(tmp_path), every=1, keep=2, quarantine=0)

    def weights(trainer):
        import deepspeed  # noqa: PLC0415

        parameters = list(trainer.model.parameters())
        with deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id")):
            return [parameter.detach().clone() for parameter in parameters]

    def first(rank):
        trainer = Trainer(rank, settings(before[0]), checkpoints=policy)
        trainer.step(1)
        trainer.step(2)
        kept = weights(trainer)
        trainer.step(3)
        trainer.close()
        return kept

    def second(rank):
        trainer = Trainer(rank, settings(after[0]), checkpoints=policy)
        step = trainer.guard.resume().step
        kept = weights(trainer)
        trainer.step(3)
        trainer.close()
        return step, kept, trainer.guard.last_record.action

    expected = run(before[1], first)[0]
    for step, kept, action in run(after[1], second):
        assert (step, action) == (2, "step")
        assert all(map(torch.equal, kept, expected))


# Reports --------------------------------------------------------------------------------------------------------------


def test_the_report_names_the_optimizer_and_its_settings_and_the_first_rank_alone_writes(tmp_path):
    def job(rank):
        trainer = Trainer(rank, settings(3), log_dir=str(tmp_path / f"of rank {rank}"))
        trainer.step(1, factor=torch.nan if rank == 1 else None)
        trainer.close()

    run(RANKS, job)
    assert [path.name for path in tmp_path.iterdir()] == ["of rank 0"]
    report = json.loads((tmp_path / "of rank 0" / "spike_step1.json").read_text())
    assert report["optimizer"]["class"] == "AdamW"
    assert report["optimizer"]["param_groups"][0]["lr"] == 1e-2


# Refusals -------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_guarded_is_refused_with_the_reason():
    def job(rank):
        silence()
        trainer = Trainer(rank, settings(2), guards=False)
        engine, told = trainer.engine, {}
        told["no engine"] = refusal(lambda: guard_engine(trainer.model))
        told["option"] = refusal(lambda: guard_engine(engine, max_grad_norm=1.0, threshold=3.0))
        told["track"] = refusal(lambda: guard_engine(engine, track={"deepspeed": trainer.scheduler}))
        told["value"] = refusal(lambda: guard_engine(engine, spike_threshold=0.5))
        engine.zenflow = True
        told["zenflow"] = refusal(lambda: guard_engine(engine))
        engine.zenflow = False
        partition_size = engine.optimizer.__dict__.pop("partition_size")
        told["attribute"] = refusal(lambda: guard_engine(engine))
        engine.optimizer.partition_size = partition_size
        engine.optimizer.__class__ = type("SuperOffload", (type(engine.optimizer),), {})
        told["subclass"] = refusal(lambda: guard_engine(engine))
        engine.optimizer.__class__ = type(engine.optimizer).__mro__[1]
        assert "_take_model_step" not in vars(engine)
        guard = guard_engine(engine, verbose=False)
        told["twice"] = refusal(lambda: guard_engine(engine))
        guard.close()
        return told

    told = run(RANKS, job)[0]
    assert "DeepSpeedEngine, but got" in told["no engine"]
    assert "does not take max_grad_norm, threshold; it takes" in told["option"]
    assert "the engine's own" in told["track"]
    assert "spike_threshold" in told["value"]
    assert "ZenFlow updates weights outside" in told["zenflow"]
    assert "DeepSpeedZeroOptimizer of this version of DeepSpeed has no partition_size" in told["attribute"]
    assert "SuperOffload cannot be guarded" in told["subclass"]
    assert "guarded already" in told["twice"]


def test_a_guarded_optimizer_takes_no_engine():
    def job(rank):
        trainer = Trainer(rank, settings(1), guards=False)
        return refusal(lambda: GuardedOptimizer(trainer.engine.optimizer, trainer.engine))

    assert "guard_engine" in run(RANKS, job)[0]
