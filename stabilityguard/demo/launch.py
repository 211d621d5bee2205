"""Starts the demonstration on several ranks of this machine; needs no torch itself."""

from __future__ import annotations

import os
import subprocess
import sys

from stabilityguard.demo.settings import Settings


def launch(settings: Settings, ranks: int) -> int:
    """Runs it under torchrun, which passes on what the ranks print; its exit code."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    job = ["-m", "stabilityguard.demo.job", *settings.as_arguments()]
    return subprocess.run([*torchrun, *job], env=environment, check=False).returncode
