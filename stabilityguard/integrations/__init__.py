"""Adapters to trackers and trainers. Each module needs the package that it is named after; nothing else imports it."""

from __future__ import annotations

from importlib.util import find_spec


def require(package: str, *, extra: str) -> None:
    """Raises ImportError, with the command that helps, if ``package`` is not installed. Does not import it."""
    if find_spec(package) is None:
        raise ImportError(f'{package} is not installed; run: pip install "stabilityguard[{extra}]"', name=package)
