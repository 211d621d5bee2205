"""GuardedOptimizer: the drop-in that stands in front of any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabilityguard.arguments import (
    as_loss,
    check_optimizer_and_model,
    check_scaler_and_sinks,
    check_timeout,
    find_peers_again,
    make_detector,
)
from stabilityguard.closures import GuardedClosure, advise_on_climbing, climbs_first
from stabilityguard.config import Budget, CheckpointPolicy, GuardConfig, Moments, NanAction, SnapshotPolicy
from stabilityguard.detect.detector import Detector
from stabilityguard.detect.statistics import Statistics
from stabilityguard.distributed.peers import ALONE, Peers
from stabilityguard.distributed.shards import ShardOf
from stabilityguard.errors import ConfigurationError
from stabilityguard.groups import parameters_of
from stabilityguard.guard import Guard
from stabilityguard.guarded import Guarded
from stabilityguard.lazy_state import only_creates_state
from stabilityguard.measure.loss import scalar_loss
from stabilityguard.measure.window import LossScale
from stabilityguard.prepared import Prepared, base_of
from stabilityguard.recover.state import check_tracked
from stabilityguard.report.sinks import Sink
from stabilityguard.scaling import LossScaling, has_overflowed
from stabilityguard.subject import OptimizerSubject

STATE_KEY = "stabilityguard"
"""Entry of the optimizer's ``state_dict`` that holds the guard's memory; an unguarded optimizer ignores it."""


class GuardedOptimizer(Guarded, Optimizer):
    """An optimizer that looks at the gradients before it lets ``base_optimizer`` use them.

    Norms are measured when a backward pass ends, before the user's next line, and compared per layer with a moving
    average. A step whose gradients spike or are not finite is skipped, rolled back or raised, as ``nan_action`` says.

    Args:
        base_optimizer: any torch optimizer; it is used as it is, and reachable as ``base_optimizer``.
        model: the module that holds its parameters; names the layers.
        spike_threshold: ratio of norm to baseline that trips; greater than 1.
        nan_action: ``"skip"``, ``"rollback"`` or ``"raise"``: what a trip does.
        log_every: steps between summaries on stdout; 0 for none.
        log_dir: directory for ``spike_step<N>.json`` and ``journal.jsonl``.
        ema_alpha: weight of the newest norm in the baseline, in (0, 1].
        warmup_steps: healthy samples that a layer needs before its spikes are judged; NaN and Inf always trip.
        verbose: whether to print to stdout.
        detector: ``"ema"`` or an object with the methods of :class:`stabilityguard.detect.detector.Detector`.
        max_grad_norm: clip healthy gradients to this global L2 norm; costs no second reading of them.
        scaler: the ``torch.amp.GradScaler`` in use, so that norms are reported unscaled; it is tracked, too.
        snapshots: when to copy the training state to RAM; on by default where ``nan_action="rollback"``, unless False.
        checkpoints: when to write it to disk, and where; makes ``resume()`` and leaving on SIGTERM possible.
        budget: how many skips in a row, and rollbacks, are tolerated.
        track: objects with ``state_dict`` and ``load_state_dict`` that a rollback rewinds, too, by name.
        moments: ``"reset_trigger_layer"`` lets the optimizer start anew, after a rollback, with the layer that tripped.
        replay_data: whether a rollback rewinds ``track["dataloader"]``, too; else the data go on.
        sinks: further consumers of records and reports; those of the first rank are fed.
        process_group: the ranks that step this model; all of them by default. Constructing is a collective over them.
        timeout: how long to wait for a lost rank; the group's own timeout by default.
        drift_check_every: steps between two comparisons of replicated parameters over ranks; 0 for none.
        shard_of: for parameters that were split by hand, maps a parameter's qualified name and tensor to what tells
            this rank's part from others', such as its rank in a tensor-parallel group; None for replicas.

    Raises:
        ConfigurationError: an argument cannot be used, or the optimizer is guarded already or steps inside backward.
    """

    is_guard = True
    """Marks guards, so that none is put around another."""

    # A scaler then calls step() on every step; see stabilityguard.scaling.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        base_optimizer: Optimizer,
        model: nn.Module,
        spike_threshold: float = 10.0,
        nan_action: NanAction = "skip",
        log_every: int = 50,
        log_dir: str = "./sg_logs",
        ema_alpha: float = 0.01,
        warmup_steps: int = 10,
        verbose: bool = True,
        *,
        detector: str | Detector = "ema",
        max_grad_norm: float | None = None,
        scaler: Any | None = None,
        snapshots: SnapshotPolicy | Literal[False] | None = None,
        checkpoints: CheckpointPolicy | None = None,
        budget: Budget | None = None,
        track: Mapping[str, Any] | None = None,
        moments: Moments = "keep",
        replay_data: bool = False,
        sinks: Sequence[Sink] = (),
        process_group: Any | None = None,
        timeout: timedelta | None = None,
        drift_check_every: int = 0,
        shard_of: ShardOf | None = None,
    ) -> None:
        # Not super().__init__(): groups, state, defaults and hooks stay the base optimizer's own, seen live.
        base_optimizer, front = base_of(base_optimizer)
        check_optimizer_and_model(base_optimizer, model)
        scaler = front.scaler if scaler is None and front is not None else scaler
        config = GuardConfig(
            spike_threshold=spike_threshold,
            nan_action=nan_action,
            log_every=log_every,
            log_dir=log_dir,
            ema_alpha=ema_alpha,
            warmup_steps=warmup_steps,
            verbose=verbose,
            max_grad_norm=max_grad_norm,
            snapshots=snapshots,
            checkpoints=checkpoints,
            moments=moments,
            replay_data=replay_data,
            budget=Budget() if budget is None else budget,
            drift_check_every=drift_check_every,
        )
        parts = {"model": model, "config": config, "detector": detector, "scaler": scaler, "track": track}
        parts |= {"shard_of": shard_of, "timeout": timeout}
        peers = Peers.of(process_group, parameters_of(base_optimizer), check_timeout(timeout))
        self._assemble(base_optimizer, parts, sinks, peers)
        self._prepared.come_behind(front)

    def _assemble(self, base: Optimizer, parts: dict[str, Any], sinks: Sequence[Sink], peers: Peers) -> None:
        """Sets everything up from what copies and pickles carry, and the sinks and peers, which they do not."""
        config, scaler = parts["config"], parts["scaler"]
        check_scaler_and_sinks(scaler, sinks)
        tracked = check_tracked(parts["track"])
        if scaler is not None and scaler not in tracked.values():
            tracked["scaler"] = scaler
        detector = make_detector(parts["detector"], config)
        subject = OptimizerSubject(parts["model"], base, parts["shard_of"])
        self._guard = Guard(subject, config, detector, tracked, sinks, peers)
        self.base_optimizer, self._parts = base, parts
        self._scaling, self._prepared = LossScaling(scaler), Prepared(self)
        self._closed = False
        self._lost_peers: tuple[int, ...] = ()
        advise_on_climbing(base)

    # The guarded step -------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None, *, loss: Tensor | float | None = None) -> Any:
        """Applies the base optimizer's update if the gradients are healthy, else acts as the policy says.

        Waits for the device once, for one copy to the host. Over several ranks a collective: one all-reduce, and where
        something is wrong a gathering of what each rank saw.

        Args:
            closure: as for the base optimizer. It is evaluated once before anything is judged.
            loss: the step's loss for records and reports, where the model does not return it itself.

        Returns:
            What the base optimizer returns; for a step that was not applied, the closure's loss or None.

        Raises:
            GradientSpikeError: the policy ends in raising; on every rank.
            DisagreementError: the ranks are not in one state, or (ReplicaDriftError) their replicas are not.
            ConfigurationError: ``closure`` cannot be called, or ``loss`` is no scalar.
        """
        if closure is not None and not callable(closure):
            raise ConfigurationError(f"step() takes a closure, but got {closure!r}; pass a loss as step(loss=loss)")
        if self._prepared.accumulates:
            return None
        if self._prepared.scales:
            return self._prepared.scaled_step(closure, loss)
        if self._lost_peers and not self._closed:
            self._find_peers()
        scale = self._scaling.read(self)
        if self._closed or only_creates_state(self.base_optimizer, self._guard, closure):
            return self._pass_through(closure, scale)
        self._scaling.refuse_float16(self._guard.window.reader, scale, self.base_optimizer)
        evaluations = None if closure is None else self._evaluations(closure, scale)
        if loss is None and evaluations is not None:
            loss = scalar_loss(evaluations.first)
        self._scaling.advise(scale)
        result = self._guard.step(
            lambda statistics: self._update(statistics, evaluations, scale), loss=as_loss(loss), scale=scale
        )
        self._after_step()
        applied = self._guard.chronicle.records[-1].applied
        return result if applied or evaluations is None else evaluations.first

    def _evaluations(self, closure: Callable[[], Any], scale: LossScale) -> GuardedClosure:
        gradients_are_there = climbs_first(self.base_optimizer) and self._guard.window.measured
        return GuardedClosure(closure, self._guard, scale, evaluate=not gradients_are_there)

    def _update(self, statistics: Statistics, evaluations: GuardedClosure | None, scale: LossScale) -> Any:
        reader, limit = self._guard.window.reader, self._guard.config.max_grad_norm
        self._scaling.unscale(reader, scale)
        if limit is not None:
            reader.clip_(limit, statistics.norm_at_step)
        return self.base_optimizer.step() if evaluations is None else evaluations.run(self.base_optimizer)

    def _after_step(self) -> None:
        record = self._guard.chronicle.records[-1]
        ballots = self._guard.deliberation.agreement.ballots
        scaled = {rank: b.overflowed for rank, b in zip(self._guard.peers.ranks, ballots, strict=True) if b.scaled}
        self._scaling.share(self, scaled, rank=self._guard.peers.ranks[self._guard.peers.place])
        if record.action == "rollback":
            self._scaling.forgive(self)
        self._prepared.tell(skipped=record.action == "skip")
        if not record.applied:
            # A scheduler made before wrapping watches the base's step(), and would complain that there was none.
            self.base_optimizer._opt_called = True  # type: ignore[attr-defined]

    def _pass_through(self, closure: Callable[[], Any] | None, scale: LossScale) -> Any:
        if has_overflowed(scale):
            return None
        self._scaling.refuse_float16(self._guard.window.reader, scale, self.base_optimizer)
        self._scaling.unscale(self._guard.window.reader, scale)
        return self.base_optimizer.step() if closure is None else self.base_optimizer.step(closure)

    def close(self) -> None:
        """Detaches every hook and closes the files; from then on ``step()`` is the base optimizer's.

        Waits for a checkpoint in the making. Not a collective.
        """
        if not self._closed:
            self._closed = True
            self._guard.close()
            self._prepared.hold(self.base_optimizer)

    # The optimizer in front ---------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimizer's parameter groups, live."""
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The base optimizer's state, live."""
        return self.base_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The base optimizer's defaults, live."""
        return self.base_optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, and what was measured of them."""
        if self._prepared.accumulates:
            return
        self._guard.forget_gradients()
        self.base_optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base optimizer; its layers start without history, and snapshots start anew."""
        self.base_optimizer.add_param_group(param_group)
        self._guard.check_parameters()

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's, with the guard's memory under ``"stabilityguard"``."""
        return {**self.base_optimizer.state_dict(), STATE_KEY: self._guard.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a guarded or unguarded optimizer's state, or the guard's part alone; the coming step starts there."""
        of_base = {k: v for k, v in state_dict.items() if k != STATE_KEY}
        if of_base:
            self.base_optimizer.load_state_dict(of_base)
        self._guard.load_state_dict(state_dict.get(STATE_KEY))

    def __getattr__(self, name: str) -> Any:
        if name == "base_optimizer":
            raise AttributeError(name)
        return getattr(self.base_optimizer, name)

    def __repr__(self) -> str:
        return f"GuardedOptimizer({self.base_optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: everything but hooks, snapshots, checkpoints, reports and sinks."""
        parts = {**self._parts, "config": replace(self._parts["config"], checkpoints=None)}
        ranks = self._guard.peers.ranks
        guard = self._guard.state_dict()
        return {"base_optimizer": self.base_optimizer, "parts": parts, "guard": guard, "ranks": ranks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._assemble(state["base_optimizer"], state["parts"], (), ALONE)
        self._guard.load_state_dict(state["guard"])
        self._lost_peers = state["ranks"] if len(state["ranks"]) > 1 else ()

    def _find_peers(self) -> None:
        """Has a copy decide with the ranks that the original decided with. A collective over them."""
        peers = find_peers_again(self.base_optimizer, self._lost_peers, self._parts["timeout"])
        guard = self._guard.state_dict()
        self._guard.close()
        self._assemble(self.base_optimizer, self._parts, (), peers)
        self._guard.load_state_dict(guard)
