"""The script of a served run on a worker's machine: found where it should be, and the same code, or one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.runs.recording import ScriptCall
from paceline.runtimes.scripts.remote.code import ServedScript, hashes_of

SCRIPT = "import paceline\nimport sizes\nfrom parts import first\n"


def write(folder: Path, **other: str) -> Path:
    files = {"train.py": SCRIPT, "sizes.py": "HIDDEN = 6\n", "parts/__init__.py": "", "parts/first.py": "A = 1\n"}
    for name, text in {**files, **{name.replace("__", "/", 1) + ".py": text for name, text in other.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "train.py"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServedScript:
    write(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    script = ServedScript.of(ScriptCall.of(["train.py", "--epochs", "3"]), ["lr"])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return ServedScript.from_fields(script.to_fields())


def test_it_survives_the_welcome_and_is_found_at_the_servers_place(served: ServedScript, tmp_path: Path) -> None:
    assert served.typed == {"lr"} and set(served.files) == {"", "sizes.py", "parts/__init__.py", "parts/first.py"}
    assert served.find(None) == [str(tmp_path / "there/train.py"), "--epochs", "3"]
    copy = write(tmp_path / "here")
    assert served.find(None) == ["train.py", "--epochs", "3"]  # this machine's own comes first
    assert served.find(str(copy)) == [str(copy), "--epochs", "3"]


def test_a_copy_under_another_name_will_do(served: ServedScript, tmp_path: Path) -> None:
    copy = write(tmp_path / "here").rename(tmp_path / "here/other.py")
    assert served.find("other.py") == [copy.name, "--epochs", "3"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"train": SCRIPT + "\n"}, "train.py differs"),
        ({"sizes": "HIDDEN = 7\n"}, "sizes.py differs"),
        ({"parts__first": "A = 2\n"}, "parts/first.py differs"),
        ({"sizes": "HIDDEN = 7\n", "parts__first": "A = 2\n"}, "and 1 more differs"),
        ({"train": SCRIPT + "import more\n", "more": ""}, "train.py and 1 more differs"),
        ({"sizes": "import more\nHIDDEN = 6\n", "more": "B = 1\n"}, "and 1 more differs"),
    ],
)
def test_other_code_is_one_line(served: ServedScript, tmp_path: Path, change: dict[str, str], expected: str) -> None:
    write(tmp_path / "here", **change)
    with pytest.raises(UserError, match=expected) as error:
        served.find("train.py")
    assert "\n" not in str(error.value)


def test_a_helper_that_is_missing_here_is_one_line(served: ServedScript, tmp_path: Path) -> None:
    write(tmp_path / "here")
    (tmp_path / "here/sizes.py").unlink()
    with pytest.raises(UserError, match=r"sizes\.py differs from the file on the server's machine"):
        served.find("train.py")


def test_a_file_that_is_not_here_is_one_line(served: ServedScript, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not here \(looked for .*nowhere\.py\)"):
        served.find("nowhere.py")
    for path in (tmp_path / "there").rglob("*.py"):
        path.unlink()
    with pytest.raises(
        UserError, match=r"looked for .*here/train\.py and .*there/train\.py\): copy it, or give --script"
    ):
        served.find(None)


def test_a_helper_that_is_a_link_to_another_folder_is_compared_too(tmp_path: Path) -> None:
    script = write(tmp_path / "there")
    (tmp_path / "shared.py").write_text("HIDDEN = 6\n")
    before = hashes_of(script)
    (tmp_path / "there/sizes.py").unlink()
    (tmp_path / "there/sizes.py").symlink_to(tmp_path / "shared.py")
    assert hashes_of(script) == before


@pytest.mark.parametrize("content", [b"root:x:0:0:root:/root:/bin/bash\n", b"\0binary", b"\xff\xfe"])
def test_a_file_that_is_no_script_is_not_run(served: ServedScript, tmp_path: Path, content: bytes) -> None:
    """A server may name any file of a worker's machine; only one whose content it knows is run."""
    (tmp_path / "passwd").write_bytes(content)
    named = ServedScript([str(tmp_path / "passwd"), "--now"], "/", served.files, frozenset())
    with pytest.raises(UserError):
        named.find(None)
