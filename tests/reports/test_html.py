"""`paceline report`: the page holds its digests and nothing from elsewhere, and bad input is one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.reports.html import SCRIPTS, LiveFeed, render
from paceline.reports.report_data import RunReader
from tests.support.made_up_runs import make_folder, result_of, whole_run


def facts_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="facts">(.*?)</script>', page)
    found: dict[str, Any] = json.loads(text)
    return found


def digest_of(path: Path) -> dict[str, Any]:
    reader = RunReader(path)
    reader.refresh()
    return reader.digest()


def test_the_page_holds_what_it_draws_and_asks_for_nothing(tmp_path: Path) -> None:
    digest = digest_of(whole_run(tmp_path).path)
    page = render([digest])
    assert facts_of(page)["runs"] == [digest]
    assert facts_of(page)["live"] is None
    addresses = set(re.findall(r"""["'`(](?:https?:)?//[^"'`)\s]+""", page))
    assert addresses == {'"http://www.w3.org/2000/svg'}, "the name of SVG, which nobody fetches"
    assert "connect-src 'none'" in page
    assert not re.search(r"<(link|img|iframe|script)\b[^>]*\b(src|href)=", page)


def test_a_live_page_knows_its_feed(tmp_path: Path) -> None:
    page = render([digest_of(whole_run(tmp_path).path)], LiveFeed("events?token=a"))
    assert facts_of(page)["live"] == "events?token=a"
    assert "connect-src 'self'" in page


def test_a_name_cannot_end_the_script_it_stands_in(tmp_path: Path) -> None:
    name = "<!--<script><b>&"
    page = render([digest_of(whole_run(tmp_path, name).path)])
    assert facts_of(page)["runs"][0]["name"] == name
    assert name not in page
    assert "<title>&lt;!--&lt;script>&lt;b>&amp; – Paceline</title>" in page


def test_every_asset_is_drawn_with() -> None:
    assets = Path(__file__).parents[2] / "src/paceline/reports/assets"
    assert {file.name for file in assets.iterdir()} == {*SCRIPTS, "page.css"}


def test_the_verb_makes_one_file_of_many_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        whole_run(tmp_path / "runs", name)
    broken = whole_run(tmp_path / "runs", "c", end=False)
    broken.events_file.write_bytes(broken.events_file.read_bytes()[:-9])
    for name in ("one", "three", "two"):
        swept = make_folder(tmp_path / "runs/sweep", name)
        swept.write_result(result_of(swept, lab=True))
    (tmp_path / "empty").mkdir()
    output = tmp_path / "page.html"
    assert (
        main(["report", str(tmp_path / "runs"), str(tmp_path / "runs/a"), str(tmp_path / "empty"), "-o", str(output)])
        == 0
    )
    printed = capsys.readouterr().out
    assert "page.html: 6 runs" in printed
    assert "\n3 runs: computed in the lab, many runs at once: only the end was recorded, no curves\n" in printed
    assert "c: events.jsonl is cut off after row" in printed
    assert "empty is not a run folder and contains none: ignored" in printed
    runs = facts_of(output.read_text())["runs"]
    assert [run["name"] for run in runs] == ["a", "b", "c", "one", "three", "two"]
    assert [run["status"] for run in runs] == ["finished", "finished", "killed", *["finished"] * 3]
    assert "lab" in runs[3]["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere is not a run folder: it does not exist"),
        (["."], ". is not a run folder and contains none"),
        (["a-file"], "a-file is not a run folder and contains none"),
        ([], "RUN is missing (run folders, or folders of runs)"),
        (["runs/run", "-o", "runs"], "-o runs is a folder"),
        (["runs/run", "-o", "no/such/page.html"], "no/such/page.html cannot be written: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    if "runs/run" in arguments:
        whole_run(tmp_path / "runs")
    assert main(["report", *arguments]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert said in errors[0]
