"""Entry point of `python -m paceline`."""

import os
import sys

if __name__ == "__main__":
    # As with -P: a file in the current folder must not be imported in place of a module of ours or Python's.
    if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109 (pathlib may be such a file)
        del sys.path[0]
    from paceline.cli.main import main

    sys.exit(main())
