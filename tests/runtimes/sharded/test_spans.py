"""Cutting the weights among servers: every float once, at places that keep bits, and what cannot be cut is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.interfaces import pack
from paceline.runtimes.sharded.spans import GRAIN, part_of, require_cuttable, spans_of
from paceline.settings.resolve import resolve


@given(grains=st.integers(1, 400), rest=st.integers(0, GRAIN // 16 - 1), data=st.data())
def test_every_float_is_in_one_range_and_ranges_are_about_equal(grains: int, rest: int, data: st.DataObject) -> None:
    size, servers = GRAIN * grains + 16 * rest, data.draw(st.integers(1, grains))
    spans = spans_of(size, servers)
    assert [0, *(span.stop for span in spans)] == [*(span.start for span in spans), size]
    assert all(span.start % GRAIN == 0 for span in spans)
    lengths = [span.stop - span.start for span in spans]
    assert len(lengths) == servers and max(lengths) - min(lengths[:-1] or lengths) <= GRAIN and min(lengths) > 0


@given(sizes=st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=6), servers=st.integers(1, 4))
def test_the_layouts_of_the_parts_name_every_parameter_where_it_lies(
    sizes: list[tuple[int, bool]], servers: int
) -> None:
    layout = pack([(f"p{number}", (size,), decay) for number, (size, decay) in enumerate(sizes)])
    whole = {(p.name, p.offset + place): p.decay for p in layout.parameters for place in range(p.size)}
    if layout.size < GRAIN * servers:
        return
    found = {}
    for span in spans_of(layout.size, servers):
        part = part_of(layout, span)
        assert part.size == span.stop - span.start
        for piece in part.parameters:
            for place in range(piece.size):
                found[piece.name, span.start + piece.offset + place] = piece.decay
    assert found == whole


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"pull_codec": "topk:0.1"}, "--pull-codec topk:0.1 looks at all of them at once"),
        ({"pull_codec": "lowrank:2"}, "--pull-codec lowrank:2 looks at all of them at once"),
        ({"clip": 1.0}, "--clip 1"),
        ({"workers": 4}, "--rule auto measures its steps on all of them: use --rule auto-counted"),
        ({"optimizer": "lars", "rule": "plain"}, "lars"),
        ({"optimizer": "muon"}, "muon needs whole matrices"),
    ],
)
def test_what_needs_all_weights_is_refused(values: dict[str, object], word: str) -> None:
    config = resolve(RunConfig(strategy="async", **values))  # type: ignore[arg-type]
    require_cuttable(config, 1)
    with pytest.raises(UserError, match=word):
        require_cuttable(config, 2)


def test_what_is_inside_the_workers_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    require_cuttable(resolve(RunConfig(strategy="diloco:3", path="star", optimizer="lars", clip=1.0)), 4)
    with pytest.raises(UserError, match="fewer servers"):
        spans_of(320, 6)
    assert main(["server", "--servers", "0"]) == 2
    assert capsys.readouterr().err == "paceline: --servers 0: a run needs at least one\n"
