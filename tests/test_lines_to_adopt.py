"""The programs of each library and the pages that show them agree."""

from __future__ import annotations

import lines_to_adopt
import pytest


@pytest.mark.parametrize("page", sorted(lines_to_adopt.PAGES.glob("*.md")), ids=lambda page: page.name)
def test_what_a_page_shows_is_what_the_programs_are(page: object) -> None:
    assert page.read_text(encoding="utf-8") == lines_to_adopt.written(page), "run tools/lines_to_adopt.py"  # type: ignore[attr-defined, arg-type]


def test_the_pages_have_the_parts_that_are_generated() -> None:
    for library, name in lines_to_adopt.PAGE_OF.items():
        assert lines_to_adopt.diff_block(library) in (lines_to_adopt.PAGES / name).read_text(encoding="utf-8")
    assert lines_to_adopt.table() in (lines_to_adopt.PAGES / "ddp.md").read_text(encoding="utf-8")


def test_the_program_with_paceline_adds_six_lines_and_changes_none_of_the_loop() -> None:
    assert lines_to_adopt.count("paceline") == (6, 1)  # torch.save moves under `if session.is_main:`
    assert lines_to_adopt.count("paceline") < min(lines_to_adopt.count(name) for name in ("ddp", "fabric", "torchft"))
