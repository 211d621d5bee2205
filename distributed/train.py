"""Trains a small GPT on several ranks, with injected faults, without and with the guard; to be started by torchrun."""

from stabilityguard.demo.job import main

if __name__ == "__main__":
    raise SystemExit(main())
