"""Checkpoint and restore: everything a server knows besides tensors, as JSON values."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from torch import Tensor

from paceline.core.membership import Member
from paceline.core.server.server import Server


def server_facts(server: Server) -> dict[str, Any]:
    """Collect what a checkpoint needs besides tensors; only between updates, when no push is held."""
    assert server.can_checkpoint, "a checkpoint is taken between updates, when no push is held"
    roster = server.roster
    return {
        "rule": server.rule.name,
        "version": server.version,
        "samples": server.samples,
        "dropped": server.dropped,
        "late": server.late,
        "lost": server.lost,
        "pushes": server.pushes,
        "replies": server.replies,
        "bytes_pushed": server.bytes_pushed,
        "bytes_pulled": server.bytes_pulled,
        "codecs": server.codecs.names,
        "finished": server.finished,
        "staleness": sorted(server.staleness.items()),
        "members": {str(worker): asdict(member) for worker, member in roster.members.items()},
        "awaited": sorted(roster.pending),
        "policy": server.policy.facts(),
        "steps": sorted(roster.steps.items()),
        **({"lr_factors": sorted(server.lr_factors.items())} if server.lr_factors else {}),
        **({"skipped": sorted(roster.skipped)} if roster.skipped else {}),
        **({"deals": roster.assignments.facts()} if roster.assignments is not None else {}),
    }


def restore_server(server: Server, facts: dict[str, Any], weights: Tensor, rule_state: dict[str, Tensor]) -> None:
    """Put a new server into the state that `facts`, `weights` and `rule_state` were taken from."""
    server.weights.copy_(weights)
    for name, tensor in server.rule_state.items():
        tensor.copy_(rule_state[name])
    server.version, server.samples = facts["version"], facts["samples"]
    server.dropped, server.late, server.finished = facts["dropped"], facts["late"], facts["finished"]
    server.lost, server.pushes, server.replies = facts.get("lost", 0), facts["pushes"], facts["replies"]
    server.bytes_pushed = facts.get("bytes_pushed", server.pushes * server.nbytes)
    server.bytes_pulled = facts.get("bytes_pulled", server.replies * server.nbytes)
    server.staleness = Counter({int(value): count for value, count in facts["staleness"]})
    server.lr_factors = {int(worker): factor for worker, factor in facts.get("lr_factors", ())}
    roster = server.roster
    members = {int(worker): Member(**fields) for worker, fields in facts["members"].items()}
    roster.skipped = {(worker, batch) for worker, batch in facts.get("skipped", ())}
    roster.replace_members(members, facts["awaited"])
    roster.steps.clear()
    roster.steps.update(facts.get("steps", ()))
    if roster.assignments is not None:
        roster.assignments.restore(facts["deals"])
    server.policy.restore(facts["policy"])
