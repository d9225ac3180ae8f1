"""Local steps by speed: slower workers make fewer, so that all push at about the same time (arXiv 2401.09135)."""

from __future__ import annotations

from paceline.core.messages import SetLocalSteps
from paceline.core.server import Server

SMOOTHING = 0.3  # weight of the newest push in a worker's mean seconds per step
CHANGE_THRESHOLD = 0.1  # the number of a worker changes only if it differs by more than this share


class StepBalancer:
    """Turns measured seconds per step into numbers of local steps: `InnerLoop.steps` for the fastest worker.

    The others make fewer, in proportion. Each decision is an input of the server, so a replay reads it from the log.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def look(self, server: Server, worker: int, seconds: float) -> SetLocalSteps | None:
        """Learn that `worker` took `seconds` per step; return an input for the server, to handle before that push."""
        member = server.members.get(worker)
        if server.inside is None or member is None or not member.live or seconds <= 0.0:
            return None
        before = self._seconds.get(worker, seconds)
        self._seconds[worker] = before + SMOOTHING * (seconds - before)
        known = [w for w, m in server.members.items() if m.live and not m.inactive and w in self._seconds]
        fastest = min((self._seconds[w] for w in known), default=self._seconds[worker])
        wanted = max(1, round(server.inside.steps * fastest / self._seconds[worker]))
        now = server.steps.get(worker, server.inside.steps)
        return SetLocalSteps(worker, wanted) if abs(wanted - now) > CHANGE_THRESHOLD * now else None
