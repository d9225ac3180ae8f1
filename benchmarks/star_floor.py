"""Upper bound for star_hosts.py: the speed of two bare loops that only exchange as many bytes as `async` does.

    python benchmarks/star_floor.py [--model lenet5] [--pairs N]

Each loop trains alone; during every step a thread sends as many bytes as the model has to a server on the first host,
which sends them back without parsing, rule or log. No server on these hosts that exchanges uncompressed gradients and
weights can be faster.
"""

from __future__ import annotations

import functools
import json
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pairs
from hosts import Host, cannot_measure, two_hosts
from processes import ended
from two_hosts import LR, MOMENTUM, PATIENCE_SECONDS, What, batches_of, rate, theirs, training_flags

HERE = str(Path(__file__).resolve())
PORT = 29513


def echo(address: str, nbytes: int) -> None:
    """Run in its own process: send the bytes of both loops back until they disconnect."""
    listener = socket.create_server((address, PORT))
    places = {}
    poll = select.epoll()
    for sock in [listener.accept()[0] for _ in range(2)]:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        places[sock.fileno()] = (sock, memoryview(bytearray(nbytes)))
        poll.register(sock, select.EPOLLIN)
        sock.send(b"!")
    left = {line: (True, nbytes) for line in places}
    while left:
        for line, _ in poll.poll():
            (sock, place), (receives, missing) = places[line], left[line]
            done = sock.recv_into(place[nbytes - missing :]) if receives else sock.send(place[nbytes - missing :])
            if not done:
                poll.unregister(line)
                del left[line]
            elif done < missing:
                left[line] = receives, missing - done
            else:
                left[line] = not receives, nbytes
                poll.modify(line, select.EPOLLOUT if receives else select.EPOLLIN)


def loop(address: str, what: What) -> None:
    """Run in its own process on one host: the bare loop, with one exchange during every step."""
    import torch

    torch.set_num_threads(1)
    task, batches = batches_of(what)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=LR, momentum=MOMENTUM)
    nbytes = task.layout.size * 4
    sock = _connected(address)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gradient, weights = bytes(nbytes), memoryview(bytearray(nbytes))
    errands: queue.SimpleQueue[bool] = queue.SimpleQueue()
    done: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def exchange() -> None:
        while errands.get():
            sock.sendall(gradient)
            sock.recv_into(weights, 0, socket.MSG_WAITALL)
            done.put(True)

    threading.Thread(target=exchange, daemon=True).start()
    sock.recv(1)  # both loops are connected
    done.put(True)
    times = []
    for number in range(what.steps):
        batch = batches[number % len(batches)]
        optimizer.zero_grad()
        task.loss(task.model(batch.inputs), batch.targets).backward()
        optimizer.step()
        done.get()
        errands.put(True)
        times.append(time.monotonic())
    done.get()
    print(json.dumps(times, allow_nan=False))


def exchanging(what: What, nbytes: int, hosts: tuple[Host, Host]) -> float:
    """Return the samples per second of both loops with the echo server."""
    command, there = [sys.executable, HERE], hosts[0].address
    server = _start(hosts[0], [*command, "echo", there, str(nbytes)])
    with ended([server], within=PATIENCE_SECONDS):
        loops = [_start(host, [*command, "loop", there, json.dumps(asdict(what), allow_nan=False)]) for host in hosts]
        with ended(loops, within=PATIENCE_SECONDS):
            lines = [json.loads(process.communicate(timeout=PATIENCE_SECONDS)[0]) for process in loops]
        server.wait(PATIENCE_SECONDS)
    return rate([[(moment, what.batch) for moment in times] for times in lines], what.dropped)


def _start(host: Host, words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(host.command(words), env=host.environment, stdout=subprocess.PIPE)


def _connected(address: str) -> socket.socket:
    """Connect to the server, which may still be starting."""
    deadline = time.monotonic() + 30.0
    while True:
        try:
            return socket.create_connection((address, PORT))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> int:
    parser = training_flags(__doc__, batch=32)
    parser.add_argument("--model", default="lenet5")
    parsed = parser.parse_args()
    if cannot_measure():
        return 2
    what = What(parsed.model, parsed.dataset, parsed.data_dir, parsed.batch, 150 if parsed.quick else 1500, dropped=5)
    nbytes = batches_of(what)[0].layout.size * 4
    with two_hosts(parsed.rate) as hosts:
        side, bare = functools.partial(exchanging, what, nbytes, hosts), functools.partial(theirs, "bare", what, hosts)
        say = pairs.teller(parsed, parsed.model)
        row = pairs.compare(f"{parsed.model}, echo", side, bare, pairs.num_pairs(parsed), say=say)
    print(pairs.table([row], "samples/s"))
    return pairs.close(parsed, "star_floor", [row], rate=parsed.rate, batch=parsed.batch)


if __name__ == "__main__":
    if sys.argv[1:2] == ["echo"]:
        echo(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["loop"]:
        loop(sys.argv[2], What(**json.loads(sys.argv[3])))
    else:
        sys.exit(main())
