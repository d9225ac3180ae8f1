"""Settings: one definition, three ways in (TOML, flags, Python), and a one-line error for each mistake."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.arguments import Parser, add_settings, config_from
from paceline.config import FIELDS, RunConfig, from_dict, read_toml, to_dict, to_toml
from paceline.errors import UserError

printable = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=12)
configs = st.builds(
    RunConfig,
    split=printable,
    shard_weights=st.none() | st.lists(st.floats(1e-3, 1e9), max_size=4),
    data_dir=st.none() | printable,
    workers=st.none() | st.integers(1, 65_535),
    lr=st.none() | st.floats(1e-30, 1e30),
    nesterov=st.booleans(),
    betas=st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
    steps=st.none() | st.integers(1, 2**62),
    seed=st.integers(0, 2**63 - 1),
    delay=st.none() | st.lists(printable, max_size=3),
    name=st.none() | st.from_regex(r"[a-z0-9.-]{1,12}", fullmatch=True).filter(lambda name: name.strip(".")),
)


@pytest.fixture(scope="module")
def toml_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "run.toml"


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) > 10
    return text


def parse(*arguments: str, file: str | None = None) -> RunConfig:
    parser = Parser("train", "for tests")
    add_settings(parser)
    return config_from(parser.parse_strictly(list(arguments)), file)


@given(config=configs)
def test_a_config_survives_toml(toml_file: Path, config: RunConfig) -> None:
    toml_file.write_text(to_toml(config), encoding="utf-8")
    assert RunConfig(**read_toml(toml_file)) == config


@given(config=configs)
def test_a_config_survives_a_dict(config: RunConfig) -> None:
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize("text", ['quote " and \\ back', "tab\tnew\nline", "\x01", "\x7f", "snow ☃ 🙂", "= # ["])
def test_odd_text_survives_toml(toml_file: Path, text: str) -> None:
    toml_file.write_text(to_toml(RunConfig(name=text)), encoding="utf-8")
    assert read_toml(toml_file)["name"] == text


def test_a_toml_key_may_be_written_with_dashes(toml_file: Path) -> None:
    toml_file.write_text("batch-size = 16\nlr = 1\ndelay = '30ms'\nscale-lr = 2\n")
    assert read_toml(toml_file) == {"batch_size": 16, "lr": 1.0, "delay": ["30ms"], "scale_lr": "2"}


def test_an_unknown_toml_key_names_the_file_and_the_nearest(toml_file: Path) -> None:
    toml_file.write_text("batch_sise = 16\n")
    with pytest.raises(UserError, match=r"run\.toml: unknown setting 'batch_sise': did you mean 'batch_size'") as error:
        read_toml(toml_file)
    one_line(error)


@pytest.mark.parametrize(
    "line",
    [
        "lr = 'fast'", "workers = 2.5", "workers = true", "nesterov = 1", "name = 3", "betas = 0.9",
        "betas = ['a', 'b']", "shard_weights = [true, false]", "lr = [0.1]", "seed = 'one'", "delay = 3",
        "delay = [1, 2]", "model = ['lenet5']",
    ],
)  # fmt: skip
def test_a_wrong_toml_type_is_a_user_error_that_names_the_key(toml_file: Path, line: str) -> None:
    toml_file.write_text(line + "\n")
    with pytest.raises(UserError, match=rf"run\.toml: {line.split()[0]} ") as error:
        read_toml(toml_file)
    one_line(error)


@pytest.mark.parametrize(
    "values", [{"lr": "fast"}, {"workers": 2.5}, {"workers": True}, {"betas": 0.9}, {"delay": 3}, {"name": 3}], ids=str
)
def test_a_wrong_type_in_python_is_the_same_user_error(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r": write (a|text)") as error:
        RunConfig(**values)
    one_line(error)


def test_equal_settings_are_written_alike() -> None:
    assert to_toml(RunConfig(lr=1, epochs=2)) == to_toml(RunConfig(lr=1.0, epochs=2.0))


@pytest.mark.parametrize("content", [b"lr = ", b"lr 0.1", b"\xff\xfe", b"lr = 1\nlr = 2\n"])
def test_a_file_that_is_no_toml_is_a_user_error(toml_file: Path, content: bytes) -> None:
    toml_file.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as TOML") as error:
        read_toml(toml_file)
    one_line(error)


def test_a_file_that_is_not_there_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        read_toml(tmp_path / "missing.toml")


BAD_VALUES: list[dict[str, Any]] = [
    {"workers": 0}, {"workers": -1}, {"workers": 65_536}, {"lr": 0.0}, {"lr": -0.1}, {"lr": math.nan}, {"lr": math.inf},
    {"momentum": 1.0}, {"momentum": -0.1}, {"momentum": math.nan}, {"betas": [0.9]}, {"betas": [0.9, 1.0]},
    {"weight_decay": -1.0}, {"weight_decay": math.nan}, {"clip": 0.0}, {"warmup": 1.0}, {"batch_size": 0},
    {"epochs": 0.0}, {"epochs": math.nan}, {"steps": 0}, {"seed": -1}, {"seed": 2**63}, {"threads": 0},
    {"target_accuracy": 0.0}, {"target_accuracy": 101.0}, {"eval_every": 0.0}, {"validation": 1.0},
    {"checkpoint_every": 0.0}, {"max_seconds": 0.0}, {"max_seconds": -1.0}, {"max_seconds": math.nan},
]  # fmt: skip


@pytest.mark.parametrize("values", BAD_VALUES, ids=str)
def test_a_bad_value_is_a_user_error_that_names_the_flag(values: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        RunConfig(**values)
    (name,) = values
    assert f"--{name.replace('_', '-')}" in one_line(error)


@pytest.mark.parametrize("values", BAD_VALUES, ids=str)
def test_a_bad_value_on_the_command_line_is_the_same_error(values: dict[str, Any]) -> None:
    ((name, value),) = values.items()
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    with pytest.raises(UserError) as expected:
        RunConfig(**values)
    with pytest.raises(UserError) as error:
        parse(f"--{name.replace('_', '-')}={text}")
    assert one_line(error) == one_line(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worker", "2"], "unknown flag '--worker': did you mean --workers"),
        (["--stratgy=sync"], "unknown flag '--stratgy': did you mean --strategy"),
        (["--workers", "two"], "'two' is not a whole number"),
        (["--workers", "2.5"], "'2.5' is not a whole number"),
        (["--lr", "fast"], "'fast' is not a number"),
        (["--betas", "a,b"], "'a,b' is not a list of numbers"),
        (["--lr"], "argument --lr needs a value"),
        (["--zzzz"], "unknown flag '--zzzz': see"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_a_bad_flag_is_a_user_error(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(*arguments)
    assert message in one_line(error)


def test_every_setting_has_a_flag_that_sets_it() -> None:
    samples = {"bool": "", "int": "7", "float": "0.5", "str": "text", "list[float]": "0.5,0.25", "list[str]": "text"}
    for name, spec in FIELDS.items():
        kind = str(spec.type).partition(" |")[0]
        value = "50" if name == "target_accuracy" else samples[kind]
        beside = ["--optimizer", "adam"] if name == "betas" else []
        config = parse(f"--{name.replace('_', '-')}", *([value] if value else []), *beside)
        assert getattr(config, name) != spec.default or getattr(config, name) is True, name


def test_flags_win_over_the_file_and_the_file_over_the_defaults(toml_file: Path) -> None:
    toml_file.write_text("lr = 0.5\nmomentum = 0.25\nnesterov = true\n")
    config = parse("--lr", "0.125", "--no-nesterov", file=str(toml_file))
    assert (config.lr, config.momentum, config.nesterov) == (0.125, 0.25, False)
    assert config.batch_size == RunConfig().batch_size


def test_only_what_is_given_now_has_to_have_an_effect(toml_file: Path) -> None:
    toml_file.write_text('optimizer = "adam"\nmomentum = 0.5\nsteps = 10\nepochs = 2\ntask = "m:f"\nmodel = "cnn"\n')
    assert parse(file=str(toml_file)).momentum == 0.5
    assert parse("--optimizer", "adamw", "--steps", "9", "--task", "m:g", file=str(toml_file)).epochs == 2.0
    for flags in (["--momentum", ".9"], ["--epochs", "6"], ["--model", "cnn"], ["--data-dir", "d"], ["--nesterov"]):
        with pytest.raises(UserError, match=flags[0]):
            parse(*flags, file=str(toml_file))
    assert not parse("--no-nesterov", file=str(toml_file)).nesterov


def test_a_split_has_a_second_name(toml_file: Path) -> None:
    toml_file.write_text('shard = "full"\n')
    assert parse("--shard", "full") == parse("--split", "full") == parse(file=str(toml_file)) != parse()


def test_a_delay_may_be_given_many_times() -> None:
    assert parse("--delay", "30ms", "--delay", "1s@1").delay == ["30ms", "1s@1"]


def test_the_defaults_are_those_of_the_published_runs() -> None:
    config = RunConfig()
    assert (config.batch_size, config.momentum, config.epochs, config.betas) == (32, 0.9, 6.0, [0.9, 0.999])


def test_a_config_cannot_be_changed_by_accident() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().lr = 1.0  # type: ignore[misc]
    first, second = RunConfig(), RunConfig()
    assert first.betas is not second.betas


def test_a_table_of_settings_is_told_where_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nlr = 0.1\n")
    with pytest.raises(UserError, match=r"at the top of the file, without tables: leave out the line \[train\]"):
        read_toml(file)


@pytest.mark.parametrize("name", ["", " "])
def test_a_name_that_is_empty_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="is not a folder name"):
        RunConfig(name=name)
