import signal

import pytest

from stabilityguard.recover import stop


@pytest.fixture(autouse=True)
def nobody_else_listens():
    """Guards of other tests that were never closed."""
    before = signal.getsignal(signal.SIGTERM)
    stop._handler._requests.clear()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"
