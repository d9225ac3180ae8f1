"""Codecs by name: what is written is what is built, and what cannot be is said in one line."""

from __future__ import annotations

import pytest

from paceline.errors import UserError
from paceline.settings.codecs import codec_of


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9", "did you mean 'int8'"),
        ("int8:4", "write int8"),
        ("topk", "write topk:F"),
        ("topk:x", "above 0 and at most 0.5"),
        ("topk:0", "above 0"),
        ("topk:nan", "above 0"),
        ("topk:0.7", "at most 0.5"),
        ("lowrank", "write lowrank:R"),
        ("lowrank:0", "whole number"),
        ("lowrank:2.5", "whole number"),
    ],
)
def test_a_name_that_cannot_be_is_explained(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        codec_of(text)


def test_names_and_numbers_are_read() -> None:
    assert [codec_of(text) for text in ("none", "topk:0.01", "lowrank:4")] == [
        ("none", 0.0),
        ("topk", 0.01),
        ("lowrank", 4.0),
    ]
