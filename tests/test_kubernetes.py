"""The manifests of examples/kubernetes: their names refer to each other, our parsers accept their commands."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.runtimes.cluster.credentials import ListenOptions
from paceline.settings.resolve import resolve
from paceline.transports.auth import ConnectOptions
from paceline.transports.connection import parse_address
from tests.support.pods import MANIFESTS, manifests

PAGE = Path(__file__).resolve().parents[1] / "docs/kubernetes.md"
RELEASES = ("1.31", "1.37")  # of Kubernetes: the oldest that the page names, and the newest whose schemas we have
Objects = list[dict[str, Any]]


class Reached(Exception):
    """A command was parsed; what it would have done is not done."""


def find(objects: Objects, kind: str, name: str) -> Any:
    return next(one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name))


def pod(objects: Objects, job: str) -> Any:
    return find(objects, "Job", job)["spec"]["template"]["spec"]


def containers(objects: Objects, job: str) -> list[dict[str, Any]]:
    return [*pod(objects, job).get("initContainers", []), *pod(objects, job)["containers"]]


def addresses(objects: Objects) -> set[str]:
    """Where the containers of workers look for the server."""
    words = [
        word for one in containers(objects, "paceline-workers") for part in one["command"] for word in part.split()
    ]
    return {match[0] for word in words if (match := re.search(r"[\w.-]+:\d+$", word.removeprefix("--connect=")))}


def check_names(objects: Objects) -> None:
    """Assert that everything that is named exists."""
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    assert len(names) == len(objects)
    create = re.search(r"kubectl create secret generic (\S+) --from-literal=(\w+)=", PAGE.read_text(encoding="utf-8"))
    (image,) = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["images"]
    for job in ("paceline-server", "paceline-workers"):
        volumes = {one["name"]: one for one in pod(objects, job)["volumes"]}
        claims = {one["persistentVolumeClaim"]["claimName"] for one in volumes.values() if "emptyDir" not in one}
        assert {("PersistentVolumeClaim", claim) for claim in claims} <= names
        mounted = set()
        for one in containers(objects, job):
            mounted |= {mount["name"] for mount in one["volumeMounts"]}
            assert one["image"] == image["name"]
            (secret,) = [variable["valueFrom"]["secretKeyRef"] for variable in one["env"]]
            assert create is not None and (secret["name"], secret["key"]) == create.groups()
        assert mounted == volumes.keys()
        rules = find(objects, "Job", job)["spec"]["podFailurePolicy"]["rules"]
        meant = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
        assert meant <= {one["name"] for one in containers(objects, job)}


def check_service(objects: Objects) -> None:
    """Assert that the Service leads from the workers to the server's port, and nowhere else."""
    service = find(objects, "Service", "paceline-server")
    selected = service["spec"]["selector"].items()
    jobs = [one for one in objects if one["kind"] == "Job"]
    assert [one["metadata"]["name"] for one in jobs if selected <= labels(one).items()] == ["paceline-server"]
    (server,), (port,) = containers(objects, "paceline-server"), service["spec"]["ports"]
    (listens,) = [one["containerPort"] for one in server["ports"] if one["name"] == port["targetPort"]]
    assert addresses(objects) == {f"paceline-server:{port['port']}"}
    assert parse_address(server["readinessProbe"]["exec"]["command"][2]) == ("127.0.0.1", listens)
    (listen,) = [word for word in server["command"] if word.startswith("--listen=")]
    assert parse_address(listen.removeprefix("--listen=")) == ("0.0.0.0", listens)


def labels(job: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = job["spec"]["template"]["metadata"]["labels"]
    return found


def check_sizes(objects: Objects, config: RunConfig) -> None:
    """Assert that as many workers are started as the run begins with, and that more may come."""
    jobs = find(objects, "Job", "paceline-workers")["spec"]
    assert jobs["parallelism"] == jobs["completions"] == config.workers
    assert config.max_workers is not None and config.max_workers > jobs["parallelism"]
    (server,) = containers(objects, "paceline-server")
    claims = {one["name"] for one in pod(objects, "paceline-server")["volumes"] if "persistentVolumeClaim" in one}
    assert config.runs in [mount["mountPath"] for mount in server["volumeMounts"] if mount["name"] in claims]


def parsed(monkeypatch: pytest.MonkeyPatch, command: list[str], target: str) -> tuple[Any, ...]:
    """What `target` is called with if our command line gets this command."""
    seen: list[tuple[Any, ...]] = []

    def reach(*arguments: Any) -> None:
        seen.append(arguments)
        raise Reached

    monkeypatch.setattr(target, reach)
    assert command[0] == "paceline"
    with pytest.raises(Reached):
        main(command[1:])
    return seen[0]


def server_config(monkeypatch: pytest.MonkeyPatch, objects: Objects) -> RunConfig:
    (server,) = containers(objects, "paceline-server")
    config, options, *_ = parsed(monkeypatch, server["command"], "paceline.runtimes.cluster.serve.serve_or_resume")
    assert isinstance(options, ListenOptions) and options.tls is None  # TLS, since others can connect
    return resolve(config)


def test_names_refer_to_each_other() -> None:
    check_names(manifests())
    check_service(manifests())


def test_our_command_line_accepts_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = manifests()
    check_sizes(objects, server_config(monkeypatch, objects))
    (server,) = containers(objects, "paceline-server")
    probe = server["readinessProbe"]["exec"]["command"]
    looked = parsed(monkeypatch, probe, "paceline.reports.watch.remote.status_reader")
    assert looked[0] == probe[2]
    wait, worker = containers(objects, "paceline-workers")
    (options, _) = parsed(monkeypatch, worker["command"], "paceline.runtimes.cluster.join.join_server")
    assert isinstance(options, ConnectOptions) and {options.connect} == addresses(objects)
    inner = re.search(r"do (paceline status \S+) &&", wait["command"][-1])
    assert inner is not None
    looked = parsed(monkeypatch, inner[1].split(), "paceline.reports.watch.remote.status_reader")
    assert looked[0] == options.connect


def change(*path: Any, to: Any) -> Callable[[Objects], None]:
    """A change of one value: the kind and name of an object, then the keys within it."""

    def apply(objects: Objects) -> None:
        kind, name, *keys, last = path
        place = find(objects, kind, name)
        for key in keys:
            place = place[key]
        assert place[last] != to
        place[last] = to

    return apply


SERVER, WORKERS, SERVICE = ("Job", "paceline-server"), ("Job", "paceline-workers"), ("Service", "paceline-server")
POD, TEMPLATE = ("spec", "template", "spec"), ("spec", "template")
COMMAND = (*POD, "containers", 0, "command")
MISTAKES: dict[str, Callable[[Objects], None]] = {
    "a selector of no pod": change(*SERVICE, "spec", "selector", "app.kubernetes.io/component", to="servers"),
    "a selector of all pods": change(*SERVICE, "spec", "selector", to={"app.kubernetes.io/name": "paceline"}),
    "a port that is not open": change(*SERVICE, "spec", "ports", 0, "port", to=29501),
    "a server at another port": change(*SERVER, *COMMAND, 5, to="--listen=0.0.0.0:29501"),
    "workers of another server": change(*WORKERS, *COMMAND, 2, to="--connect=paceline:29500"),
    "a probe of another port": change(
        *SERVER, *POD, "containers", 0, "readinessProbe", "exec", "command", 2, to="127.0.0.1:1"
    ),
    "a claim that is not made": change(
        *SERVER, *POD, "volumes", 0, "persistentVolumeClaim", "claimName", to="paceline-run"
    ),
    "a volume that is not there": change(*SERVER, *POD, "containers", 0, "volumeMounts", 0, "name", to="run"),
    "a key that the Secret lacks": change(
        *WORKERS, *POD, "containers", 0, "env", 0, "valueFrom", "secretKeyRef", "key", to="Token"
    ),
    "an image that is not replaced": change(*WORKERS, *POD, "initContainers", 0, "image", to="paceline:latest"),
    "the exit codes of no container": change(
        *SERVER, "spec", "podFailurePolicy", "rules", 1, "onExitCodes", "containerName", to="main"
    ),
    "the folder beside the volume": change(*SERVER, *COMMAND, 4, to="--runs=/srv/run"),
    "fewer workers than are awaited": change(*WORKERS, "spec", "parallelism", to=1),
    "a flag that we lack": change(*SERVER, *COMMAND, 2, to="--continued"),
    "a strategy that we lack": change(*SERVER, *COMMAND, 8, to="--strategy=asynchronous"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_noticed(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    objects = copy.deepcopy(manifests())
    MISTAKES[case](objects)
    with pytest.raises((AssertionError, UserError, pytest.fail.Exception)):
        check_names(objects)
        check_service(objects)
        check_sizes(objects, server_config(monkeypatch, objects))


@pytest.fixture
def schemas() -> Any:
    """The schemas of Kubernetes' own objects, in which no unknown field is allowed."""
    return pytest.importorskip("kubernetes_validate", reason="pip install -c constraints.txt kubernetes-validate")


@pytest.mark.parametrize("release", RELEASES)
def test_kubernetes_accepts_every_object(schemas: Any, release: str) -> None:
    for one in manifests():
        assert schemas.validate(one, release, strict=True) == release


@pytest.mark.parametrize(
    "mistake",
    [
        change(*SERVER, "spec", "backoffLimit", to="20"),
        change(*SERVER, "spec", "podFailurePolicy", "rules", 0, to={"onPodConditions": []}),
        change(*SERVER, *POD, "containers", 0, to={"command": ["paceline"]}),
        change(*WORKERS, *POD, to={"container": []}),
        change(*SERVICE, "spec", to={"port": 29500}),
        change("PersistentVolumeClaim", "paceline-runs", "spec", "accessModes", to="ReadWriteOnce"),
    ],
)
def test_kubernetes_refuses_a_mistake(schemas: Any, mistake: Callable[[Objects], None]) -> None:
    objects = copy.deepcopy(manifests())
    mistake(objects)
    with pytest.raises(schemas.ValidationError):
        for one in objects:
            schemas.validate(one, RELEASES[-1], strict=True)
