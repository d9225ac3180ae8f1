"""A process that imports torch once and forks all others, so that ten start about as fast as one."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from typing import Any

from paceline.errors import DiskError, PacelineError, UserError
from paceline.runtimes.local.failures import describe_exception
from paceline.system.process import describe_end, die_with, helper_command, helper_environment
from paceline.system.strict_json import to_json

ROLES = {
    "server": "paceline.runtimes.server.process:main",
    "worker": "paceline.runtimes.local.worker_process:main",
    "script": "paceline.runtimes.scripts.process:main",
    "script server": "paceline.runtimes.scripts.serving.server:main",
    "replay server": "paceline.runtimes.scripts.serving.replay_server:main",
    "ring host": "paceline.runtimes.ring.local_process:host",
    "ring worker": "paceline.runtimes.ring.local_process:worker",
}
PRELOADED = ("paceline.runtimes.server.service", "paceline.runtimes.local.worker_process", "paceline.tasks.supervised")
PRELOADED_FOR_SCRIPTS = ("torch._dynamo",)  # every torch.optim.Optimizer imports it, for .8 s of each script's process
_CLEAR = "clear"
_LARGEST = 1 << 20


def request(role: str, spec: dict[str, Any], has_output: bool = False) -> bytes:
    """Encode a request for a process. The fork server sends a notice `started`, and `ended` when it ends.

    With `has_output` the last two descriptors that come with it are the standard output and error of the process.
    """
    return to_json({"role": role, "spec": spec, "path": sys.path, "has_output": has_output}).encode()


def receive_row(line: socket.socket, flags: int = 0) -> dict[str, Any] | None:
    """Return the next JSON message on a socket, or None if its other end is gone."""
    packet = b""
    for _ in range(2):  # an end that closed without reading is reported once, before the messages it had sent
        with contextlib.suppress(ConnectionResetError):
            packet = line.recv(_LARGEST, flags)
            break
    return dict(json.loads(packet)) if packet else None


class ForkServer:
    """The supervisor's handle: send requests, receive notices. The fork server and its children die with it."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **helper_environment()}
        command = helper_command("paceline.runtimes.local.fork_server", str(theirs.fileno()))
        # Ctrl-C reaches the whole process group: block it in the child until the child ignores it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()

    def notice(self) -> dict[str, Any] | None:
        """Return the next notice, or None if the fork server is gone."""
        return receive_row(self.socket)

    def clear(self) -> bool:
        """Kill all forked processes and skip their notices. Return False if the fork server itself is gone."""
        try:
            self.socket.send(request(_CLEAR, {}))
        except (BrokenPipeError, ConnectionResetError):
            return False
        while (notice := self.notice()) is not None:
            if notice["kind"] == "cleared":
                return True
        return False

    def close(self) -> None:
        """End the fork server and all processes that it forked; do nothing if they have ended."""
        self.socket.close()
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def main(fd: int) -> None:
    """Fork on request until the supervisor is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    supervisor = socket.socket(fileno=fd)
    supervisor.set_inheritable(False)
    _preload(PRELOADED)
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    selector = selectors.DefaultSelector()
    for source in (supervisor, reader):
        selector.register(source, selectors.EVENT_READ)
    children: set[int] = set()
    server_pid: int | None = None
    while True:
        for key, _ in selector.select():
            if key.fileobj is supervisor:
                request, fds = _next_request(supervisor)
                if request is None:
                    return
                if request["role"] == _CLEAR:
                    server_pid = None
                    _clear(supervisor, children)
                    continue
                request["spec"]["server_pid"] = server_pid
                pid = _fork(supervisor, request, fds, [reader, writer])
                children.add(pid)
                if server_pid is None:  # the server is always the first process
                    server_pid = pid
                    if request["role"] in ("script server", "replay server"):
                        _preload(PRELOADED_FOR_SCRIPTS)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(reader, 4096)
                _reap(supervisor, children)


def _preload(modules: tuple[str, ...]) -> None:
    """Import what the processes to fork share, and leave it out of their garbage collection."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def _next_request(supervisor: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next request and its descriptors; None if the supervisor is gone, whatever it had left unread."""
    try:
        packet, fds, _, _ = socket.recv_fds(supervisor, _LARGEST, 253)
    except ConnectionResetError:
        return None, []
    return (json.loads(packet) if packet else None), fds


def _clear(supervisor: socket.socket, children: set[int]) -> None:
    """Kill all children. Their process ids cannot be reused before `waitpid`."""
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    while children:
        os.waitpid(children.pop(), 0)
    _tell(supervisor, {"kind": "cleared"})


def _fork(supervisor: socket.socket, request: dict[str, Any], fds: list[int], ours: list[int]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(supervisor, request, fds, ours, parent)
    for fd in fds:
        os.close(fd)
    _tell(supervisor, {"kind": "started", "pid": pid, "name": request["spec"].get("name", request["role"])})
    return pid


def _become(supervisor: socket.socket, request: dict[str, Any], fds: list[int], ours: list[int], parent: int) -> None:
    """In the child: run the role, then exit without returning into the fork server."""
    code = 1
    try:
        die_with(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in ours:
            os.close(fd)
        if request["has_output"]:
            *fds, out, err = fds
            _write_to(out, err)
        sys.path[:] = request["path"]
        from paceline.system.subnormals import flush_subnormals  # torch is loaded in a forked process only

        flush_subnormals()
        module, _, name = ROLES[request["role"]].partition(":")
        code = getattr(importlib.import_module(module), name)(request["spec"], fds)
        _tell(supervisor, {"kind": "returned", "pid": os.getpid()})
    except PacelineError as error:
        code = error.exit_code
        is_mistake = isinstance(error, UserError) and not isinstance(error, DiskError)
        row = {"code": code, "text": str(error), "is_mistake": is_mistake}
        _tell(supervisor, {"kind": "complaint", "pid": os.getpid(), **row})
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        code = code or int(request["role"] != "script")  # a script may end well by sys.exit(0), a task may not
        if code:
            _tell(supervisor, {"kind": "raised", "pid": os.getpid(), **describe_exception(stop)._asdict()})
        else:
            _tell(supervisor, {"kind": "returned", "pid": os.getpid()})
    except BaseException as error:
        _tell(supervisor, {"kind": "raised", "pid": os.getpid(), **describe_exception(error)._asdict()})
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _write_to(out: int, err: int) -> None:
    """Let this process and its children write to these descriptors; a line is written when it is complete."""
    for descriptor, standard in ((out, 1), (err, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _reap(supervisor: socket.socket, children: set[int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        children.discard(pid)
        _tell(supervisor, {"kind": "ended", "pid": pid, "status": status, "how": describe_end(status)})


def _tell(supervisor: socket.socket, notice: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the supervisor is gone, which the main loop notices
        supervisor.send(to_json(notice).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
