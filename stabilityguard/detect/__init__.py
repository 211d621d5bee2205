"""Judging a step: pure policy over numbers."""
