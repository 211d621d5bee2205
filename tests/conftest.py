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
    threads, variables = set(threading.enumerate()), dict(os.environ)
    variables.pop("PYTEST_CURRENT_TEST", None)
    yield
    left = [t for t in threading.enumerate() if t not in threads and not t.daemon]
    assert not left, f"threads left behind: {left}"
    now = dict(os.environ)
    now.pop("PYTEST_CURRENT_TEST", None)
    assert now == variables, "environment variables left behind"
