"""The lab: trains many simulated runs at once on one CPU or GPU."""
