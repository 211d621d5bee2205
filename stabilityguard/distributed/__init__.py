"""Agreement between ranks: who holds what, and one decision for all."""
