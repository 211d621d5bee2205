"""Engines of DeepSpeed that Accelerate and the Trainer of Transformers have prepared, on two ranks."""

import os

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from stabilityguard import ConfigurationError
from stabilityguard.integrations.accelerate import guard_accelerator
from stabilityguard.integrations.huggingface import StabilityGuardCallback
from tests.distributed import wrapped
from tests.distributed.engines import RANKS, adamw, deepspeed, settings, silence
from tests.distributed.ranks import run
from tests.support import Text


def prepare(rank):
    """What a launcher would have done."""
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", MASTER_ADDR="localhost", MASTER_PORT="29500")
    silence()
    deepspeed.init_distributed()


def accelerated(rank, stage):
    prepare(rank)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings(stage)))
    model = wrapped.make()
    base = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(base, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, base, schedule)
    guard = guard_accelerator(accelerator, verbose=False, track={"schedule": schedule})
    seen = []
    for number in (1, 2, 3, 4):
        rows = wrapped.rows(number, rank, RANKS)
        accelerator.backward(model(rows * torch.nan if number == 3 and rank == 1 else rows))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped = accelerator.optimizer_step_was_skipped
        seen.append((guard.last_record.action, skipped, round(optimizer.param_groups[0]["lr"], 6)))
    return seen, guard.last_record.step


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_accelerate_is_told_of_a_skip_and_its_schedule_waits(stage):
    rates = [1e-2 / (1 + n) for n in (1, 2, 2, 3)]
    expected = [("step", False), ("step", False), ("skip", True), ("step", False)]
    for seen, steps in run(RANKS, accelerated, stage):
        assert steps == 4
        assert [(action, skipped) for action, skipped, _ in seen] == expected
        assert [rate for _, _, rate in seen] == pytest.approx(rates, rel=1e-3)


def test_an_accelerator_without_an_engine_is_refused():
    with pytest.raises(ConfigurationError, match=r"without DeepSpeed, guard the optimizer"):
        guard_accelerator(Accelerator(cpu=True))


class Poison(TrainerCallback):
    """Makes one rank's loss NaN in one step."""

    def __init__(self, model, step, rank):
        self.step, self.now = step, 0
        if rank == 1:
            model.register_forward_hook(self._spoil)

    def on_step_begin(self, args, state, control, **kwargs):
        self.now = state.global_step + 1

    def _spoil(self, module, args, output):
        if self.now == self.step:
            output.loss = output.loss * torch.nan
        return output


def trained(rank, stage):
    prepare(rank)
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "n_positions": 16, "n_embd": 16}
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, loss_type="ForCausalLM", **sizes))
    automatic = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_steps=6,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        deepspeed=settings(stage) | automatic | {"gradient_clipping": "auto"},
    )
    guarding = StabilityGuardCallback(verbose=False)
    trainer = Trainer(model=model, args=arguments, train_dataset=Text(), callbacks=[guarding, Poison(model, 3, rank)])
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    (report,) = guarding.guard.reports
    record = report.record
    finite = all(getattr(p, "ds_tensor", p).isfinite().all() for p in model.parameters())
    return (record.step, record.action, record.bad_ranks), guarding.guard.last_record.step, rates, bool(finite)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_callback_guards_the_trainers_engine_and_the_schedule_waits(stage):
    for told, steps, rates, finite in run(RANKS, trained, stage, patience=100):
        assert told == (3, "skip", (1,))
        assert steps == 6
        assert finite
        assert rates[2] == rates[3] or rates[1] == rates[2]
        assert len(set(rates)) == 5
