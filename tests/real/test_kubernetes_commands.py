"""The commands of examples/kubernetes, as they are written there, through what happens to pods."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import result_of, wait_for_records
from tests.support.pods import Node, can_make_nodes, pod_of
from tests.support.waiting import PATIENCE, until

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not can_make_nodes(), reason="namespaces cannot be made here"),
]

TOKEN = "a token as kubectl would make one"
SHORT = {"--epochs=20": "--epochs=1"}  # of the manifest's run
SLOW = "--delay=200ms@0,1,2"  # so that the run lasts until all has happened to it; worker 3 then ends it soon


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and the error stream of a container."""
    _, err = process.communicate(timeout=PATIENCE)
    return process.returncode, err


def serves(folder: Path, pid: int) -> bool:
    """Whether this process has written where it serves the run."""
    file = folder / "server.json"
    return file.exists() and json.loads(file.read_text())["pid"] == pid


def joined(folder: Path) -> list[int]:
    """The numbers of all workers that joined, in order."""
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [row["worker"] for row in rows if row["kind"] == "worker_joined"]


@pytest.mark.timeout(240)
def test_a_run_survives_what_happens_to_its_pods(tmp_path: Path) -> None:
    (server,), workers = pod_of("paceline-server")["containers"], pod_of("paceline-workers")
    command = [*(SHORT.get(word, word) for word in server["command"]), SLOW]
    probe, volume = server["readinessProbe"]["exec"]["command"], server["volumeMounts"][0]["mountPath"]
    (wait,), (worker,) = workers["initContainers"], workers["containers"]
    with Node(tmp_path, "paceline-server", volume) as node:
        assert node.is_ready
        folder = node.volume / "fashion"

        def serve() -> subprocess.Popen[str]:
            started = node.start(command, TOKEN)
            until(lambda: serves(folder, started.pid), "a server")
            until(lambda: node.run(probe, TOKEN) == 0, "a server that is ready")
            return started

        def work() -> subprocess.Popen[str]:
            assert node.run(wait["command"], TOKEN) == 0
            return node.start(worker["command"], TOKEN)

        assert node.run(probe, TOKEN) != 0  # nobody serves yet
        first = serve()
        two = [work(), work()]
        wait_for_records(folder, 20)

        first.kill()  # the server's pod is lost
        assert finish(first)[0] == -signal.SIGKILL
        second = serve()
        until(lambda: len(joined(folder)) == 4, "both workers, again")

        third = work()  # parallelism 2 -> 3
        until(lambda: 2 in joined(folder), "worker 2")

        second.terminate()  # the server's node is drained
        code, err = finish(second)
        assert code == 130, err
        last = serve()
        until(lambda: len(joined(folder)) == 8, "three workers, again")

        two[0].terminate()  # parallelism 3 -> 2
        code, err = finish(two[0])
        assert code == 130 and "was terminated: it leaves after its push" in err, err
        stays = next(number for number in range(3) if f"worker {number} was terminated" not in err)
        assert node.run(["paceline", "drain", f"{volume}/fashion", str(stays)], TOKEN) == 0

        more = [work() for _ in range(3)]  # the numbers of the two that left are free, so one of them is worker 3
        code, err = finish(last)
        assert code == 0, err
        ends = [finish(process) for process in (two[1], third)]
        assert [code for code, _ in ends] == [0, 0], ends
        assert sum("was drained" in err for _, err in ends) == 1
        assert 0 in [finish(process)[0] for process in more]  # another may have come when the run was over
        result = result_of(folder)
        assert (result["status"], result["resumes"]) == ("finished", 2)
        assert node.run(command, TOKEN) == 0  # its result was not seen by anybody: the Job starts it once more
        assert node.run(["paceline", "replay", f"{volume}/fashion"], TOKEN) == 0
