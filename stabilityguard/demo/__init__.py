"""The demonstration: one small training, with and without faults, with and without the guard."""
