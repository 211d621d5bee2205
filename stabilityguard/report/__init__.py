"""Telling what happened: records, reports, console, files."""
