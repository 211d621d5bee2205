"""The runs of the demonstration."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from stabilityguard.demo import ranks
from stabilityguard.demo.gpt import draw_batch, read_corpus, stage_of
from stabilityguard.demo.outcome import Run, run_table, trip_table, was_saved
from stabilityguard.demo.settings import STRATEGIES, Settings
from stabilityguard.demo.strategies import make_trainer
from stabilityguard.demo.trainer import Trainer
from stabilityguard.optimizer import GuardedOptimizer
from stabilityguard.testing import Faults

RATE = 1e-3
"""At twice this rate the attention of a clean run comes close to the threshold by itself."""


def demonstrate(settings: Settings) -> bool:
    """Trains several times and prints what happens; True if the guard saved the run. A collective."""
    corpus, held_out = read_corpus()
    megabytes, times = len(corpus) / 1e6, "twice" if settings.quick else "three times"
    ranks.say(f"A byte-level GPT learns {megabytes:.1f} MB of Python's standard library, {times} from one seed.")
    if ranks.count() > 1:
        ranks.say(f"{ranks.count()} ranks, {settings.strategy}: {STRATEGIES[settings.strategy]}.")
    ranks.say("")
    runs = [_train("clean", settings, corpus, held_out)]
    if not settings.quick:
        runs.append(_train("faults, no guard", settings, corpus, held_out, faulty=True))
    runs.append(_train("faults, guarded", settings, corpus, held_out, faulty=True, guarded=True))
    planned = plan_faults(settings).planned
    saved = was_saved(runs[0], runs[-1], planned)
    ranks.say("", *trip_table(planned, runs[-1]))
    ranks.say("", *run_table(runs, saved))
    return saved


def plan_faults(settings: Settings) -> Faults:
    """A spike, a NaN and an infinite loss, spread over the run; over several ranks, each on one of them."""
    spike, nan, inf_loss = (round(settings.steps * share) for share in (0.3, 0.5, 0.7))
    of_up, of_out, of_loss = (_rank_to_spoil(settings, block) for block in (2, 1, settings.depth - 1))
    faults = Faults().spike("blocks.2.mlp.up", step=spike, rank=of_up)
    return faults.nan("blocks.1.attention.out", step=nan, rank=of_out).inf_loss(step=inf_loss, rank=of_loss)


def _rank_to_spoil(settings: Settings, block: int) -> int | None:
    if ranks.count() == 1:
        return None
    return stage_of(block, settings.depth, ranks.count()) if settings.strategy == "pp" else 1


def _train(
    name: str, settings: Settings, corpus: Tensor, held_out: Tensor, *, faulty: bool = False, guarded: bool = False
) -> Run:
    trainer = make_trainer(settings)
    batches = torch.Generator().manual_seed(settings.seed)
    run, model, began = Run(name=name), trainer.model, time.monotonic()
    base = AdamW(trainer.parameter_groups(), lr=RATE, fused=True)
    optimizer = _guard(base, model, settings) if guarded else base
    scheduler = LambdaLR(base, lambda step: min(1.0, (step + 1) / 20))
    faults = plan_faults(settings) if faulty else Faults()
    with faults.inject(model, micro_batches=trainer.micro_batches, criterion=trainer.criterion):
        while run.steps < settings.steps and not _is_over(run, settings):
            loss = trainer.backward(_draw(corpus, trainer, settings, batches))
            _step(optimizer, loss)
            optimizer.zero_grad()
            scheduler.step()
            _note(run, loss, trainer, optimizer, settings, began)
    run.loss = _evaluate(trainer, held_out, settings)
    if isinstance(optimizer, GuardedOptimizer):
        run.reports = optimizer.reports
        optimizer.close()
    return run


def _guard(base: Optimizer, model: nn.Module, settings: Settings) -> GuardedOptimizer:
    return GuardedOptimizer(base, model, spike_threshold=10.0, nan_action="skip", log_every=0, log_dir=settings.log_dir)


def _draw(corpus: Tensor, trainer: Trainer, settings: Settings, generator: torch.Generator) -> Tensor:
    """The next batch, which all ranks draw alike, as far as this rank reads it."""
    rows = max(1, settings.rows // trainer.parts) * trainer.parts
    return trainer.share(draw_batch(corpus, rows, generator))


def _step(optimizer: Optimizer, loss: Tensor | None) -> None:
    if isinstance(optimizer, GuardedOptimizer):
        optimizer.step(loss=loss)  # only a pipeline has to say it: other models return it themselves
    else:
        optimizer.step()


def _note(
    run: Run, loss: Tensor | None, trainer: Trainer, optimizer: Optimizer, settings: Settings, began: float
) -> None:
    record = optimizer.last_record if isinstance(optimizer, GuardedOptimizer) else None
    run.steps += 1
    run.applied += record is None or record.applied
    place = f"{run.name:<17} step {run.steps:>4}/{settings.steps}"
    losses, known, bad = ranks.total(float(loss or 0.0), loss is not None, not trainer.is_finite())
    if run.died_at is None and bad:
        run.died_at = run.steps
        ranks.say(f"{place}  the weights are no longer finite")
    if run.steps % (settings.steps // 10) == 0:
        ranks.say(f"{place}  loss {losses / known:6.3f}  {time.monotonic() - began:4.0f} s")


def _is_over(run: Run, settings: Settings) -> bool:
    """Whether a dead run has been watched long enough."""
    return run.died_at is not None and run.steps >= run.died_at + settings.steps // 5


def _evaluate(trainer: Trainer, held_out: Tensor, settings: Settings) -> float:
    batches = torch.Generator().manual_seed(0)
    texts = [draw_batch(held_out, settings.rows, batches).to(ranks.device()) for _ in range(8)]
    return sum(map(trainer.evaluate, texts)) / len(texts)
