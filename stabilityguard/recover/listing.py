"""The table of the checkpoints in a directory, to be read by people."""

from __future__ import annotations

import time
from pathlib import Path

from stabilityguard.errors import CheckpointError
from stabilityguard.recover.manifest import Manifest, find, step_of

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def table(directory: Path, *, verify: bool = False) -> tuple[list[str], bool]:
    """A headline and a line for each checkpoint, and whether all are whole, as far as was looked.

    Args:
        directory: that of the policy.
        verify: whether to read all files and compare their digests; else sizes alone are compared.
    """
    rows = [_row(path, manifest, verify=verify) for path, manifest in find(directory)]
    if not rows:
        return [f"no checkpoints in {directory}"], True
    headline = f"{'step':>10}  {'state':<9} {'ranks':>5} {'size':>10} {'age':>8}  remark"
    return [headline, *(line for line, _ in rows)], all(whole for _, whole in rows)


def _row(path: Path, manifest: Manifest | CheckpointError, *, verify: bool) -> tuple[str, bool]:
    if isinstance(manifest, CheckpointError):
        return f"{step_of(path):>10}  {'broken':<9} {'':>5} {'':>10} {'':>8}  {manifest}", False
    problems = list(manifest.problems(path) if verify else manifest.gaps(path))
    state = "broken" if problems else manifest.state
    remark = "; ".join(problems) or ("written as the run was stopped" if manifest.stopped else "")
    size, age = _size(manifest.bytes), _age(time.time() - manifest.created)
    line = f"{manifest.step:>10}  {state:<9} {manifest.world_size:>5} {size:>10} {age:>8}  {remark}"
    return line.rstrip(), not problems


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _age(seconds: float) -> str:
    span, unit = next(((span, unit) for span, unit in _UNITS if seconds >= span), _UNITS[-1])
    return f"{max(0, int(seconds // span))} {unit}"
