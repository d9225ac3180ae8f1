"""Checkpoint and restore: everything a server knows besides tensors, as JSON values."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from paceline.core.membership import Member
from paceline.core.server.server import Server


def server_facts(server: Server) -> dict[str, Any]:
    """Collect what a checkpoint needs besides tensors; only between updates, when no push is held."""
    assert server.can_checkpoint, "a checkpoint is taken between updates, when no push is held"
    roster, newest = server.roster, server.own_loops.newest
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
        **({"returning": sorted(roster.returning)} if roster.returning else {}),
        "policy": server.policy.facts(),
        "steps": sorted(roster.steps.items()),
        **({"skipped_steps": server.skipped} if server.skipped else {}),
        "taken": server.taken,
        **({"loops": {str(w): loop.tolist() for w, loop in sorted(newest.items())}} if newest else {}),
        **({"skipped": sorted(roster.skipped)} if roster.skipped else {}),
        **({"deals": roster.assignments.facts()} if roster.assignments is not None else {}),
        **({"optimizers": [server_facts(one) for one in others]} if (others := server.by_optimizer[1:]) else {}),
    }


def restore_server(server: Server, facts: dict[str, Any], weights: Tensor, rule_state: dict[str, Tensor]) -> None:
    """Put a new server into the state that `facts`, `weights` and `rule_state` were taken from."""
    server.weights.copy_(weights)
    for name, tensor in rule_state.items():
        if name in server.rule_state and server.rule_state[name].shape == tensor.shape:
            server.rule_state[name].copy_(tensor)
        else:  # of an optimizer that makes its state with its first steps
            server.rule_state[name] = tensor.clone()
    server.version, server.samples = facts["version"], facts["samples"]
    server.dropped, server.late, server.finished = facts["dropped"], facts["late"], facts["finished"]
    server.lost, server.pushes, server.replies = facts.get("lost", 0), facts["pushes"], facts["replies"]
    server.bytes_pushed = facts.get("bytes_pushed", server.pushes * server.nbytes)
    server.bytes_pulled = facts.get("bytes_pulled", server.replies * server.nbytes)
    server.staleness = Counter({int(value): count for value, count in facts["staleness"]})
    server.skipped, server.taken = facts.get("skipped_steps", 0), facts.get("taken", server.pushes)
    loops = facts.get("loops", {}).items()
    server.own_loops.newest = {int(worker): torch.tensor(loop, dtype=torch.float64) for worker, loop in loops}
    roster = server.roster
    members = {int(worker): Member(**fields) for worker, fields in facts["members"].items()}
    roster.skipped = {(worker, batch) for worker, batch in facts.get("skipped", ())}
    roster.replace_members(members, facts["awaited"])
    roster.returning = set(facts.get("returning", ()))
    roster.steps.clear()
    roster.steps.update(facts.get("steps", ()))
    if roster.assignments is not None:
        roster.assignments.restore(facts["deals"])
    server.policy.restore(facts["policy"])
