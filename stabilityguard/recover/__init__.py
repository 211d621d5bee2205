"""Undoing harm: the ladder of answers, buffers, snapshots."""
