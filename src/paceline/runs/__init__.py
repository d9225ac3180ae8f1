"""The files of a run: log, checkpoints, snapshots, events, result; replay and recovery from them."""
