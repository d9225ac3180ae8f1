"""Group runs into batches that make the same kind of update and fit the device's memory."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import UserError
from paceline.settings.preprocessing import ways_of
from paceline.settings.rules import AUTOMATIC, average_horizon, chosen, rule_of
from paceline.simulation.lab.batch import LabRun

MEMORY_SHARE = 0.6  # share of the device's free memory to use
CPU_MEMORY = 4 * 2.0**30
ACTIVATIONS = {"lenet5": 25_000, "cnn": 125_000, "resnet20": 230_000}  # approximate floats per sample
AUTOGRAD_FACTOR = 8  # autograd takes so many times the floats of the kernels


def group_rows(rows: list[LabRun]) -> list[list[LabRun]]:
    """Group runs that make the same kind of update."""
    groups: dict[tuple[Any, ...], list[LabRun]] = {}
    for row in rows:
        c = row.config
        rule = f"{c.rule} {chosen(c, row.skew).rule}" if c.rule in AUTOMATIC else c.rule
        kind = (c.model, row.trace.workers.shape[1], c.optimizer, c.momentum, c.nesterov, tuple(c.betas), c.batch_size)
        groups.setdefault((*kind, c.weight_decay, c.clip, rule, average_horizon(c), ways_of(c)), []).append(row)
    return list(groups.values())


def split_to_fit(kinds: list[list[LabRun]], room: float, device: torch.device) -> list[list[LabRun]]:
    """Split groups into batches that fit `room` bytes, the longest runs first."""
    batches = []
    for members in kinds:
        size = int(len(members) * room / memory_of(members, device))
        if size < 1:
            config, need = members[0].config, memory_of(members[:1], device)
            raise UserError(
                f"one run of {config.model} with {config.workers} workers needs about {need / 2**30:.1f} GiB on "
                f"{device}, {room / 2**30:.1f} are available: use fewer workers or a larger device"
            )
        ordered = sorted(members, key=lambda row: len(row.trace))
        batches += [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return sorted(batches, key=lambda part: -max(len(row.trace) for row in part))


def available_memory(device: torch.device) -> float:
    """Return the bytes that the lab may use on the device."""
    return MEMORY_SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else CPU_MEMORY


def memory_of(members: list[LabRun], device: torch.device) -> float:
    """Return the bytes of a batch of runs: weights, workers' copies, rule state, activations and inputs."""
    row = members[0]
    pushes = max(one.trace.workers.shape[1] for one in members)
    places = max(one.config.workers or 1 for one in members) if pushes == 1 else 1
    tables = 1 + rule_of(row.config).traits.knows_workers
    samples = pushes * row.config.batch_size
    longest = max(len(one.trace) for one in members)
    floats: int = row.initial.numel() * (places * tables + 10) + 2 * samples * longest
    floats += ACTIVATIONS[row.config.model] * samples * (1 if device.type == "cuda" else AUTOGRAD_FACTOR)
    return 4.0 * len(members) * floats
