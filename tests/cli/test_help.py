"""The help: verbs in groups, a few settings at first, all of them on request, and the verb `help`."""

from __future__ import annotations

import re

import pytest

from paceline.cli.arguments import BASIC
from paceline.cli.main import GROUPS, VERBS, main
from paceline.config import FIELDS, SIMULATED_ONLY
from paceline.settings.features import SCRIPT_DECIDES
from paceline.settings.strategies import STRATEGIES

MANY_SETTINGS = ("train", "run", "server", "simulate", "plan", "bench")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the output of a command that prints a help text."""
    try:
        code = main([*words])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 0
    return capsys.readouterr().out


def flags(text: str) -> set[str]:
    """Return the flags that a help text lists."""
    heads = re.findall(r"^  (-.*?)(?:  |$)", text, re.MULTILINE)
    return {flag for head in heads for flag in re.findall(r"--[a-z][a-z0-9-]*", head)}


def test_the_overview_shows_every_verb_once_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "--help")
    assert sum(map(len, GROUPS.values())) == len(VERBS)
    for group, verbs in GROUPS.items():
        block = out.partition(f"\n{group}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in block.splitlines()] == [*verbs]


def test_train_shows_the_basic_settings_and_all_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    few, every = printed(capsys, "train", "--help"), printed(capsys, "train", "--help-all")
    basic = {f"--{name.replace('_', '-')}" for name in BASIC if name not in SIMULATED_ONLY}
    assert flags(few) == basic | {"--help", "--json", "--hosts", "--engine"}
    assert flags(every) >= {f"--{name.replace('_', '-')}" for name in FIELDS if name not in SIMULATED_ONLY}
    number = len(every.split("  --")) - len(few.split("  --"))
    assert few.rstrip().endswith("more flags.") and "'paceline train --help-all' shows" in few and number > 40


def test_every_basic_setting_exists_and_the_strategies_are_all_named() -> None:
    assert set(BASIC) <= set(FIELDS)
    names = re.findall(r"[a-z-]+", FIELDS["strategy"].metadata["help"].replace(" or ", " "))
    assert set(STRATEGIES) <= set(names)


@pytest.mark.parametrize("verb", MANY_SETTINGS)
def test_a_long_help_ends_with_how_to_see_the_rest(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    few, every = printed(capsys, verb, "--help"), printed(capsys, verb, "--help-all")
    hidden = int(re.findall(rf"'paceline {verb} --help-all' shows (\d+) more flags", few)[0])
    assert flags(few) < flags(every) and hidden > 10 and "--help-all' shows" not in every


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_run_shows_no_setting_that_a_loop_of_its_own_decides(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    decided = {f"--{name.replace('_', '-')}" for name in SCRIPT_DECIDES if name != "workers"}
    assert not decided & flags(printed(capsys, "run", flag))


def test_help_takes_a_verb_and_hands_on_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "help") == printed(capsys, "--help") == printed(capsys, "help", "help")
    for verb in VERBS:
        assert printed(capsys, "help", verb) == printed(capsys, verb, "-h")
    assert printed(capsys, "help", "train", "--help-all") == printed(capsys, "train", "--help-all")
    assert printed(capsys, "help", "reproduce", "mxnet") == printed(capsys, "reproduce", "mxnet", "--help")


def test_help_for_an_unknown_verb_offers_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "simulat"]) == 2
    assert "unknown verb 'simulat': did you mean 'simulate'" in capsys.readouterr().err
