"""The report in a real browser: it draws, and complains about nothing."""

from __future__ import annotations

import math
import re
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.reports.aggregates import EVALUATED
from paceline.runs.folder import RunFolder
from paceline.system.terminal import seconds_text
from tests.support.browser import CHROMIUM, Browser
from tests.support.made_up_runs import log_events, log_inputs, make_folder, push, result_of, started, whole_run

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: 'apt-get install chromium' brings one")


DRAWN = "document.documentElement.dataset.drawn && document.querySelectorAll('.plot svg').length"

# Pairs of texts that lie on each other, among headings, buttons, cells and the labels of each axis.
OVERLAPS = """
[...document.querySelectorAll('section, thead, .axis, .legend, figcaption')].flatMap((box) => {
  const texts = [...box.querySelectorAll('h2, h3, button, text, strong, .caption, li')];
  const parts = texts.map((one) => [one, one.getBoundingClientRect()])
    .filter(([one, place]) => place.width && one.closest('section, thead, .axis, .legend, figcaption') === box);
  return parts.flatMap(([one, a], number) => parts.slice(number + 1)
    .filter(([other, b]) => !one.contains(other) && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1)
    .map(([other]) => `${one.textContent} / ${other.textContent}`));
})
"""


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The page after its script has run, and what it said on the console."""
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=4000"]
    command = [CHROMIUM, *flags, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_chromium
@pytest.mark.parametrize("names", [["one"], ["one", "two", "broken"]])
def test_the_page_draws_and_logs_no_error(tmp_path: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        folder = whole_run(tmp_path / "runs", name, end=name != "broken", workers=2 * number + 2)
        if name == "broken":
            folder.events_file.write_bytes(folder.events_file.read_bytes()[:-20])
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "runs"), "-o", str(page)]) == 0
    document, console = opened(page, tmp_path / "profile")
    assert console == []
    assert 'data-drawn="true"' in document
    drawn = re.sub(r"<script.*?</script>", "", document, flags=re.DOTALL)
    assert "Finished: 81.50 % test accuracy" in drawn
    titles = re.findall(r"<figcaption><strong>([^<]*)", drawn)
    shown = [
        title
        for title, figure in zip(titles, drawn.split("<figure")[1:], strict=True)
        if "<path" in figure or "<rect" in figure or "<circle" in figure
    ]
    for title in (
        "Loss",
        "Accuracy",
        "Timeline of workers",
        "Throughput",
        "Staleness of pushes",
        "Test accuracy by class",
    ):
        assert title in shown
    if len(names) > 1:
        assert {"Over time", "Over samples", "Scaling"} <= set(shown)
        assert drawn.count('class="badge killed"') == 1
        assert "events.jsonl is cut off after row" in drawn


def columns_of(page: str) -> list[str]:
    """The heads of the first table."""
    head = page.split("<thead>")[1].split("</thead>")[0]
    return [re.sub(r"<[^>]*>|[↑↓]", "", cell) for cell in head.split("</th>")[:-1]]


def report(path: Path, choose: str | None = None) -> str:
    """The drawn page on the runs of a folder, without its script; `choose` is a button to press."""
    page = path / "report.html"
    assert main(["report", str(path / "runs" if (path / "runs").exists() else path), "-o", str(page)]) == 0
    with Browser(path / "profile") as browser:
        browser.show(1280, 4000)
        browser.open(page.as_uri())
        browser.wait_for(DRAWN)
        if choose is not None:
            browser.evaluate(
                f"[...document.querySelectorAll('button')].find(e => e.textContent === '{choose}').click()"
            )
            browser.wait_for(f"document.querySelector('.compared .caption').textContent.startsWith('{choose}')")
        assert browser.complaints == []
        return str(browser.evaluate("document.querySelector('main').outerHTML"))


def chart_of(page: str, title: str) -> str:
    return page.split(f"<strong>{title}</strong>")[1].split("</figure>")[0]


BOTH = {"weights": "averaged", "live_test_accuracy": 80.0, "live_test_loss": 0.6}


@needs_chromium
@pytest.mark.parametrize(
    ("averaged", "said"),
    [
        (BOTH, "Best is live with 81.50 % test accuracy (live weights, the ones that all runs were scored with) in"),
        (
            {**BOTH, "validation_accuracy": 70.0, "live_validation_accuracy": 79.0},
            "Best is averaged with 79.00 % validation accuracy (live weights, the ones that all runs were scored with)",
        ),
        ({"average": "on"}, "No best run: some were scored on live weights only, others on averaged weights only."),
    ],
    ids=["both", "validation data", "averaged only"],
)
def test_the_best_run_is_chosen_on_one_kind_of_weights(tmp_path: Path, averaged: dict[str, Any], said: str) -> None:
    """The highest figure of all is that of averaged weights."""
    held_out = {"validation_accuracy": 75.0} if "validation_accuracy" in averaged else {}
    for name, more in (("averaged", {"test_accuracy": 85.0, **averaged}), ("live", {"average": "none", **held_out})):
        folder = whole_run(tmp_path / "runs", name)
        folder.write_result(result_of(folder, **more))
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "runs"), "-o", str(page)]) == 0
    document, console = opened(page, tmp_path / "profile")
    assert console == []
    drawn = re.sub(r"<script.*?</script>", "", document, flags=re.DOTALL)
    assert said in drawn
    assert {"test %, live", "test %, avg"} <= set(columns_of(drawn))


@needs_chromium
def test_the_best_run_is_one_that_has_ended(tmp_path: Path) -> None:
    """One that goes on has scored its averaged weights only, and shares no figure with the others."""
    for name, score in (("one", 81.0), ("two", 83.0)):
        folder = whole_run(tmp_path / "runs", name)
        folder.write_result(result_of(folder, test_accuracy=score, average="none"))
    with whole_run(tmp_path / "runs", "going", end=False, average="on").locked():
        drawn = report(tmp_path)
    assert "Best is two with 83.00 % test accuracy (live weights)" in drawn and 'class="badge running"' in drawn


@needs_chromium
def test_many_runs_have_short_names_a_choice_of_curves_and_one_axis_for_each_data_set(tmp_path: Path) -> None:
    """18 runs on one data set and one on another: four rows are folded away, and most curves are grey."""
    for number in range(18):
        folder = whole_run(tmp_path / "runs", f"study-of-lr-{number:02d}-seed0", lr=0.01 * (number + 1))
        folder.write_result(result_of(folder, test_accuracy=60.0 + number))
    other = whole_run(tmp_path / "runs", "study-of-lr-own-seed0", task="spirals.py:build")
    other.write_result(result_of(other, test_accuracy=99.0))
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "runs"), "-o", str(page)]) == 0
    document, console = opened(page, tmp_path / "profile")
    assert console == []
    drawn = re.sub(r"<script.*?</script>", "", document, flags=re.DOTALL)
    assert "Best on fashion-mnist is lr-17 with 77.00 % test accuracy" in drawn
    assert 'title="study-of-lr-17-seed0: async, lenet5 on fashion-mnist"' in drawn
    assert "4 more</button>" in drawn
    headings = re.findall(r'<h3 class="group">([^<]*)', drawn)
    assert headings == ["fashion-mnist: 18 runs", "spirals:build: 1 run"]
    above, below = drawn.split('id="curves"')
    assert "runs have a colour in the charts" in below and "have a colour" not in above
    over_time = drawn.split("<strong>Over time</strong>")[1].split("</figure>")[0]
    assert over_time.count('class="line grey"') == 11 and over_time.count('class="line"') == 7
    assert "11 more" in over_time


def pushed(folder: RunFolder, losses: list[float]) -> None:
    log_inputs(folder, [(push(one % 2, one // 2, loss), 0.1 * (one + 1)) for one, loss in enumerate(losses)])


EXPLODED = [2.3, 2.3, 2.3, 1e20, 1e20] + [2000.0] * 35


@needs_chromium
def test_an_exploded_loss_has_few_short_labels_and_begins_where_it_began(tmp_path: Path) -> None:
    """Averages spread 1e20 to the first values and over half of the chart."""
    pushed(whole_run(tmp_path / "runs", "exploded", pushes=0), EXPLODED)
    chart = chart_of(report(tmp_path), "Loss")
    labels = re.findall(r'text-anchor="end">([^<]*)</text>', chart)
    assert labels[:-1] == ["1", "1e4", "1e8", "1e12", "1e16", "1e20"]
    path = re.findall(r'class="line" d="M([^"]*)', chart)[0]
    heights = [float(point.split()[1]) for point in path.split("L")]
    assert heights[0] > 180 > 15 > min(heights), "it begins at 2.3, in the lowest part, and gets to the top"
    assert min(heights[6:]) > 140, "after the explosion all is at 2000"


@needs_chromium
def test_a_narrow_logarithmic_axis_has_three_labels_at_least(tmp_path: Path) -> None:
    ranges = [
        (0.2, 1.2),
        (0.21, 1.2),
        (0.02, 3.0),
        (0.5, 2.1),
        (0.9, 1.1),
        (1e-6, 2.0),
        (3.0, 29.0),
        (1.0, 1e20),
        (0.21, 2.3),
    ]
    numbers = (files("paceline.reports") / "assets/numbers.js").read_text(encoding="utf-8")
    with Browser(tmp_path / "profile") as browser:
        for count in (5, 6, 9):
            asked = f"{list(map(list, ranges))}.map(([a, b]) => logTicks(a, b, {count}))"
            marks = browser.evaluate(f"(() => {{ {numbers}; return {asked} }})()")
            for (low, high), found in zip(ranges, marks, strict=True):
                assert 3 <= len(found) <= count + 1 and low * 0.99 <= found[0] < found[-1] <= high * 1.01, (low, found)
                third = (high / low) ** 0.34
                assert (found[0] <= low * third and found[-1] >= high / third) or count == 5, (low, found)


@needs_chromium
def test_a_band_is_drawn_of_several_pushes_and_stretches_no_axis(tmp_path: Path) -> None:
    """Most spans of a short run hold one push: of these, the band is the distance from the smoothed line."""
    losses = [1.0, 0.9] * 20
    for name, times in (
        ("alone", [0.1 * one for one in range(40)]),
        ("together", [0.1 * (one // 4) for one in range(40)]),
    ):
        folder = whole_run(tmp_path / name / "runs", name, pushes=0)
        values = [1e-6 if place == 25 else loss for place, loss in enumerate(losses)]
        log_inputs(folder, [(push(one % 2, one // 2, loss), times[one]) for one, loss in enumerate(values)])
        chart = chart_of(report(tmp_path / name), "Loss")
        assert ('class="band"' in chart) == ("least to greatest" in chart) == (name == "together")
        assert "1e-6" not in chart and "0.001" not in chart


@needs_chromium
def test_regressions_have_a_best_run_and_equal_scores_are_said_to_be(tmp_path: Path) -> None:
    for name, loss in (("a", 0.5), ("b", 0.25), ("c", 0.25)):
        folder = whole_run(tmp_path / "runs", name)
        none = {"test_accuracy": None, "test_correct": None, "per_class_accuracy": [], "weights": "live"}
        folder.write_result(result_of(folder, test_loss=loss, **none))
    said = re.findall(r"3 runs: [^<]*", report(tmp_path))[0]
    assert "Best are b and c with test loss 0.2500 (live weights), chosen on the test set." in said
    folder.write_result(result_of(folder, test_loss=0.2, **none))
    said = re.findall(r"3 runs: [^<]*", report(tmp_path))[0]
    assert "Best is c with test loss 0.2000 (live weights) in 4 s of training, chosen on the test set." in said


@needs_chromium
def test_an_exploded_run_does_not_flatten_the_others(tmp_path: Path) -> None:
    for name in ("calm", "calmer"):
        whole_run(tmp_path / "runs", name)
    folder = whole_run(tmp_path / "runs", "exploded", pushes=0)
    pushed(folder, EXPLODED)
    log_events(folder, {"kind": "evaluation", "now": 4.5, "samples": 1300, "test_loss": 1e19})
    browser_page = report(tmp_path, choose="train loss of pushes")
    chart = chart_of(browser_page, "Over time")
    assert "beyond the axis: exploded" in chart
    assert max(float(label) for label in re.findall(r'text-anchor="end">([\d.e]+)</text>', chart)) <= 10


@needs_chromium
def test_a_group_without_a_loss_or_score_says_so_and_reports_are_drawn(tmp_path: Path) -> None:
    whole_run(tmp_path / "runs", "usual")
    silent = make_folder(tmp_path / "runs", "silent", task="silent.py:build")
    loop = make_folder(tmp_path / "runs", "loop", task="loop.py:build")
    for folder in (silent, loop):
        log_events(folder, started())
        pushed(folder, [math.nan] * 8)
    rows = [
        {"kind": "reported", "worker": one % 2, "samples": 32 * one, "figures": {"f1": 0.1 * one}} for one in range(8)
    ]
    log_events(loop, *({**row, "now": 1.0 + place} for place, row in enumerate(rows)))
    page = report(tmp_path)
    groups = {
        found[1]: found[2]
        for found in re.finditer(r'<h3 class="group">([^<]*)</h3>(.*?)(?=<div class="compared|<h2)', page)
    }
    assert set(groups) == {"fashion-mnist: 1 run", "silent:build: 1 run", "loop:build: 1 run"}
    silent_box, loop_box = groups["silent:build: 1 run"], groups["loop:build: 1 run"]
    assert re.search(r'<p class="findings">No curves', silent_box) and "<svg" not in silent_box
    assert re.search(r'<p class="findings" hidden="">No curves', loop_box)
    assert "f1, reported" in chart_of(loop_box, "Over time") and chart_of(loop_box, "Over time").count("<circle") == 4
    assert chart_of(report(tmp_path / "runs/loop"), "f1").count("<circle") == 4


@needs_chromium
def test_the_table_has_results_before_settings_that_tell_nothing(tmp_path: Path) -> None:
    for number, strategy in enumerate(("async", "sync", "allreduce")):
        settings: dict[str, Any] = {"lr": 0.01 * (number + 1), "keep": number + 1}
        whole_run(tmp_path / "runs", strategy, strategy=strategy, validation=0.1 * number, **settings)
    page = report(tmp_path)
    assert columns_of(page)[:7] == ["run", "strategy", "lr", "test %, live", "test %, avg", "time", "samples/s"]
    assert "validation" in re.findall(r"Listed under [^<]*", page)[0]


@needs_chromium
def test_the_page_has_the_differing_settings_that_compare_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `auto` means depends on other settings, and so does what it was resolved to."""
    for name, threads, average in (("one", 1, "on"), ("two", 2, "none")):
        settings: dict[str, Any] = {"threads": threads, "average": average}
        folder = whole_run(tmp_path / "runs", name, strategy="async", **settings)
        folder.write_result(result_of(folder, rule_applied=f"foresight{' (averaged)' * (average == 'on')}"))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["compare", str(tmp_path / "runs")]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    page = report(tmp_path)
    listed = re.findall(r"<dt[^>]*>([^<]*)</dt>", page.split('id="differs"')[1].split("</section>")[0])
    assert sorted(listed) == ["average", "scored weights", "threads"]
    assert {"threads", "average"} <= set(columns_of(page)) and "rule" not in columns_of(page)
    assert not [name for name in listed if name not in head], head
    assert "rule" not in head


@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_overlaps_and_every_run_has_its_own_mark(tmp_path: Path, width: int) -> None:
    for number in range(12):
        folder = whole_run(tmp_path / "runs", f"run-{number:02d}", lr=0.01 * (number + 1), momentum=0.01 * number)
        rows = [{name: 10.0 * one for name in EVALUATED} for one in range(1, 5)]
        log_events(
            folder, *({"kind": "evaluation", "now": 4.0 + one, "samples": 99, **row} for one, row in enumerate(rows))
        )
        scores = [50.0 + number // 4] * 10
        folder.write_result(result_of(folder, weights="averaged", per_class_accuracy=scores))
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "runs"), "-o", str(page)]) == 0
    with Browser(tmp_path / "profile") as browser:
        browser.show(width, 4000)
        browser.open(page.as_uri())
        browser.wait_for(DRAWN)
        assert browser.evaluate("document.querySelectorAll('#curves ~ .choice button').length") >= 5
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(OVERLAPS) == []
        legend = (
            "[...document.querySelectorAll('figure')].find(e => e.textContent.startsWith('Test accuracy by class'))"
        )
        marks = browser.evaluate(f"[...{legend}.querySelectorAll('.legend i')].map(e => e.getAttribute('style'))")
        assert len(marks) == len(set(marks)) == 12
        boxes = browser.evaluate(f"[...{legend}.querySelectorAll('.dot')].map(e => e.getBoundingClientRect().toJSON())")
        centres = {(round(box["x"] + box["width"] / 2), round(box["y"] + box["height"] / 2)) for box in boxes}
        assert len(boxes) == len(centres) == 120, "no mark hides another"
        assert browser.complaints == []


@needs_chromium
def test_durations_read_alike_in_sentences_and_in_the_page(tmp_path: Path) -> None:
    seconds = [
        0.0,
        0.00042,
        0.0312,
        0.125,
        0.2,
        0.569,
        0.896,
        2.25,
        3.0,
        4.04,
        9.949,
        9.951,
        12.5,
        42.0,
        59.6,
        60.0,
        275.4,
        600.0,
    ]
    seconds += [3595.0, 3600.0, 7500.0, 86_399.0, 100_000.0, 1e6]
    numbers = (files("paceline.reports") / "assets/numbers.js").read_text(encoding="utf-8")
    with Browser(tmp_path / "profile") as browser:
        assert browser.evaluate(f"{numbers}; {seconds}.map(clock)") == [seconds_text(one) for one in seconds]
