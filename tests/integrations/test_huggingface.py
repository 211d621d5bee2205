"""The guard in the Trainer of Transformers, on tiny models built from their configurations."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from stabilityguard import Budget, ConfigurationError, GradientSpikeError, GuardedOptimizer
from stabilityguard.integrations.huggingface import StabilityGuardCallback
from stabilityguard.testing import Faults
from tests.distributed.ranks import run
from tests.support import Text, assert_same

SIZES = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2}


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_positions=16, n_embd=16, n_layer=2, n_head=2, loss_type="ForCausalLM", **SIZES))


def llama():
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **SIZES)
    )


LAYERS = {gpt2: "transformer.h.1.mlp.c_proj", llama: "model.layers.1.mlp.down_proj"}

families = pytest.mark.parametrize("family", [gpt2, llama])


@pytest.fixture(autouse=True)
def _no_state_left(monkeypatch):
    environment = dict(os.environ)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in os.environ.keys() - environment.keys():
        os.environ.pop(name)


def callback(**options):
    return StabilityGuardCallback(**{"verbose": False, **options})


def make_trainer(family=gpt2, callbacks=(), *, optimizers=(None, None), model=None, **options):
    torch.manual_seed(0)
    options = {"save_strategy": "no", "logging_steps": 3, "report_to": [], **options}
    options = {"max_steps": 12, "gradient_accumulation_steps": 2, **options}
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    if arguments.fsdp:  # Accelerate shards on accelerators only, unless it takes the ranks for such
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Trainer(
        model=family() if model is None else model,
        args=arguments,
        train_dataset=Text(),
        callbacks=list(callbacks),
        optimizers=optimizers,
    )


def train(trainer, *, bad_step=None, micro_batches=2, resume=None):
    faults, model = Faults(), trainer.model
    if bad_step is not None:
        layer = next(layer for family, layer in LAYERS.items() if isinstance(model, type(family())))
        faults.nan(layer, step=bad_step)
    with faults.inject(model, micro_batches=micro_batches):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def is_finite(model):
    return all(p.isfinite().all() for p in model.parameters())


# One process --------------------------------------------------------------------------------------------------------


@families
def test_one_nan_ruins_an_unguarded_run_and_its_log_shows_a_loss_of_zero(family):
    trainer = train(make_trainer(family), bad_step=5)
    assert trainer.state.log_history[-2]["loss"] == 0.0
    assert all(p.isnan().any() for p in trainer.model.parameters())


@families
def test_a_guarded_run_survives_the_same(family):
    guarding = callback()
    trainer = train(make_trainer(family, [guarding]), bad_step=5)
    assert is_finite(trainer.model)
    assert trainer.state.log_history[-2]["loss"] > 1.0
    assert guarding.guard.last_record.step == 12
    (report,) = guarding.guard.reports
    assert (report.record.step, report.record.trigger_layer) == (5, LAYERS[family])


@families
@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"max_grad_norm": 1e-3}], ids=str)
def test_a_healthy_run_is_bit_for_bit_that_without_a_guard(family, options):
    guarding = callback()
    guarded, bare = (train(make_trainer(family, callbacks, **options)) for callbacks in ([guarding], []))
    assert guarding.guard.last_record.step == 12
    assert_same(guarded.model.state_dict(), bare.model.state_dict())
    assert_same(guarded.optimizer.state_dict(), bare.optimizer.state_dict())
    assert guarded.state.log_history[-2]["grad_norm"] == bare.state.log_history[-2]["grad_norm"]


def test_gradients_that_are_zero_all_the_time_neither_trip_nor_divide_by_zero():
    class Detached(GPT2LMHeadModel):
        def forward(self, **inputs):
            output = super().forward(**inputs)
            output.loss = output.loss * 0.0 + 3.0
            return output

    guarding = callback()
    model = Detached(gpt2().config)
    trainer = train(
        make_trainer(callbacks=[guarding], model=model, max_steps=50, logging_steps=50, remove_unused_columns=False)
    )
    record = guarding.guard.last_record
    assert (record.step, record.action, record.global_norm, record.ratio) == (50, "step", 0.0, None)
    assert guarding.guard.reports == []
    assert trainer.state.log_history[0]["grad_norm"] == 0.0


def test_norms_are_from_before_the_trainers_clipping():
    guarding = callback()
    trainer = train(make_trainer(callbacks=[guarding], max_grad_norm=1e-3, logging_steps=1, max_steps=3))
    logged = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert guarding.guard.last_record.global_norm == pytest.approx(logged[-1], rel=1e-4)
    assert logged[-1] > 0.1


def test_the_schedule_waits_for_a_skipped_step():
    clean, skipped = callback(), callback()
    rates = []
    for guarding, bad_step in ((clean, None), (skipped, 5)):
        trainer = train(make_trainer(callbacks=[guarding]), bad_step=bad_step)
        rates.append([record.lr for record in guarding.guard._guard.chronicle.records])
        assert trainer.state.global_step == 12
    assert rates[1][:5] == rates[0][:5]
    assert rates[1][5:] == rates[0][4:-1]


def test_the_optimizer_is_given_back_and_a_second_training_is_guarded_anew():
    guarding = callback()
    trainer = make_trainer(callbacks=[guarding])
    train(trainer)
    assert not isinstance(trainer.optimizer.optimizer, GuardedOptimizer)
    first = guarding.guard
    train(trainer, bad_step=2)
    assert guarding.guard is not first
    assert [r.record.step for r in guarding.guard.reports] == [2]
    assert is_finite(trainer.model)


def test_a_raise_ends_the_training_and_tells_the_control():
    guarding = callback(nan_action="raise")
    trainer = make_trainer(callbacks=[guarding])
    with pytest.raises(GradientSpikeError, match=r"transformer\.h\.1\.mlp\.c_proj"):
        train(trainer, bad_step=5)
    assert trainer.control.should_training_stop
    assert trainer.state.global_step == 4
    assert is_finite(trainer.model)


def test_a_rollback_rewinds_the_trainers_schedule():
    guarding = callback(nan_action="rollback")
    trainer = train(make_trainer(callbacks=[guarding], max_steps=8), bad_step=5)
    record = guarding.guard.reports[0].record
    assert (record.action, record.restored_step) == ("rollback", 0)
    assert trainer.lr_scheduler.last_epoch == 4  # 0 at the rollback, whose own step it makes, and three more
    assert is_finite(trainer.model)


def test_a_guard_given_as_the_trainers_optimizer_works_too():
    torch.manual_seed(0)
    model = gpt2()
    guard = GuardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model, verbose=False)
    trainer = train(make_trainer(model=model, optimizers=(guard, None)), bad_step=5)
    assert [report.record.step for report in guard.reports] == [5]
    assert is_finite(trainer.model)
    with pytest.raises(ConfigurationError, match="guarded already"):
        train(make_trainer(model=model, optimizers=(guard, None), callbacks=[callback()]))


# Going on from a checkpoint -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("restores_callbacks", [False, True])
def test_a_resumed_run_judges_as_the_first_would_have(restores_callbacks):
    whole = callback(warmup_steps=4)
    expected = train(make_trainer(callbacks=[whole], save_strategy="steps", save_steps=6), bad_step=3)
    resumed = callback(warmup_steps=4)
    trainer = make_trainer(callbacks=[resumed], restore_callback_states_from_checkpoint=restores_callbacks)
    train(trainer, resume="out/checkpoint-6")
    if restores_callbacks:  # the trainer has made another callback from what it saved
        resumed = next(one for one in trainer.callback_handler.callbacks if isinstance(one, StabilityGuardCallback))
    assert_same(resumed.guard.state_dict()["stabilityguard"], whole.guard.state_dict()["stabilityguard"])
    assert resumed.guard.last_record.step == 12
    assert_same(trainer.model.state_dict(), expected.model.state_dict())


def test_budgets_go_on_where_they_were():
    consecutive = callback(budget=Budget(consecutive_skips=3))
    faults = Faults()
    for step in (5, 6):
        faults.nan(LAYERS[gpt2], step=step)
    trainer = make_trainer(callbacks=[consecutive], max_steps=6, save_strategy="steps", save_steps=6)
    with faults.inject(trainer.model, micro_batches=2):
        trainer.train()
    trainer = make_trainer(callbacks=[callback(budget=Budget(consecutive_skips=3))])
    faults = Faults().nan(LAYERS[gpt2], step=1)
    with faults.inject(trainer.model, micro_batches=2), pytest.raises(GradientSpikeError):
        trainer.train(resume_from_checkpoint="out/checkpoint-6")


def test_the_checkpoint_of_an_unguarded_run_starts_a_guard_without_memory():
    train(make_trainer(save_strategy="steps", save_steps=6))
    guarding = callback()
    train(make_trainer(callbacks=[guarding], save_strategy="steps", save_steps=6), resume="out/checkpoint-6")
    assert guarding.guard.last_record.step == 6
    state = json.loads(Path("out/checkpoint-12/trainer_state.json").read_text())
    assert state["stateful_callbacks"]["StabilityGuardCallback"]["attributes"]["memory"]


def test_an_unguarded_run_goes_on_from_the_checkpoint_of_a_guarded_one():
    whole = train(make_trainer(callbacks=[callback()], save_strategy="steps", save_steps=6))
    bare = train(make_trainer(), resume="out/checkpoint-6")
    assert_same(bare.model.state_dict(), whole.model.state_dict())


def test_options_that_json_cannot_hold_are_not_dropped_in_silence():
    options = {"budget": Budget(consecutive_skips=3)}
    train(make_trainer(callbacks=[callback(**options)], save_strategy="steps", save_steps=6))
    trainer = make_trainer(callbacks=[callback(**options)], restore_callback_states_from_checkpoint=True)
    with pytest.raises(ConfigurationError, match=r"anew without \['budget'\].*leave it False"):
        train(trainer, resume="out/checkpoint-6")


# What cannot be guarded ---------------------------------------------------------------------------------------------


def test_unknown_keywords_are_named_at_once():
    with pytest.raises(ConfigurationError, match="takes no treshold; it takes what GuardedOptimizer does: spike_thr"):
        StabilityGuardCallback(treshold=3.0)


def test_unusable_values_end_the_training_before_it_begins():
    with pytest.raises(ConfigurationError, match="spike_threshold"):
        train(make_trainer(callbacks=[callback(spike_threshold=0.5)]))


def test_an_optimizer_that_accelerate_has_not_prepared_is_refused():
    trainer = make_trainer()
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="SGD that Accelerate has not prepared"):
        callback().on_train_begin(
            trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=optimizer
        )


# Two ranks ----------------------------------------------------------------------------------------------------------


class Injecting(TrainerCallback):
    """Faults in the model as it is once it was wrapped."""

    def __init__(self, faults):
        self.faults = faults

    def on_train_begin(self, args, state, control, *, model, **kwargs):
        self.injection = self.faults.inject(model)
        self.injection.__enter__()

    def on_train_end(self, args, state, control, **kwargs):
        self.injection.__exit__(None, None, None)


def over_ranks(rank, strategy):
    os.environ["MASTER_PORT"] = "29500"  # asked for, but the group is there already
    options = {}
    if strategy == "fsdp2":
        options = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "cpu_ram_efficient_loading": False}}
    guarding = callback()
    callbacks = [guarding, Injecting(Faults().nan(LAYERS[gpt2], step=4, rank=1))]
    trainer = make_trainer(callbacks=callbacks, gradient_accumulation_steps=1, max_steps=6, **options)
    trainer.train()
    kind = trainer.accelerator.distributed_type.value
    return kind, is_finite(trainer.model), [r.action for r in guarding.guard._guard.chronicle.records]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_ranks_skip_together(strategy):
    kind = {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}[strategy]
    assert run(2, over_ranks, strategy) == [(kind, True, ["step"] * 3 + ["skip"] + ["step"] * 2)] * 2


def test_the_loss_of_a_step_is_recorded():
    guarding = callback()
    trainer = train(make_trainer(callbacks=[guarding], gradient_accumulation_steps=1, logging_steps=1), micro_batches=1)
    assert math.isclose(guarding.guard.last_record.loss, trainer.state.log_history[-2]["loss"], rel_tol=1e-3)
