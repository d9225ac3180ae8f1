"""Rules and averaging in recorded runs: replayed from anywhere, averaged weights scored and saved, live ones beside."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from paceline.core.messages import Resume
from paceline.errors import UserError
from paceline.runs.checkpoint import write_checkpoint
from paceline.runs.recovery import rebuild
from paceline.runs.result import weights_sha256
from tests.support.recorded_runs import Record, Small, assert_same, checkpoint_now, ignore, records_of, small_task

pytestmark = pytest.mark.long  # left to `make test`

RULES = ["damped", "gap", "compensated", "dana", "dana-slim", "cached", "ringleader", "ringmaster:2", "buffered:3"]


@pytest.mark.parametrize("rule", [*RULES, "foresight-cached"])
def test_every_rule_replays_from_the_start_and_from_a_cut_to_the_same_bits(record: Record, rule: str) -> None:
    run = record(3, strategy="async", workers=3, rule=rule, split="iid")
    run.join_all()
    run.push_at_random(9)
    run.leave(1)
    run.push_at_random(4)
    checkpoint = checkpoint_now(run)
    run.join(1)
    run.run_to_the_end()
    for again, records in (
        (run.replay(), records_of(run)),
        (run.replay(checkpoint=checkpoint), records_of(run, checkpoint.log_offset)),
    ):
        again.feed(records)
        assert again.mismatch is None
        assert_same(again.server, run.server)
        assert torch.equal(again.server.evaluated, run.server.evaluated)
        assert all(torch.equal(again.server.rule_state[name], t) for name, t in run.server.rule_state.items())
    assert not torch.equal(run.server.evaluated, run.server.weights)
    assert (run.server.dropped > 1) == rule.startswith("ringmaster")


def test_the_averaged_weights_are_scored_and_saved_and_the_live_ones_lie_beside_them(record: Record) -> None:
    run = record(strategy="async", workers=2, rule="foresight-cached", eval_every=1.0)
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    run.close()
    saved, live = load_file(run.folder.weights_file), load_file(run.folder.live_weights_file)
    assert weights_sha256(saved) == result["weights_sha256"] != weights_sha256(live)
    assert (result["rule"], result["average"]) == ("foresight-cached", "on")
    task, model = small_task(), Small()
    assert torch.equal(saved["last.weight"], task.layout.views(run.server.rule_state["average"])["last.weight"])
    assert torch.equal(live["last.weight"], task.layout.views(run.server.weights)["last.weight"])
    model.load_state_dict(saved)
    assert task.test is not None
    right = model.eval()(task.test[0]).argmax(1) == task.test[1]
    assert int(right.sum()) == result["test_correct"]


def test_a_plain_run_has_live_weights_alone(record: Record) -> None:
    run = record(strategy="async", workers=2, rule="plain")
    run.join_all()
    run.push_at_random(10_000)
    result = run.host.finish()
    run.close()
    assert result["average"] == "none"
    assert run.server.evaluated is run.server.weights
    assert not run.folder.live_weights_file.exists()


def test_who_left_after_the_end_is_forgotten_when_the_run_goes_on(record: Record) -> None:
    """A stopped run is resumed: the cache of its workers is empty again, as if all had been lost."""
    run = record(strategy="async", workers=2, rule="cached", epochs=10.0)
    run.join_all()
    run.push_at_random(9)
    run.host.stop("interrupted")
    for worker in (0, 1):
        run.leave(worker)
    run.host.handle(Resume())
    assert not run.server.rule_state["cache"].any()
    torch.testing.assert_close(run.server.rule_state["total"], torch.zeros_like(run.server.weights), atol=1e-5, rtol=0)
    run.join_all()
    run.push_at_random(5)
    again = run.replay()
    again.feed(records_of(run))
    assert_same(again.server, run.server)


def test_rows_for_more_workers_than_there_is_memory_are_refused(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.system.memory.available_memory", lambda: 500)
    with pytest.raises(UserError, match=r"the table of rule foresight-cached needs .* of memory, .* use fewer workers"):
        record(strategy="async", workers=3, rule="foresight-cached")
    record(strategy="async", workers=3, rule="buffered:2", name="without rows")


def test_a_run_whose_checkpoint_is_of_another_rule_is_refused_naming_both(record: Record) -> None:
    other = record(strategy="async", workers=2, rule="dana", name="other")
    other.join_all()
    other.push_at_random(6)
    run = record(strategy="async", workers=2, rule="foresight-cached", average="none", name="mine")
    run.join_all()
    run.push_at_random(6)
    write_checkpoint(run.folder.checkpoints, checkpoint_now(other))
    with pytest.raises(UserError) as error:
        rebuild(run.new_server(), run.make_worker, run.task, run.config, run.folder, ignore)
    text = str(error.value)
    assert "made by rule dana (averaged) (" in text and "this run uses rule foresight-cached (" in text
    assert "velocities [2, " in text and "cache [2, " in text and "\n" not in text
    assert error.value.exit_code == 2
