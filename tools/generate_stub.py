"""Write `src/paceline/__init__.pyi`: the public names, and `train` with every setting as a typed keyword.

    python tools/generate_stub.py           # or: make pages

Editors complete from it, and type checkers refuse a wrong name or type.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

STUB = Path(__file__).parents[1] / "src/paceline/__init__.pyi"


def stub() -> str:
    """Return the text of the stub."""
    import paceline
    from paceline.api import settings_of_train, train
    from paceline.config import FIELDS

    homes = {name: paceline._HOMES[name].split(":") for name in paceline.__all__ if name != "train"}
    imports = [f"from {module} import {source} as {name}" for name, (module, source) in homes.items()]
    fixed = ["build: Callable[[], Task] | str | None = None", "*", "quiet: bool = False"]
    settings = settings_of_train()
    typed = [f"{one.name}: {one.annotation} = {one.default!r}".replace("'", '"') for one in settings]
    said = textwrap.dedent("    " + (train.__doc__ or "")).strip()
    lines = [
        line
        for one in settings
        for line in textwrap.wrap(
            f"{one.name}: {FIELDS[one.name].metadata['help']}", 112, subsequent_indent="    ", break_on_hyphens=False
        )
    ]
    words = textwrap.indent(f"{said}\n\n" + "\n".join(lines), "    ").strip()
    return "\n".join(
        [
            "# Written by tools/generate_stub.py from the settings of RunConfig.",
            "from collections.abc import Callable",
            "from os import PathLike",
            "from typing import Any",
            "",
            *sorted(imports, key=lambda line: line.split()[1:]),
            "",
            f"__all__ = [{', '.join(f'{chr(34)}{name}{chr(34)}' for name in paceline.__all__)}]",
            "",
            "def train(",
            *(f"    {one}," for one in (*fixed, *typed)),
            ") -> dict[str, Any]:",
            f'    """{words}',
            '    """',
            "",
        ]
    )


def main() -> None:
    STUB.write_text(stub(), encoding="utf-8")


if __name__ == "__main__":
    main()
