"""`python -m paceline.cli.ssh_worker VERB ...`: a verb on another machine that ends with whoever started it.

The token is the first line of standard input, so no `ps` shows it. When standard input closes, as it does however the
other side ends (by itself, by SIGKILL, by a broken connection), this process ends too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from paceline.cli.main import main
from paceline.transports.auth import TOKEN_VARIABLE

ENDING_SECONDS = 5.0


def read_line() -> str:
    """The first line of standard input, and not a byte more."""
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode().strip()


def end_with_standard_input() -> None:
    """Ask this process to end when nobody holds the other side any more; make it when it does not."""
    while os.read(0, 1 << 12):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ENDING_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    token = read_line()
    if token:
        os.environ[TOKEN_VARIABLE] = token
    threading.Thread(target=end_with_standard_input, daemon=True).start()
    sys.exit(main(sys.argv[1:]))
