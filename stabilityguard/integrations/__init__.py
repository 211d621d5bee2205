"""Adapters to trackers and trainers; each needs its package, the core needs none."""
