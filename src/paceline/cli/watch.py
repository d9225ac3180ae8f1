"""The verb that shows runs while they go on: in the browser, in the terminal, or to Prometheus."""

from __future__ import annotations

import argparse
import contextlib
import html
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.arguments import Parser
from paceline.cli.cluster import add_proof, chosen_tls
from paceline.errors import UserError
from paceline.transports.connection import is_loopback, parse_address

if TYPE_CHECKING:
    from paceline.reports.watch.sources import RunSource

DESCRIPTION = """Follow runs while they train: a page in the browser, or a view in the terminal.

  paceline watch                         all runs below runs/, the newest first
  paceline watch runs/NAME --open        one run; open the browser
  paceline watch runs/NAME --terminal    in this terminal, not the browser
  paceline watch 10.0.0.1:29500          the run of a server; needs its token
  paceline watch --listen 0.0.0.0:7223   for other machines; prints a new token

Prometheus reads /metrics at the same address. Ctrl-C ends the page; the runs continue."""


def watch_verb(arguments: list[str]) -> int:
    parser = Parser("watch", DESCRIPTION, "paceline watch [RUN|DIR|HOST:PORT] [flags]")
    what = "run, folder of runs, or address of a server [runs]"
    parser.add("what", what, nargs="?", default="runs", metavar="RUN|DIR|HOST:PORT")
    parser.add("--listen", "address of the page [127.0.0.1:7223, or the next free port]", metavar="HOST:PORT")
    parser.add("--page-token", "file with the token that browsers on other machines need [a new one]", metavar="FILE")
    parser.add("--open", "open the page in the browser", action="store_true")
    terminal = "show the runs in this terminal; plain lines if the output is no terminal"
    parser.add("--terminal", terminal, action="store_true")
    add_proof(parser)
    parsed = parser.parse_strictly(arguments)
    _check(parsed)
    try:
        with _source(parsed) as source:
            if parsed.terminal:
                from paceline.reports.watch.terminal import watch_in_terminal

                watch_in_terminal(source, sys.stdout)
            else:
                _serve(source, parsed)
    except KeyboardInterrupt:
        print()
    return 0


def _check(parsed: argparse.Namespace) -> None:
    for flag in ("listen", "page_token", "open"):
        if parsed.terminal and getattr(parsed, flag):
            name = flag.replace("_", "-")
            raise UserError(f"--{name} is for the page, which --terminal does without: leave one of them out")


@contextlib.contextmanager
def _source(parsed: argparse.Namespace) -> Iterator[RunSource]:
    """Open the run, the folder of runs, or the server on another machine."""
    from paceline.reports.watch.remote import is_served, mirrored
    from paceline.reports.watch.sources import FolderSource, RemoteRun
    from paceline.transports.auth import ConnectOptions

    proof = parsed.token_file, chosen_tls(parsed, "fingerprint", "ca"), parsed.fingerprint, parsed.ca
    if is_served(parsed.what):
        with mirrored(ConnectOptions(parsed.what, *proof)) as mirror:
            yield RemoteRun(mirror)
        return
    if any(given is not None for given in proof):
        what = "--token-file, --tls, --plain, --fingerprint and --ca are for HOST:PORT"
        raise UserError(f"{parsed.what} is a folder: {what}")
    yield FolderSource(Path(parsed.what))


def _serve(source: RunSource, parsed: argparse.Namespace) -> None:
    from paceline.reports.watch.server import PORT, open_server
    from paceline.reports.watch.sources import RunFollower
    from paceline.transports.connection import format_address

    host, port = parse_address(parsed.listen or f"127.0.0.1:{PORT}")
    token = _token(host, parsed.page_token)
    server = open_server(RunFollower(source), host, port, token)
    if port and server.port != port:
        print(f"port {port} is in use: this is at {server.port}")
    shown = f"?token={urllib.parse.quote(token, safe='')}" if token else ""
    address = f"http://{format_address((_name(host), server.port))}/{shown}"
    print(f"watching {source.title}: {address}")
    if not is_loopback(host):
        print("it is not encrypted: on a network that others use, prefer 'ssh -L' instead of --listen")
    print("Ctrl-C ends the page; the runs continue", flush=True)
    try:
        with _opened_page(address, token is not None) if parsed.open else contextlib.nullcontext():
            server.serve_forever()
    finally:
        server.follower.close()
        server.server_close()


@contextlib.contextmanager
def _opened_page(address: str, is_secret: bool) -> Iterator[None]:
    """Open the browser. Its command line is public, so a private file forwards to an address that is secret."""
    import webbrowser

    from paceline.transports.auth import write_secret

    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        page = Path(folder) / "open.html"
        if is_secret:
            to = html.escape(address)
            write_secret(page, f'<meta http-equiv="refresh" content="0; url={to}"><a href="{to}">the runs</a>'.encode())
        webbrowser.open(page.as_uri() if is_secret else address)
        yield


def _name(host: str) -> str:
    """Return the host for the page's address: the name of this machine if it listens on all interfaces."""
    import socket

    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def _token(host: str, file: str | None) -> str | None:
    """Return the token that a browser must send; None if only this machine can reach the page and no file is given."""
    from paceline.transports.auth import make_token, read_token

    if file is not None:
        found = read_token(Path(file), {})
        assert found is not None
        return found.decode(errors="replace")
    return None if is_loopback(host) else make_token().decode()
