"""An `ssh` that runs the command on this machine, or fails as the host's name says."""

from __future__ import annotations

import os
import stat
from pathlib import Path

SCRIPT = """#!/bin/sh
echo "$*" >> "$FAKE_SSH_LOG"
while [ $# -gt 2 ]; do shift; done
fail() { echo "$1" >&2; exit 255; }
case "${1##*@}" in
  changed) fail "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @
Host key verification failed." ;;
  stranger) fail "Host key verification failed." ;;
  closed) fail "ssh: connect to host closed port 22: Connection refused" ;;
  far) fail "ssh: connect to host far port 22: Connection timed out" ;;
  half-dead) exec sleep 60 ;;
  old) export PYTHONPATH="$FAKE_SSH_OLD" ;;
esac
[ "$1" = old ] || echo "Welcome to $1, do not mine coins here"
SSH_CONNECTION="${FAKE_SSH_CLIENT:-127.0.0.1} 40000 127.0.0.1 22" exec sh -c "$2"
"""


def install_fake_ssh(folder: Path) -> dict[str, str]:
    """Put it into a folder; returns the variables that make a process find it."""
    program = folder / "bin/ssh"
    program.parent.mkdir()
    program.write_text(SCRIPT)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    old = folder / "old"
    (old / "paceline").mkdir(parents=True)
    (old / "paceline/__init__.py").touch()
    (old / "paceline-0.0.9.dist-info").mkdir()
    (old / "paceline-0.0.9.dist-info/METADATA").write_text("Name: paceline\nVersion: 0.0.9\n")
    return {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "FAKE_SSH_LOG": str(folder / "ssh.log"),
        "FAKE_SSH_OLD": str(old),
    }
