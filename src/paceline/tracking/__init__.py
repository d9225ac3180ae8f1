"""Sends the events of a run to experiment trackers, each in its own process."""
