"""What every test gets: one thread, a fixed seed, a directory of its own, and a check for what it leaves behind."""

import os
import threading

import pytest
import torch


@pytest.fixture(autouse=True)
def _surroundings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    threads, variables = set(threading.enumerate()), environment()
    yield
    left = [t for t in threading.enumerate() if t not in threads and not t.daemon]
    assert not left, f"threads left behind: {left}"
    assert environment() == variables, "environment variables left behind"


def environment():
    """The environment without what pytest and torch's compiler write there by themselves."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")}
