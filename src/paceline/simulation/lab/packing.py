"""Which rows go side by side, and how many of them the device has room for."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import UserError
from paceline.settings.rules import average_horizon, chosen, rule_of
from paceline.simulation.lab.batch import Row

ROOM = 0.6
"""Share of the device's free memory that is planned with."""
ON_A_CPU = 4 * 2.0**30
ACTIVATIONS = {"lenet5": 25_000, "cnn": 125_000}
"""Floats that a sample needs on its way through the model, about; torch's own way takes more."""
TORCHS_OWN = 8


def families(rows: list[Row]) -> list[list[Row]]:
    """Rows that make the same kind of update."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        c = row.config
        kind = (c.model, row.trace.workers.shape[1], c.optimizer, c.momentum, c.nesterov, tuple(c.betas), c.batch_size)
        groups.setdefault((*kind, c.weight_decay, c.clip, _rule(row), average_horizon(c)), []).append(row)
    return list(groups.values())


def _rule(row: Row) -> str:
    """The rule by name; of `auto`, what it chose for this row."""
    return f"auto {chosen(row.config, row.skew).rule}" if row.config.rule == "auto" else row.config.rule


def cut_to_fit(kinds: list[list[Row]], room: float, device: torch.device) -> list[list[Row]]:
    """No family larger than there is room for, the longest first."""
    cut = []
    for members in kinds:
        size = int(len(members) * room / memory_of(members, device))
        if size < 1:
            config, need = members[0].config, memory_of(members[:1], device)
            raise UserError(
                f"one run of {config.model} with {config.workers} workers needs about {need / 2**30:.1f} GiB on "
                f"{device}, {room / 2**30:.1f} are there for it: use fewer workers or a larger device"
            )
        ordered = sorted(members, key=lambda row: len(row.trace))
        cut += [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return sorted(cut, key=lambda part: -max(len(row.trace) for row in part))


def room_on(device: torch.device) -> float:
    """Bytes to plan with."""
    return ROOM * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else ON_A_CPU


def memory_of(members: list[Row], device: torch.device) -> float:
    """Bytes that rows take side by side: weights, everybody's copies, the rule's rows, activations, what they read."""
    row = members[0]
    pushes = max(one.trace.workers.shape[1] for one in members)
    places = max(one.config.workers or 1 for one in members) if pushes == 1 else 1
    tables = 1 + rule_of(row.config).traits.knows_workers
    samples = pushes * row.config.batch_size
    longest = max(len(one.trace) for one in members)
    floats: int = row.initial.numel() * (places * tables + 10) + 2 * samples * longest
    floats += ACTIVATIONS[row.config.model] * samples * (1 if device.type == "cuda" else TORCHS_OWN)
    return 4.0 * len(members) * floats
