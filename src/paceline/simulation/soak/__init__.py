"""Soak tests: random simulated clusters with faults, checked against invariants after every message."""
