"""Words behind a script: flags of Paceline are refused, those of the script are its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.errors import UserError
from paceline.runtimes.scripts.command import command_of

FLAGS = ("-n", "--workers", "--strategy", "--codec", "--listen", "--name", "--lr", "--epochs", "--restart-workers")
PARSERS = {
    "argparse": 'parser.add_argument("-s", "--strategy", default="fast")\n',
    "click": "def main(strategy, lr=0.1): pass\n",
    "a dataclass": "class Options:\n    strategy: str = 'fast'\n",
}


def script(folder: Path, text: str = "import paceline\n") -> str:
    (folder / "ok.py").write_text(text, encoding="utf-8")
    return str(folder / "ok.py")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-n 4", "-n is a flag of Paceline"),
        ("-n4", "-n is a flag of Paceline"),
        ("--lr 0.1 --strategy=sync", "--strategy is a flag of Paceline"),
        ("--stratgy sync", "--stratgy looks like Paceline's flag --strategy"),
        ("--name p3 --codec int8", "--codec is a flag of Paceline"),
    ],
)
def test_a_flag_of_paceline_behind_the_script_is_refused(words: str, says: str, tmp_path: Path) -> None:
    named = '"""paceline run --strategy sync -n 4 --codec int8 ok.py"""\nimport paceline\nnum_workers = 2\n'
    with pytest.raises(UserError) as refused:
        command_of([script(tmp_path, named), *words.split()], FLAGS)
    assert str(refused.value).startswith(f"{says}, and behind ok.py it would go to the script: put it before ok.py")


@pytest.mark.parametrize(
    "words", ["--lr 0.1 --epochs 3", "--name it", "--num-workers 4 --work-dir w", "--save_strategy no", "-v -1", "sync"]
)
def test_typical_flags_of_scripts_are_theirs(words: str, tmp_path: Path) -> None:
    command = [script(tmp_path), *words.split()]
    assert command_of(command, FLAGS) == command


@pytest.mark.parametrize("text", PARSERS.values(), ids=PARSERS)
def test_a_flag_that_the_script_takes_is_its_own(text: str, tmp_path: Path) -> None:
    command = [script(tmp_path, text), "--strategy", "fast"]
    assert command_of(command, FLAGS) == command


def test_all_behind_two_dashes_is_the_scripts(tmp_path: Path) -> None:
    path = script(tmp_path)
    assert command_of([path, "--", "--strategy", "fast", "--"], FLAGS) == [path, "--strategy", "fast", "--"]


def test_both_verbs_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    assert main(["run", path, "--strategy", "sync"]) == 2
    assert "write 'ok.py -- --strategy ...'" in capsys.readouterr().err
    assert main(["server", "--workers", "2", "--script", path, "--listen", "127.0.0.1:0", "--name", "p"]) == 2
    assert "--listen is a flag of Paceline" in capsys.readouterr().err
