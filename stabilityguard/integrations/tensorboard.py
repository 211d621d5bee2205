"""TensorBoard: norms, ratios, trips and actions as scalars, reports as text."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from importlib import import_module
from typing import Any

from stabilityguard.errors import ConfigurationError
from stabilityguard.integrations import require
from stabilityguard.integrations.bridge import Bridge
from stabilityguard.integrations.metrics import PREFIX, STEP
from stabilityguard.report.console import alert_lines, alert_title
from stabilityguard.report.records import SpikeReport, StepRecord

require("tensorboard", extra="tensorboard")


class TensorBoardBridge(Bridge):
    """Writes ``sg/…`` to event files, over the guard's own count of steps.

    Args:
        writer: a ``SummaryWriter`` of the user's own, which is flushed and not closed; by default one in ``log_dir``,
            which is made at the first step.
        log_dir: where the bridge's own event files go; by default where ``SummaryWriter`` puts them.
        log_every: steps between two rows of layers' norms, those of trips apart; 0 for those of trips alone.
        layers: qualified names of layers whose norms are wanted besides the worst one's.

    Raises:
        ConfigurationError: an argument cannot be used.
    """

    def __init__(
        self,
        writer: Any | None = None,
        *,
        log_dir: str | None = None,
        log_every: int = 50,
        layers: Sequence[str] = (),
    ) -> None:
        if writer is not None and log_dir is not None:
            raise ConfigurationError("a writer has a log_dir already; pass one of the two")
        if writer is not None and not hasattr(writer, "add_scalar"):
            raise ConfigurationError(f"writer must be a SummaryWriter, but is {writer!r}")
        super().__init__(log_every=log_every, layers=layers)
        self._writer: Any = writer
        self._is_own, self._log_dir = writer is None, log_dir

    def _find_run(self) -> Hashable | None:
        return True

    def _enter(self) -> None:
        if self._writer is None:
            self._writer = import_module("torch.utils.tensorboard").SummaryWriter(self._log_dir)

    def _write(self, record: StepRecord, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            if name != STEP:
                self._writer.add_scalar(name, value, record.step, new_style=True)

    def _write_report(self, report: SpikeReport) -> None:
        lines = [alert_title(report.record), "", *(f"    {line}" for line in alert_lines(report))]
        if report.path is not None:
            lines += ["", f"`{report.path}`"]
        self._writer.add_text(f"{PREFIX}report", "\n".join(lines), report.record.step)
        self._writer.flush()

    def _leave(self) -> None:
        tally = self.tally
        told = [f"{name.replace('_', ' ')}: {value}" for name, value in tally.summary.items()]
        told += [f"steps: {tally.steps}"]
        told += [f"{name} was NaN or Inf: {times} times" for name, times in self._left_out.items()]
        self._writer.add_text(f"{PREFIX}summary", "\n\n".join(told), tally.steps)
        self._writer.flush()
        if self._is_own:
            self._writer.close()
