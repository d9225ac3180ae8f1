"""The server of users' own loops, built from what the first messages of their workers say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.assembly.core import make_aggregate, make_policy, make_rule, make_training
from paceline.assembly.optimizer_class import optimizer_maker
from paceline.assembly.run import codecs_of, make_roster
from paceline.config import RunConfig
from paceline.core.own_loop.compression import LoopCompression, optimizer_layouts
from paceline.core.own_loop.grouped import Grouped
from paceline.core.own_loop.settings import FollowsLoop, LoopLayout, OwnLoops
from paceline.core.own_loop.torch_optimizer import PREFIX, TorchOptimizer
from paceline.core.schedules import Budget
from paceline.core.server import Exchange, OptimizersServer, Server
from paceline.errors import UserError
from paceline.interfaces import Layout, Report, Rule, State
from paceline.settings.features import OF_OPTIMIZER
from paceline.settings.resolve import lr_scale, schedule_of
from paceline.settings.rules import AUTOMATIC, check_rule, chosen
from paceline.settings.strategies import strategy_of

Facts = Mapping[str, Any]


def loop_config(config: RunConfig, facts: Facts) -> RunConfig:
    """The settings of a run after its script has decided its own."""
    return dataclasses.replace(config, batch_size=int(facts["batch_size"]), **facts["settings"])


def decided_by_script(config: RunConfig, facts: Facts) -> list[str]:
    """The settings that this script decides where the config does not see it, beside `NOT_OF_LOOPS`.

    With an optimizer of its own, a script has a schedule of its own too, unless the config multiplies by another.
    """
    found, said = [], facts["settings"].keys()
    if "optimizer" in said:
        found += [name for name in OF_OPTIMIZER if name not in said]
        found += ["schedule"] if schedule_of(config).kind == "constant" else []
    return found + (["epochs", "epoch_mode"] if facts["epochs"] is None else [])


def loop_budget(config: RunConfig, facts: Facts) -> Budget:
    """How long own loops train: `steps` pushes or `epochs` of all workers, if script or flag say so; else unknown."""
    epoch_samples, steps = facts["num_samples"], facts["steps"]
    if facts["epochs"] is None and steps is None and config.steps is None:
        if schedule_of(config)[0] != "constant" or config.warmup:
            asked = f"--schedule {config.schedule}" if schedule_of(config)[0] != "constant" else "--warmup"
            what = f"{asked} follows the length of training, which your own loop decides"
            raise UserError(f"{what}: give session.prepare(..., epochs=E or steps=N), or use a torch scheduler")
        return Budget(0, epoch_samples or 1, per_worker=True)
    if facts["epochs"] is not None and epoch_samples is None and steps is None:
        what = "session.prepare(..., epochs=E): the number of samples in an epoch of this data is unknown"
        raise UserError(f"{what}; give steps=N, or let your loop decide when to stop")
    samples = max(1, round((facts["epochs"] or 0.0) * (epoch_samples or 0)))
    if steps is not None:
        samples = steps * config.batch_size
    return Budget(samples, epoch_samples or samples, config.steps, per_worker=steps is not None, pushes=steps)


def loop_server(
    config: RunConfig,
    facts: Facts,
    weights: Tensor,
    script: Path | None = None,
    initial: Sequence[State] = (),
) -> Server:
    """Make the server of own loops that begin with `weights`, and with the `initial` states of their optimizers."""
    server = _loop_server(config, facts, weights, script, initial)
    if server.assignments is not None and facts["loaders"]:
        server.assignments.next_pass = server.own_loops.next_pass
    return server


def _loop_server(
    config: RunConfig, facts: Facts, weights: Tensor, script: Path | None, initial: Sequence[State]
) -> Server:
    layout, training = Layout.from_rows(facts["layout"]), make_training(config, loop_budget(config, facts))
    described = facts["optimizers"]
    if not described:
        rule = make_rule(config, layout, skew=facts["skew"])
        exchange = Exchange(codecs_of(config, layout), aggregate=make_aggregate(config))
        return Server(weights, rule, make_policy(config), training, make_roster(config), exchange)
    factor = dataclasses.replace(training.schedule, base=training.schedule.base / (config.lr or 1.0))
    training = dataclasses.replace(training, schedule=factor)  # loops bring the learning rates themselves
    parts, begin, loops_said = [], 0, [LoopLayout.from_facts(one["loop"]) for one in described]
    layouts = optimizer_layouts(layout, loops_said)
    for number, (one, loop, own) in enumerate(zip(described, loops_said, layouts, strict=True)):
        state = initial[number] if number < len(initial) else {}
        make = partial(TorchOptimizer, optimizer_maker(one["class"], script), own, loop, state)
        rule, loops = _stepping(_config_of(config, one), facts["skew"], make, own, loop)
        if state and any(isinstance(target, Grouped) for target in loops.targets):
            what = f"rule {rule.name} has a momentum of its own"
            raise UserError(f"{what}, and the optimizer has a state already: use --rule plain, or a new optimizer")
        exchange = Exchange(codecs_of(config, own), aggregate=make_aggregate(config), own_loops=loops)
        parts.append((weights[begin : begin + own.size], rule, exchange))
        begin += own.size
    if len(parts) == 1:
        ((_, rule, exchange),) = parts
        return Server(weights, rule, make_policy(config), training, make_roster(config), exchange)
    endless = dataclasses.replace(training, budget=Budget(0, 1, per_worker=True))
    others = [
        Server(own, rule, make_policy(config), endless, make_roster(config), exchange)
        for own, rule, exchange in parts[1:]
    ]
    _, rule, exchange = parts[0]
    return OptimizersServer(weights, rule, make_policy(config), training, make_roster(config), exchange, others)


def loop_compression(config: RunConfig, worker: int, loops: Sequence[LoopLayout], layout: Layout) -> LoopCompression:
    """A worker's end of the exchange that its `loop_server` has: the same codecs, over the same parts of the model."""
    layouts = optimizer_layouts(layout, loops)
    return LoopCompression([codecs_of(config, one) for one in layouts], layouts, worker)


def _config_of(config: RunConfig, described: Facts) -> RunConfig:
    """The settings of the run for one of several optimizers; its learning rates come with the pushes."""
    settings = {name: value for name, value in described["settings"].items() if name != "lr"}
    return dataclasses.replace(config, **settings)


def _stepping(
    config: RunConfig, skew: float, make: Callable[[], TorchOptimizer], layout: Layout, loop: LoopLayout
) -> tuple[Rule, OwnLoops]:
    """The rule that steps one optimizer's weights, and what brings the loops' settings to it."""
    check_rule(config)
    followers: list[FollowsLoop] = []

    def make_optimizer() -> TorchOptimizer:
        followers.append(optimizer := make())
        return optimizer

    def group(rule: Rule) -> Rule:
        followers.append(grouped := Grouped(rule, layout, loop))
        return grouped

    rule = make_rule(config, layout, skew=skew, optimizer=make_optimizer, grouped=group)
    return rule, OwnLoops(loop, followers)


def announce_loop(config: RunConfig, facts: Facts, report: Report) -> None:
    """Say what the script brings, and which rule `auto` has chosen for its optimizers."""
    for text in facts["notes"]:
        report({"kind": "note", "text": text})
    strategy = strategy_of(config)
    if strategy.needs_no_server and (config.workers or 1) > 1:
        what = f"{config.strategy} of your own loop goes through a server; only built-in training does without one"
        report({"kind": "note", "text": what})
    pushes = strategy.pushes_per_step(config.workers or 1)
    if pushes > 1 and not strategy.is_local and lr_scale(config) == 1.0:
        samples = f" ({pushes * config.batch_size} samples)" if facts["loaders"] else ""
        what = f"one update averages {pushes} batches{samples} at the lr of one"
        report({"kind": "note", "text": f"{what}: a larger lr in the script, with warm-up, can make up for it"})
    if config.rule not in AUTOMATIC:
        return
    workers = config.workers or 1
    lines = []
    for one in facts["optimizers"]:
        own, name = _config_of(config, one), one["class"]["name"]
        line = chosen(own, facts["skew"]).line(workers).replace("script inside", f"{name} inside")
        if own.optimizer == "script" and workers > 1:
            line += f"; foresight and dana replace plain SGD only, not {name}"
        lines.append(line)
    for line in dict.fromkeys(lines or [chosen(config, facts["skew"]).line(workers)]):
        report({"kind": "note", "text": line})


def optimizer_state(server: Server, number: int) -> State:
    """The state of a user's optimizer as it steps in the server; of SGD under a rule with momentum, that momentum.

    The direction of a foresight rule is scaled so that torch's buffer makes a step of the same length.
    """
    one = server.by_optimizer[number]
    state = {name: tensor for name, tensor in one.rule_state.items() if name.startswith(PREFIX)}
    target, kept = next(iter(one.own_loops.targets), None), one.rule_state
    if state or not isinstance(target, Grouped):
        return dict(sorted(state.items()))
    if "direction" not in kept:
        raise UserError(f"rule {one.rule.name} keeps no state that torch's SGD could load: use --rule plain for that")
    shorter = float(kept["limit"][-1]) if "limit" in kept else 1.0
    scale = 1.0 / ((1.0 - float(getattr(target.rule, "momentum", 0.0))) * shorter)
    views = target.layout.views(kept["direction"] * scale).values()
    return {f"{PREFIX}{place}.momentum_buffer": view.clone() for place, view in enumerate(views)}
