"""The files of an engine's own ``save_checkpoint``, inside a checkpoint of ours: for DeepSpeed's tools."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from stabilityguard.distributed.deepspeed.attach import require
from stabilityguard.distributed.deepspeed.overrides import overridden
from stabilityguard.errors import CheckpointError, ConfigurationError
from stabilityguard.recover.manifest import Exports

FORMAT = "deepspeed"
"""Name of the format, and of the directory within a checkpoint."""

NEEDS = ("checkpoint_engine", "use_node_local_storage", "save_checkpoint", "_copy_recovery_script", "module_state_dict")
"""Attributes of the engine without which it is not asked to write."""


def exports_of(engine: Any) -> Exports:
    """What has ``engine`` write into a checkpoint.

    Raises:
        ConfigurationError: it writes in the background, or where only ranks of the same node look.
    """
    require(engine, "the engine", NEEDS)
    writer = type(engine.checkpoint_engine).__name__
    if writer != "TorchCheckpointEngine":
        raise ConfigurationError(
            f"CheckpointPolicy.format={FORMAT!r} needs files that are there once they are written, but {writer} writes "
            "them later; take DeepSpeed's default checkpoint engine, or format='dcp'"
        )
    if engine.use_node_local_storage():
        raise ConfigurationError(
            f"CheckpointPolicy.format={FORMAT!r} needs one directory for all ranks, but DeepSpeed's configuration sets "
            "use_node_local_storage"
        )
    return {FORMAT: lambda path: _save(engine, path)}


def _save(engine: Any, path: Path) -> None:
    """Has all ranks write. Collective calls of DeepSpeed's, which all ranks make also where one cannot write."""
    failures: list[Exception] = []
    writer = engine.checkpoint_engine
    calls = [(writer, "makedirs"), (writer, "save"), (engine, "_copy_recovery_script")]
    calls += [(engine, "module_state_dict"), (engine.optimizer, "state_dict")]
    with overridden(*((of, name, _failing_later(getattr(of, name), failures)) for of, name in calls)):
        try:
            engine.save_checkpoint(str(path))
        except Exception as error:  # of the first rank's last file, say; the others wait behind it
            failures.append(error)
            import_module("deepspeed.comm").barrier()
    if failures:
        raise CheckpointError(f"DeepSpeed could not write: {failures[0]}") from failures[0]


def _failing_later(function: Callable[..., Any], failures: list[Exception]) -> Callable[..., Any]:
    """The same, but that it adds to ``failures`` in place of raising."""

    def called(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:
            failures.append(error)

    return called
