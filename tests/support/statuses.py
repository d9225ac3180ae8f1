"""Statuses of runs as hypothesis draws them."""

from __future__ import annotations

from hypothesis import strategies as st

from paceline.analysis.status import ENDED, UNDER_WAY, RunStatus, WorkerStatus

SHARES = st.dictionaries(st.sampled_from(["computing", "sending", "waiting", "server"]), st.floats(0.0, 1.0))
SECONDS = st.none() | st.floats(0.0, 1e6)
WORKERS = st.builds(
    WorkerStatus,
    worker=st.integers(0, 9999),
    state=st.sampled_from(["live", "held", "paused", "stalled", "lost", "awaited", "done"]),
    shares=SHARES,
    step_seconds=SECONDS,
    sending_seconds=SECONDS,
    steps=st.integers(0, 10**6),
    pushes=st.none() | st.integers(0, 10**6),
    staleness=st.none() | st.floats(0.0, 9999.0),
    ago=SECONDS,
    silent=SECONDS,
    normal=SECONDS,
)
RUNS = st.builds(
    RunStatus,
    run=st.just("runs/async-lenet5-4w-20260101-000000"),
    strategy=st.sampled_from(["async", "bounded:3"]),
    model=st.just("lenet5"),
    num_workers=st.integers(1, 10_000),
    status=st.sampled_from([*UNDER_WAY, *ENDED, "killed"]),
    updates=st.integers(0, 10**7),
    fraction=st.none() | st.floats(0.0, 1.0),
    rate=st.none() | st.floats(0.0, 1e6),
    seconds=st.floats(0.0, 1e6),
    seconds_left=SECONDS,
    quiet_seconds=SECONDS,
    step_factor=st.none() | st.floats(0.0, 1.0),
    span=SECONDS,
    workers=st.lists(WORKERS, max_size=6).map(tuple),
)
