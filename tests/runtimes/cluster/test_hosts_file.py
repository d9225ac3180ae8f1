"""A hosts file: what its lines become, and one clear line for each that is wrong or cannot take part."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UserError
from paceline.runtimes.cluster.hosts_file import (
    HostLine,
    Requirements,
    lack,
    num_workers,
    parse_hosts,
    read_hosts,
    remarks,
    remote_command,
    threads_of,
    unreached,
    why_ssh_failed,
    worker_arguments,
)

WANTED = Requirements("0.1.0", "2.13.0", "c0de", {"name": "fashion-mnist", "sample": False}, None)
FOUND: dict[str, Any] = {
    "paceline": {"version": "0.1.0", "path": "/there/paceline", "code": "c0de"},
    "torch": "2.13.0",
    "cores": 8,
    "data": {"path": "/data", "sample": False},
    "task": None,
    "reach": {"address": "10.0.0.1:2950", "error": None},
}


def test_lines_with_settings_comments_and_quotes() -> None:
    text = """
    # the fast ones
    anna@node1 workers=2 threads=4 python=~/venv/bin/python   # two
    node2 dir='my work' data-dir=/data port=2222

    localhost
    """
    first, second, here = parse_hosts(text)
    assert first == HostLine("anna@node1", 2, 4, python="~/venv/bin/python")
    assert (second.dir, second.data_dir, second.port) == ("my work", "/data", 2222)
    assert here.is_here and not first.is_here
    assert num_workers([first, second, here]) == 4


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("node1 worker=2", "unknown setting 'worker': did you mean 'workers'"),
        ("node1 workers=two", "workers=two: must be a whole number of at least 1"),
        ("node1 workers=0", "workers=0: must be a whole number"),
        ("node1 port=70000", "port=70000: must be a port"),
        ("node1 python=", "python=: must not be empty"),
        ("node1 node2", "'node2' is no setting: write NAME=VALUE, as in workers=2, and one host a line"),
        ("node1 threads=1 threads=2", "threads is set twice"),
        ("workers=2", "'workers=2' is no host: write [user@]host"),
        ("-oProxyCommand=evil", "is no host"),
        ("anna@-x", "'anna@-x' is no host"),
        ("@node1", "'@node1' is no host"),
        ("anna@", "'anna@' is no host"),
        ("node1 dir='x", "no closing quotation: close the quote"),
        ("node0", "node0 is in line 1 already: write workers=N there"),
    ],
)
def test_each_malformed_line_is_named(line: str, complaint: str) -> None:
    with pytest.raises(UserError, match=re.escape(complaint)) as caught:
        parse_hosts(f"node0\n\n{line}\n", "my-hosts")
    assert str(caught.value).startswith("my-hosts, line 3: ")


def test_a_file_without_hosts_or_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="hosts lists no host: write one a line"):
        parse_hosts("# nobody\n")
    with pytest.raises(UserError, match=r"no hosts file .*/none: write one host a line"):
        read_hosts(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read as text"):
        read_hosts(tmp_path / "bytes")


def test_the_command_survives_two_shells() -> None:
    host = HostLine("anna@node1", python="/my venv/python", dir="~/it's here", port=2222)
    command = remote_command(host, ["-m", "paceline", "a b"])
    assert command[:2] == ["ssh", "-T"] and "BatchMode=yes" in command
    assert command[command.index("-p") + 1] == "2222" and command[-2] == "anna@node1"
    shell, flag, script = shlex.split(command[-1])
    assert (shell, flag) == ("sh", "-c")
    assert script.startswith('cd "$HOME"')
    assert shlex.split(script) == ["cd", "$HOME/it's here", "&&", "exec", "/my venv/python", "-m", "paceline", "a b"]
    assert 'exec "$HOME"/venv/python -V' in remote_command(HostLine("n", python="~/venv/python"), ["-V"])[-1]


def test_this_machine_needs_no_ssh() -> None:
    assert remote_command(HostLine("localhost", python="py"), ["-V"]) == ["sh", "-c", "exec py -V"]


def test_a_workers_arguments_hold_no_token_and_its_own_data() -> None:
    arguments = worker_arguments(HostLine("n", data_dir="/mine"), "10.0.0.1:2950", 3, 4, "/theirs", ["--patience", "9"])
    assert arguments[:6] == ["-P", "-m", "paceline.cli.ssh_worker", "worker", "--connect", "10.0.0.1:2950"]
    assert arguments[6:] == ["--worker", "3", "--threads", "4", "--data-dir", "/mine", "--patience", "9"]
    assert worker_arguments(HostLine("n"), "a:1", 0, 1, None, [])[-2:] == ["--threads", "1"]


def test_threads_are_the_lines_the_runs_or_the_cores_shared() -> None:
    assert threads_of(HostLine("n", workers=4, threads=3), 2, 8) == 3
    assert threads_of(HostLine("n", workers=4), 2, 8) == 2
    assert threads_of(HostLine("n", workers=4), None, 8) == 2
    assert threads_of(HostLine("n", workers=4), None, 2) == 1


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "key has changed"),
        (255, "Host key verification failed.", "host key is not known here: 'ssh anna@node1' once by hand"),
        (255, "anna@node1: Permission denied (publickey).", "'ssh-copy-id anna@node1'"),
        (255, "ssh: Could not resolve hostname node1: Name or service not known", "no machine has this name"),
        (255, "ssh: connect to host node1 port 22: Connection refused", "no ssh server listens there"),
        (255, "ssh: connect to host node1 port 22: Connection timed out", "it cannot be reached within 10 s"),
        (255, "kex_exchange_identification: read: Connection reset", "ssh failed (kex_exchange"),
        (127, "sh: 1: exec: py: not found", "there is no Python at py: write python=PATH"),
        (2, "sh: 1: cd: can't cd to /nowhere", "there is no folder /nowhere: correct dir="),
        (1, "Traceback\nSyntaxError: invalid syntax", "its check failed (SyntaxError: invalid syntax)"),
        (1, "", "its check failed (exit code 1)"),
    ],
)
def test_each_way_ssh_fails_has_its_line(code: int, said: str, reason: str) -> None:
    assert reason in why_ssh_failed(HostLine("anna@node1", python="py", dir="/nowhere"), code, said)


def test_another_port_is_part_of_the_advice() -> None:
    host = HostLine("anna@node1", port=2222)
    assert "'ssh -p 2222 anna@node1'" in why_ssh_failed(host, 255, "Host key verification failed.")
    assert "'ssh-copy-id -p 2222 anna@node1'" in why_ssh_failed(host, 255, "Permission denied (publickey).")
    changed = why_ssh_failed(host, 255, "REMOTE HOST IDENTIFICATION HAS CHANGED")
    assert changed.endswith("'ssh-keygen -R [node1]:2222'")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"paceline": None}, "py there has no paceline: install it, or write python=PATH"),
        ({"paceline": {"version": "0.0.9"}}, "it has paceline 0.0.9, this machine 0.1.0: install the same"),
        ({"paceline": {**FOUND["paceline"], "code": "x"}}, "(/there/paceline) is other code than this machine's"),
        ({"torch": None}, "py there has no torch: install torch 2.13.0"),
        ({"data": {"error": "it is in none of /a"}}, "no data: it is in none of /a (or write data-dir=DIR"),
        ({"data": {"path": "/b", "sample": True}}, "only the built-in sample of fashion-mnist"),
    ],
)
def test_each_lack_of_a_host_has_its_line(found: dict[str, Any], reason: str) -> None:
    why = lack(HostLine("n", python="py"), {**FOUND, **found}, WANTED)
    assert why is not None and reason in why


def test_a_host_with_everything_lacks_nothing() -> None:
    assert lack(HostLine("n"), FOUND, WANTED) is None
    assert unreached(FOUND) is None
    why = unreached({"reach": {"address": "10.0.0.1:2950", "error": "Connection refused"}})
    assert why is not None and "cannot reach this machine at 10.0.0.1:2950 (Connection refused): open that port" in why


def test_a_tasks_file_must_be_the_same() -> None:
    wanted = Requirements(
        "0.1.0", "2.13.0", "c0de", None, {"kind": "task's file", "file": "/my/task.py", "digest": "12"}
    )
    assert lack(HostLine("n"), {**FOUND, "task": "12"}, wanted) is None
    assert "/my/task.py is not there" in str(lack(HostLine("n"), FOUND, wanted))
    assert "/my/task.py differs" in str(lack(HostLine("n"), {**FOUND, "task": "13"}, wanted))


def test_what_is_only_remarked() -> None:
    assert remarks(HostLine("n", workers=4), FOUND, WANTED, 2) == []
    (torch,) = remarks(HostLine("n"), {**FOUND, "torch": "2.6.0"}, WANTED, 1)
    assert torch.startswith("torch 2.6.0, here 2.13.0")
    (slow,) = remarks(HostLine("n", workers=4), FOUND, WANTED, 4)
    assert slow.startswith("4 workers x 4 threads on 8 cores will be slow")
