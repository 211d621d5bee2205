"""The one line around a DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch

from stabilityguard.arguments import check_scaler_and_sinks, check_timeout, make_detector
from stabilityguard.config import GuardConfig
from stabilityguard.detect.detector import Detector
from stabilityguard.distributed.deepspeed.attach import find_partition
from stabilityguard.distributed.deepspeed.partition import Partition
from stabilityguard.distributed.deepspeed.state import Books
from stabilityguard.distributed.deepspeed.subject import EngineSubject
from stabilityguard.distributed.peers import Peers
from stabilityguard.errors import ConfigurationError, GradientSpikeError
from stabilityguard.guard import Guard
from stabilityguard.guarded import Guarded
from stabilityguard.measure.window import LossScale
from stabilityguard.recover.state import check_tracked
from stabilityguard.report.sinks import Sink, log

BOOKS = "deepspeed"
"""Name in ``track`` of the engine's own counts, schedule and loss scale."""


def guard_engine(
    engine: Any,
    *,
    detector: str | Detector = "ema",
    track: Mapping[str, Any] | None = None,
    sinks: Sequence[Sink] = (),
    process_group: Any | None = None,
    timeout: timedelta | None = None,
    **settings: Any,
) -> EngineGuard:
    """Guards a DeepSpeed engine from now on; the training loop stays as it is. A collective over all ranks.

    Args:
        engine: what ``deepspeed.initialize`` returns first, of ZeRO stage 0 to 3.
        detector: as for ``GuardedOptimizer``, like all that follow.
        track: objects that a rollback rewinds; the engine's own schedule, loss scale and counts are so already.
        sinks: further consumers of records and reports.
        process_group: the ranks that step this engine; all of them by default.
        timeout: how long to wait for a lost rank.
        **settings: ``spike_threshold``, ``nan_action`` and all others of ``GuardedOptimizer`` but ``max_grad_norm``,
            ``scaler`` and ``shard_of``, which DeepSpeed's configuration decides.

    Raises:
        ConfigurationError: the engine cannot be guarded, or an argument cannot be used.
    """
    known = {field.name for field in fields(GuardConfig)} - {"max_grad_norm"}
    if unknown := sorted(settings.keys() - known):
        raise ConfigurationError(
            f"guard_engine does not take {', '.join(unknown)}; it takes {', '.join(sorted(known))}; clipping and loss "
            "scale are set in DeepSpeed's configuration"
        )
    check_scaler_and_sinks(None, sinks)
    tracked = check_tracked(track)
    if BOOKS in tracked:
        raise ConfigurationError(f"track[{BOOKS!r}] is the engine's own; name yours otherwise")
    config = GuardConfig(**settings)
    partition = find_partition(engine)
    peers = Peers.of(process_group, partition.parameters, check_timeout(timeout))
    return EngineGuard(engine, partition, config, make_detector(detector, config), tracked, sinks, peers)


class EngineGuard(Guarded):
    """Stands before the step that an engine takes on its model; see ``guard_engine``, which makes it."""

    def __init__(
        self,
        engine: Any,
        partition: Partition,
        config: GuardConfig,
        detector: Detector,
        tracked: dict[str, Any],
        sinks: Sequence[Sink],
        peers: Peers,
    ) -> None:
        self._engine, self._partition = engine, partition
        self._books = Books(engine, partition)
        self._take_model_step = engine._take_model_step
        self._lr_arguments: tuple[Any, ...] = ()
        self._error: GradientSpikeError | None = None
        self._subject = EngineSubject(engine, partition, self._books, self._take)
        self._guard = Guard(self._subject, config, detector, {**tracked, BOOKS: self._books}, sinks, peers)
        self._outer = "train_batch" if hasattr(engine, "train_batch") else "step"
        self._outer_step = getattr(engine, self._outer)
        engine._take_model_step = self._step
        setattr(engine, self._outer, self._step_and_raise)

    # The guarded step -------------------------------------------------------------------------------------------

    def _step(self, *lr_arguments: Any) -> None:
        """In the place of the engine's own; a collective over the ranks."""
        self._lr_arguments, self._books.was_restored = lr_arguments, False
        try:
            self._guard.step(lambda _: self._apply(), loss=self._loss_of_pipeline(), scale=self._scale())
        except GradientSpikeError as error:  # raised once the engine has put its books in order
            self._error, self._books.was_restored = error, False
            self._subject.discard_gradients(self._guard.window.reader, are_finite=True)

    def _step_and_raise(self, *arguments: Any, **options: Any) -> Any:
        result = self._outer_step(*arguments, **options)
        error, self._error = self._error, None
        if error is not None:
            raise error
        return result

    def _apply(self) -> None:
        self._partition.before_update()
        self._take()
        if not self._engine.was_step_applied():
            log.warning("DeepSpeed has skipped step %d by itself, which was healthy", self._guard.steps + 1)

    def _take(self) -> None:
        self._take_model_step(*self._lr_arguments)

    def _loss_of_pipeline(self) -> torch.Tensor | None:
        """The mean loss over micro-batches, on the last stage of a pipeline; None elsewhere."""
        total = getattr(self._engine, "total_loss", None)
        return total / self._engine.gradient_accumulation_steps() if isinstance(total, torch.Tensor) else None

    def _scale(self) -> LossScale:
        scale = self._partition.loss_scale
        if scale is None:
            return LossScale()
        factor = torch.tensor(scale, dtype=torch.float64)
        return LossScale(at_backward=factor, at_step=factor, found_inf=torch.zeros(()))

    # What the guard remembers ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the guard remembers, for the ``client_state`` of a checkpoint of the user's own."""
        return self._guard.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes that back."""
        self._guard.load_state_dict(state)

    def close(self) -> None:
        """Gives the engine its own step back, and closes the files. Waits for a checkpoint in the making."""
        if self._engine is not None:
            del self._engine._take_model_step
            delattr(self._engine, self._outer)
            self._guard.close()
            self._engine = None
