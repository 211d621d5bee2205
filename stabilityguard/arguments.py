"""What GuardedOptimizer was given: checked, and brought into form."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from torch import Tensor, nn
from torch.optim import Optimizer

from stabilityguard.config import GuardConfig
from stabilityguard.detect.detector import Detector
from stabilityguard.detect.ema import EmaDetector
from stabilityguard.distributed.digest import named_ranks
from stabilityguard.distributed.peers import Peers
from stabilityguard.errors import ConfigurationError
from stabilityguard.groups import parameters_of
from stabilityguard.measure.loss import scalar_loss
from stabilityguard.report.sinks import Sink


def make_detector(detector: str | Detector, config: GuardConfig) -> Detector:
    """The detector that was asked for, by name or as an object."""
    if detector == "ema":
        return EmaDetector(threshold=config.spike_threshold, alpha=config.ema_alpha, warmup=config.warmup_steps)
    if isinstance(detector, Detector) and not isinstance(detector, type):
        return detector
    raise ConfigurationError(f'detector must be "ema" or have the methods of Detector, but is {detector!r}')


def check_optimizer_and_model(base: object, model: object) -> None:
    """Raises ConfigurationError unless ``base`` is an optimizer that can be guarded, and ``model`` a module."""
    if isinstance(base, nn.Module) and isinstance(model, Optimizer):
        raise ConfigurationError("the optimizer comes first: GuardedOptimizer(optimizer, model)")
    if hasattr(model, "_take_model_step"):
        raise ConfigurationError(
            "a DeepSpeed engine updates by itself; guard it with "
            "stabilityguard.distributed.deepspeed.guard_engine(engine) instead"
        )
    if not isinstance(base, Optimizer):
        raise ConfigurationError(f"base_optimizer must be a torch.optim.Optimizer, but is a {type(base).__name__}")
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model must be a torch.nn.Module, but is a {type(model).__name__}")
    if any(getattr(type(inner), "is_guard", False) for inner in _chain(base)):
        raise ConfigurationError("this optimizer is guarded already; guard it once")
    if any(hasattr(p, "_in_backward_optimizers") for group in base.param_groups for p in group["params"]):
        raise ConfigurationError(
            "the parameters are updated inside backward (_apply_optimizer_in_backward), where nothing can stand before "
            "the update; call optimizer.step() after backward instead"
        )


def check_scaler_and_sinks(scaler: object, sinks: object) -> None:
    """Raises ConfigurationError for objects that are none."""
    if scaler is not None and not (hasattr(scaler, "is_enabled") and hasattr(scaler, "unscale_")):
        raise ConfigurationError(f"scaler must be a torch.amp.GradScaler, but is {scaler!r}")
    if not isinstance(sinks, (list, tuple)) or not all(isinstance(sink, Sink) for sink in sinks):
        raise ConfigurationError(f"sinks must be a list of objects with the methods of Sink, but is {sinks!r}")


def check_timeout(timeout: object) -> timedelta | None:
    """``timeout`` as it is; raises ConfigurationError unless it is a positive timedelta or None."""
    if timeout is None or (isinstance(timeout, timedelta) and timeout > timedelta()):
        return timeout
    raise ConfigurationError(f"timeout must be a positive datetime.timedelta or None, but is {timeout!r}")


def find_peers_again(base: Optimizer, ranks: tuple[int, ...], timeout: timedelta | None) -> Peers:
    """The peers of a copy of a guard over ``ranks``. A collective over them.

    Raises:
        ConfigurationError: there are other ranks here.
    """
    peers = Peers.of(None, parameters_of(base), timeout)
    if peers.ranks != ranks:
        raise ConfigurationError(
            f"a copy of a guard over {named_ranks(ranks)}, and there are {len(peers)} ranks here; "
            "make a new GuardedOptimizer instead"
        )
    return peers


def _chain(optimizer: object) -> Iterator[object]:
    """An optimizer and what it wraps, outermost first."""
    while optimizer is not None:
        yield optimizer
        optimizer = vars(optimizer).get("optimizer")


def as_loss(loss: Tensor | float | None) -> Tensor | None:
    """``loss`` as a detached 0-dim tensor; raises ConfigurationError for what is no scalar."""
    if loss is None:
        return None
    scalar = scalar_loss(loss)
    if scalar is None:
        raise ConfigurationError(f"loss must be a number or a tensor with one element, but is {loss!r}")
    return scalar
