"""Hundreds of hostile connections against `paceline server`: nothing of them counts, and nothing breaks."""

from __future__ import annotations

import hostile
import pytest

pytestmark = pytest.mark.real

COUNT = 600
MOST_ROWS = 16
"""Of refused connections: four a minute, and the run takes far less than four minutes."""


@pytest.mark.parametrize("transport", hostile.TRANSPORTS)
def test_hostile_connections_change_nothing(transport: str) -> None:
    found = hostile.measure(transport, COUNT, rate=1000.0, number=1)
    assert not found["exceptions"]
    assert found["exit_codes"] == (130, 130), "stopped by us, and the worker was told"
    assert found["only_honest"] and found["replays"]
    assert found["memory_most"] - found["memory_before"] < hostile.MOST_GROWTH_MIB
    assert found["sent"] == COUNT and found["refused"] >= COUNT
    assert found["messages"] == found["event_rows"] <= MOST_ROWS
