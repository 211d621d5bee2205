"""The guard in the ``Trainer`` of Hugging Face Transformers, as a callback."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from torch import nn

from stabilityguard.distributed.deepspeed import EngineGuard, guard_engine
from stabilityguard.errors import ConfigurationError, DisagreementError, GradientSpikeError
from stabilityguard.integrations.accelerate import ask_for_overflow, engine_of
from stabilityguard.integrations.keywords import check_keywords, tracking
from stabilityguard.optimizer import STATE_KEY, GuardedOptimizer

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DeepSpeedOptimizerWrapper
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        "stabilityguard.integrations.huggingface needs transformers and accelerate: "
        'pip install "stabilityguard[huggingface]"'
    ) from error


class StabilityGuardCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Guards the optimizer of a ``Trainer``: ``Trainer(…, callbacks=[StabilityGuardCallback(spike_threshold=10.0)])``.

    The guard takes the place of the optimizer that the trainer's prepared one holds, when training begins, and gives
    it back when that ends; with DeepSpeed it stands before the engine's step. Norms are from before the trainer's
    clipping. The learning-rate scheduler is tracked. The guard's memory is part of the trainer's checkpoints (in
    ``trainer_state.json``), and taken up again by ``trainer.train(resume_from_checkpoint=…)``.

    Args:
        spike_threshold: ratio of norm to baseline that trips; greater than 1.
        options: further keywords of :class:`stabilityguard.GuardedOptimizer`.

    Raises:
        ConfigurationError: here for unknown keywords, when training begins for values that cannot be used, and for
            trainers whose optimizer, or DeepSpeed engine, cannot be guarded.
    """

    guard: GuardedOptimizer | EngineGuard | None
    """The guard of the present or the last training; None before the first. It has ``last_record`` and ``reports``."""

    def __init__(self, spike_threshold: float = 10.0, **options: Any) -> None:
        self._options = check_keywords({"spike_threshold": spike_threshold, **options})
        self.guard = None
        self.memory: str | None = None
        self.left_out: list[str] = []
        self._is_training = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Any,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Puts the guard behind the trainer's optimizer. A collective call over the ranks."""
        if self.left_out:
            raise ConfigurationError(
                f"restore_callback_states_from_checkpoint=True makes this callback anew without {self.left_out}, which "
                "JSON cannot hold; leave it False: the guard's memory is restored either way"
            )
        if self.guard is not None:
            self.guard.close()
        if not isinstance(optimizer, AcceleratedOptimizer):
            raise ConfigurationError(
                f"the trainer steps a {type(optimizer).__name__} that Accelerate has not prepared, which this callback "
                "cannot guard; pass Trainer(optimizers=(GuardedOptimizer(optimizer, model), None)) instead"
            )
        options = tracking(self._options, {"lr_scheduler": lr_scheduler})
        if isinstance(optimizer, DeepSpeedOptimizerWrapper):
            self.guard = guard_engine(engine_of(optimizer), **options)
            ask_for_overflow(optimizer)
        else:
            self.guard = _TrainersGuard(optimizer, model, **options)
            self.guard.control = control
        self._take_up(state)
        self._is_training = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Gives the trainer's optimizer back. Waits for a checkpoint in the making."""
        if self.guard is not None:
            self.guard.close()
        self._is_training = False

    def state(self) -> dict[str, Any]:
        """What the trainer writes into its checkpoints; waits for the device."""
        plain = {name: value for name, value in self._options.items() if _is_plain(value)}
        left_out = [name for name in self._options if name not in plain]
        memory = _pack(_memory_of(self.guard)) if self.guard is not None and self._is_training else None
        return {"args": plain, "attributes": {"memory": memory, "left_out": left_out}}

    def _take_up(self, state: TrainerState) -> None:
        """The memory in the checkpoint that the trainer goes on from, if there is one."""
        assert self.guard is not None
        # A checkpoint of an unguarded run has no entry, and the trainer wants one when it saves.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        memory = None if isinstance(saved, list) else saved["attributes"].get("memory")
        if memory is not None:
            unpacked = _unpack(memory)
            self.guard.load_state_dict(unpacked if isinstance(self.guard, EngineGuard) else {STATE_KEY: unpacked})


class _TrainersGuard(GuardedOptimizer):
    """A guard that tells the trainer when it ends the training."""

    control: Any = None

    def step(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            return super().step(*arguments, **keywords)
        except (GradientSpikeError, DisagreementError):
            self.control.should_training_stop = True
            raise


def _memory_of(guard: GuardedOptimizer | EngineGuard) -> dict[str, Any]:
    state = guard.state_dict()
    memory: dict[str, Any] = state if isinstance(guard, EngineGuard) else state[STATE_KEY]
    return memory


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _pack(memory: dict[str, Any]) -> str:
    """As text, bit for bit."""
    buffer = io.BytesIO()
    torch.save(memory, buffer)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _unpack(text: str) -> dict[str, Any]:
    memory: dict[str, Any] = torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)
    return memory
