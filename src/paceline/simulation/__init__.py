"""Simulated clusters under a virtual clock: runs, throughput forecasts, faults."""
