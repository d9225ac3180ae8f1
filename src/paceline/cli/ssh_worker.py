"""`python -m paceline.cli.ssh_worker VERB ...`: run a verb on another machine, and end with the command there.

The token is the first line of standard input, so `ps` does not show it. Standard input closes when the other side ends,
by itself, by SIGKILL or by a broken connection; then this process ends too. A worker that replaces itself has the token
already.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from paceline.cli.main import main
from paceline.system.process import TETHER_VARIABLE
from paceline.transports.auth import TOKEN_VARIABLE

PUSH_SECONDS, ENDING_SECONDS = 0.5, 5.0


def read_line() -> str:
    """Read the first line of standard input, and no byte beyond it."""
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode().strip()


def end_with_standard_input() -> None:
    """Send SIGTERM to this process when standard input closes, and exit if that does not end it."""
    while os.read(0, 1 << 12):
        pass
    for seconds in (PUSH_SECONDS, ENDING_SECONDS):  # after the first signal a worker may finish its push
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)
    os._exit(1)


if __name__ == "__main__":
    if TETHER_VARIABLE not in os.environ and (token := read_line()):
        os.environ[TOKEN_VARIABLE] = token
    os.environ[TETHER_VARIABLE] = "1"
    threading.Thread(target=end_with_standard_input, daemon=True).start()
    sys.exit(main(sys.argv[1:]))
