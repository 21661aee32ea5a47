"""What docs/deploy/ and the operators' pages name is there: options, variables, commands, paths, routes; and timeouts
fit each other. All of it is read by the real command line and the real settings.
"""

import importlib
import json
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_reference import parameters
from small_server import answering
from typer.main import get_command

import api.routes
from api.asgi.resumption import RESUME
from api.auth.scopes import NEEDS
from api.cli.common.settings_options import given_settings
from api.cli.program import app
from api.cluster.forwarding import Destination, destination
from api.config.settings import SPELLINGS
from api.config.sources import Sources
from api.replication.peer_headers import CLUSTER, PREFILL
from api.replication.peer_headers import PAGES as PAGES_OF

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "docs" / "deploy"
PAGES = [ROOT / "docs" / "deploy.md", ROOT / "docs" / "operating.md"]
FILES = sorted(path for path in DEPLOY.iterdir() if path.is_file())
ENTRY = "/opt/lorasrv/bin/lorasrv"
RAN = re.compile(rf"(?:docker run .*?|run --rm )lorasrv(?::cuda)? +((?:serve|key) .*)|{ENTRY} ((?:serve|key|store) .*)")
OF_CLIENTS = {"LORASRV_SERVER", "LORASRV_API_KEY", "LORASRV_CONFIG", "LORASRV_NAME"}
"""Variables that are no option of serve; LORASRV_NAME stands for any."""


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, the rest), continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in text.splitlines() if line.strip()]


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["lorasrv"]


def stateful_set() -> Any:
    parts = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    return next(part for part in parts if part["kind"] == "StatefulSet")


def container() -> Any:
    [one] = stateful_set()["spec"]["template"]["spec"]["containers"]
    return one


def unit() -> dict[str, list[str]]:
    """Setting -> its values, whatever the section."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "lorasrv.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def _arguments(name: str) -> Iterator[list[str]]:
    """What lorasrv is started with by pods in a file."""
    for part in yaml.safe_load_all((DEPLOY / name).read_text()):
        pod = part["spec"].get("template", {}).get("spec", {})
        yield from (one["args"] for one in pod.get("containers", ()) if "args" in one)


def commands() -> Iterator[tuple[str, list[str]]]:
    """(where, words behind `lorasrv`) of everything that is started."""
    instructions = dict(dockerfile())
    assert json.loads(instructions["ENTRYPOINT"]) == ["lorasrv"]
    yield "Dockerfile", json.loads(instructions["CMD"])
    yield "compose.yaml", compose()["command"]
    yield "kubernetes.yaml", container()["args"]
    yield from ((name, args) for name in ("followers.yaml", "rayservice.yaml") for args in _arguments(name))
    entry, *words = shlex.split(unit()["ExecStart"][0])
    assert entry == ENTRY
    yield "lorasrv.service", words
    for path in [*PAGES, *FILES]:
        for line in path.read_text().replace("\\\n", " ").splitlines():
            ran = RAN.search(line)
            if ran and path.name != "lorasrv.service":
                yield path.name, shlex.split((ran[1] or ran[2]).partition("`")[0])


COMMANDS = list(commands())


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=[f"{where}-{n}" for n, (where, _) in enumerate(COMMANDS)])
def test_what_is_started_is_understood(
    where: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command: Any = get_command(app)
    # A store that is named must be there.
    rest = [str(tmp_path) if before == "--store" else word for before, word in pairwise(["", *words])]
    while hasattr(command, "commands"):
        assert rest[0] in command.commands, f"{where}: no such command: {rest[0]}"
        command = command.commands[rest.pop(0)]
    # Raises on an option that is not there, or a value that is none.
    context = command.make_context("lorasrv", rest)
    if words[0] == "serve":
        monkeypatch.setenv("LORASRV_API_KEY", "")
        # Whether there are keys is not known here.
        Sources.gather({**given_settings(context), "insecure": True}).settings()


def test_a_wrong_option_is_noticed() -> None:
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="no-such-option"):
        serve.make_context("serve", ["--no-such-option", "1"])


@pytest.mark.parametrize("path", [*PAGES, *FILES], ids=lambda path: path.name)
def test_variables_are_options(path: Path) -> None:
    named = set(re.findall(r"\bLORASRV_[A-Z_]+\b", path.read_text()))
    options = {f"LORASRV_{name.upper()}" for name in SPELLINGS}
    assert named - options - OF_CLIENTS == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_options_in_the_text_are_there(page: Path) -> None:
    """In blocks of shell they are checked by `test_snippets.py`; here those of `code` in sentences and tables."""
    root: Any = get_command(app)
    commands = [*root.commands.values()]
    commands += [inner for command in commands for inner in getattr(command, "commands", {}).values()]
    known = {spelled for command in commands for option in parameters(command) for spelled in option.opts}
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    named = {
        flag
        for code in re.findall(r"`([^`]+)`", prose)
        if not re.match(r"docker|--read-only|--restart|--build-arg|pip |kubectl|systemd", code)
        for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]+", code)
    }
    assert named - known == set()


@pytest.mark.parametrize("path", [*PAGES, *FILES], ids=lambda path: path.name)
def test_routes_are_there(path: Path) -> None:
    routes: set[str] = set()
    for module in pkgutil.iter_modules(api.routes.__path__):
        router = getattr(importlib.import_module(f"api.routes.{module.name}"), "router", None)
        routes |= {str(getattr(route, "path", "")) for route in getattr(router, "routes", [])}
    for named in set(re.findall(r"(?<![\w/.])/(?:health|ready|metrics|v1/[a-z_/]+)\b", path.read_text())):
        assert any(route == named or route.startswith(f"{named.rstrip('/')}/") for route in routes), named


def test_nginx_sends_to_the_replicas_what_the_edge_sends_there() -> None:
    [chosen] = re.findall(r"location ~ (\S+) \{", (DEPLOY / "nginx-replicas.conf").read_text())
    goes = {Destination.REPLICA: set[str](), Destination.REGISTRY: set[str]()}
    for method, template in NEEDS:
        path = template.replace("{reference}", "mia@2")
        goes[destination(method, path)].add(path)
    # Not seen by a path alone: the console's page is the same everywhere.
    goes[Destination.REGISTRY] -= goes[Destination.REPLICA]
    assert {path for path in goes[Destination.REPLICA] if not re.search(chosen, path)} == set()
    assert {path for path in goes[Destination.REGISTRY] if re.search(chosen, path)} == set()


def test_nginx_passes_on_no_header_of_the_cluster() -> None:
    set_to_nothing = re.findall(r'proxy_set_header (\S+) "";', (DEPLOY / "nginx-replicas.conf").read_text())
    assert {CLUSTER, RESUME, PREFILL, PAGES_OF} <= {name.lower() for name in set_to_nothing}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{target}#{anchor}"


def drain_s(words: list[str]) -> float:
    return float(words[words.index("--drain-s") + 1])


def test_every_stop_timeout_covers_the_drain() -> None:
    named = dict(reversed(COMMANDS))
    assert float(unit()["TimeoutStopSec"][0]) > drain_s(named["lorasrv.service"])
    assert float(compose()["stop_grace_period"].removesuffix("s")) > drain_s(named["compose.yaml"])
    pod = stateful_set()["spec"]["template"]["spec"]
    asleep = float(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > asleep + drain_s(named["kubernetes.yaml"])
    for text in re.findall(r"--stop-timeout (\d+)", (ROOT / "docs" / "deploy.md").read_text()):
        assert float(text) > drain_s(named["Dockerfile"])


def test_one_server_a_store() -> None:
    spec = stateful_set()["spec"]
    assert spec["replicas"] == 1
    assert [claim["spec"]["accessModes"] for claim in spec["volumeClaimTemplates"]] == [["ReadWriteOncePod"]]


def test_the_service_is_not_root_and_writes_its_data_only() -> None:
    stages = [number for number, (name, _) in enumerate(dockerfile()) if name == "FROM"]
    last = dockerfile()[stages[-1] :]
    [user] = [rest for name, rest in last if name == "USER"]
    assert user == "10001"
    assert container()["securityContext"]["readOnlyRootFilesystem"] is True
    assert compose()["read_only"] is True
    assert unit()["ProtectSystem"] == ["strict"]
    store = dict(pair.split("=", 1) for pair in unit()["Environment"])["LORASRV_STORE"]
    assert store.startswith(f"/var/lib/{unit()['StateDirectory'][0]}/")
    env = dict(re.findall(r"(\w+)=(\S+)", " ".join(rest for name, rest in last if name == "ENV")))
    [volume] = [rest for name, rest in last if name == "VOLUME"]
    assert {env[name].startswith(f"{volume}/") for name in ("LORASRV_STORE", "XDG_CACHE_HOME")} == {True}
    assert {mount["mountPath"] for mount in container()["volumeMounts"]} == {volume, "/tmp"}
    assert compose()["volumes"] == [f"data:{volume}"]


def test_what_the_image_takes_is_there_and_not_ignored() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for name, rest in dockerfile():
        if name == "COPY" and "--from" not in rest:
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert {f"!{source}", f"!{source}/**"} & set(ignored), f"{source} is not sent to the build"
    pinned = re.search(r"BASE_MODEL := (\S+)", (ROOT / "Makefile").read_text())
    assert pinned is not None
    assert f"BASE_MODEL={pinned[1]}" in {rest.partition("=")[0]: rest for _, rest in dockerfile()}["BASE_MODEL"]


@pytest.mark.parametrize("status", [200, 503])
def test_the_health_check_of_the_image(status: int) -> None:
    check = next(rest for name, rest in dockerfile() if name == "HEALTHCHECK")
    command = json.loads(check.partition("CMD")[2])
    with answering(lambda request: (status if request.path == "/health" else 404, {}, b"")) as url:
        words = [word.replace(":8000", f":{url.rpartition(':')[2]}") for word in command[1:]]
        done = subprocess.run([sys.executable, *words], check=False, capture_output=True)
    assert (done.returncode == 0) == (status == 200)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "lorasrv.service"
    copy.write_text((DEPLOY / "lorasrv.service").read_text().replace(ENTRY, "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
