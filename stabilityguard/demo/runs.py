"""The three runs of the demonstration, and the table that compares them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from stabilityguard.demo.gpt import GPT, draw_batch, read_corpus
from stabilityguard.optimizer import GuardedOptimizer
from stabilityguard.report.records import SpikeReport
from stabilityguard.testing import Fault, Faults

ROWS = 12
RATE = 2e-3
TOLERANCE = 0.05
"""How far above the clean run's held-out loss the guarded run may end, as a share of it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is common to the three runs."""

    steps: int = 200
    seed: int = 0
    log_dir: str = "./sg_logs"

    @property
    def faults(self) -> Faults:
        """A spike, a NaN and an infinite loss, spread over the run."""
        spike, nan, inf_loss = (round(self.steps * share) for share in (0.3, 0.5, 0.7))
        faults = Faults().spike("blocks.2.mlp.up", step=spike)
        return faults.nan("blocks.1.attention.out", step=nan).inf_loss(step=inf_loss)


@dataclass(kw_only=True)
class Run:
    """How one training went."""

    name: str
    steps: int = 0
    applied: int = 0
    loss: float = math.nan
    """Held-out loss at the end, in nats per byte."""

    died_at: int | None = None
    """First step after which a weight was not finite."""

    reports: list[SpikeReport] = field(default_factory=list)


def demonstrate(settings: Settings) -> bool:
    """Trains three times and prints what happens; True if the guard saved the run."""
    corpus, held_out = read_corpus()
    megabytes = len(corpus) / 1e6
    print(f"A byte-level GPT learns {megabytes:.1f} MB of Python's standard library, three times from one seed.\n")
    clean = _train("clean", settings, corpus, held_out)
    unguarded = _train("faults, no guard", settings, corpus, held_out, faulty=True)
    guarded = _train("faults, guarded", settings, corpus, held_out, faulty=True, guarded=True)
    saved = was_saved(clean, guarded, settings.faults.planned)
    print("", *_trip_table(settings.faults.planned, guarded), sep="\n")
    print("", *_run_table([clean, unguarded, guarded], saved), sep="\n")
    return saved


def was_saved(clean: Run, guarded: Run, planned: Sequence[Fault]) -> bool:
    """Whether every fault was caught under its true name, and the run ended close to the clean one."""
    named = len(guarded.reports) == len(planned) and all(map(names_fault, planned, guarded.reports))
    return named and guarded.died_at is None and guarded.loss <= clean.loss * (1 + TOLERANCE)


def names_fault(fault: Fault, report: SpikeReport) -> bool:
    """Whether ``report`` is of that fault; an infinite loss shows in the loss and in the layer next to it."""
    record = report.record
    if fault.layer is None:
        return record.step == fault.step and record.loss == math.inf and record.trigger_layer == "head"
    return (record.step, record.kind, record.trigger_layer) == (fault.step, fault.kind, fault.layer)


def _train(
    name: str, settings: Settings, corpus: Tensor, held_out: Tensor, *, faulty: bool = False, guarded: bool = False
) -> Run:
    torch.manual_seed(settings.seed)
    batches = torch.Generator().manual_seed(settings.seed)
    run, model, began = Run(name=name), GPT(), time.monotonic()
    base = AdamW(model.parameters(), lr=RATE)
    optimizer = _guard(base, model, settings) if guarded else base
    scheduler = LambdaLR(base, lambda step: min(1.0, (step + 1) / 20))
    with settings.faults.inject(model) if faulty else nullcontext():
        while run.steps < settings.steps and not _is_over(run, settings):
            loss = model(draw_batch(corpus, ROWS, batches))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            _note(run, loss, model, optimizer, settings, began)
    run.loss = _evaluate(model, held_out)
    if isinstance(optimizer, GuardedOptimizer):
        run.reports = optimizer.reports
        optimizer.close()
    return run


def _guard(base: Optimizer, model: GPT, settings: Settings) -> GuardedOptimizer:
    return GuardedOptimizer(base, model, spike_threshold=10.0, nan_action="skip", log_every=0, log_dir=settings.log_dir)


def _note(run: Run, loss: Tensor, model: GPT, optimizer: Optimizer, settings: Settings, began: float) -> None:
    record = optimizer.last_record if isinstance(optimizer, GuardedOptimizer) else None
    run.steps += 1
    run.applied += record is None or record.applied
    place = f"{run.name:<17} step {run.steps:>4}/{settings.steps}"
    if run.died_at is None and not all(bool(p.isfinite().all()) for p in model.parameters()):
        run.died_at = run.steps
        print(f"{place}  the weights are no longer finite", flush=True)
    if run.steps % (settings.steps // 10) == 0:
        print(f"{place}  loss {loss.item():6.3f}  {time.monotonic() - began:4.0f} s", flush=True)


def _is_over(run: Run, settings: Settings) -> bool:
    """Whether a dead run has been watched long enough."""
    return run.died_at is not None and run.steps >= run.died_at + settings.steps // 5


@torch.no_grad()
def _evaluate(model: GPT, held_out: Tensor) -> float:
    batches = torch.Generator().manual_seed(0)
    model.eval()
    losses = [float(model(draw_batch(held_out, ROWS, batches))) for _ in range(8)]
    return sum(losses) / len(losses)


def _trip_table(planned: Sequence[Fault], guarded: Run) -> list[str]:
    rows = [f"{'step':>5}  {'fault':<9} {'injected in':<24} {'guard named':<24} {'norm / baseline':>16}"]
    by_step = {report.record.step: report for report in guarded.reports}
    for fault in planned:
        report = by_step.get(fault.step)
        named = "nothing" if report is None else (report.record.trigger_layer or "the loss")
        ratio = "-" if report is None or report.record.ratio is None else f"{report.record.ratio:.0f}x"
        rows.append(f"{fault.step:>5}  {fault.kind:<9} {fault.layer or 'the loss':<24} {named:<24} {ratio:>16}")
    return rows


def _run_table(runs: Sequence[Run], saved: bool) -> list[str]:
    rows = [f"{'run':<17} {'steps':>6} {'applied':>8} {'trips':>6} {'held-out loss':>14}  verdict"]
    for run in runs:
        verdict = "reference" if run is runs[0] else f"died at step {run.died_at}" if run.died_at else "survived"
        if run is runs[-1]:
            verdict = "SAVED" if saved else "NOT SAVED"
        counts = f"{run.steps:>6} {run.applied:>8} {len(run.reports):>6}"
        rows.append(f"{run.name:<17} {counts} {run.loss:>14.3f}  {verdict}")
    return rows
