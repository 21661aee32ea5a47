"""Where options come from: the order of the sources as a property, and one clear line for whatever is wrong."""

import inspect
import json
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.cli.commands.serve import _SWITCHES, serve
from api.config.file import client_options
from api.config.settings import ServerSettings
from api.config.sources import FIELDS, Sources, expected, unknown_variables
from lorasrv.errors import ConfigError

SOURCES = ("default", "file", "environment", "flag")
# What each source says: in TOML, in the environment, as a flag; and what comes of it.
SAID: dict[str, tuple[tuple[Any, str, Any], tuple[Any, Any, Any]]] = {
    "port": ((1001, "1002", 1003), (1001, 1002, 1003)),
    "model": (("f.gguf", "e.gguf", "x.gguf"), ("f.gguf", "e.gguf", "x.gguf")),
    "pool_bytes": (("1MiB", "2MiB", 3), (1 << 20, 2 << 20, 3)),
    "store": (("/f", "/e", "/x"), (Path("/f"), Path("/e"), Path("/x"))),
    "policy": (("fcfs", "sjf", "mlfq"), ("fcfs", "sjf", "mlfq")),
    "target_itl_ms": ((7, "off", "8.5"), (7.0, None, 8.5)),
    "early_abort": ((True, "false", True), (True, False, True)),
    "enable_prefix_caching": ((False, "true", False), (False, True, False)),
    "allowed_origins": (
        (["https://f.example"], "https://e.example,https://g.example", ["https://x.example"]),
        (("https://f.example",), ("https://e.example", "https://g.example"), ("https://x.example",)),
    ),
    "queue_timeout_s": ((1.5, "2.5", 3.5), (1.5, 2.5, 3.5)),
}

drawn = st.dictionaries(st.sampled_from(sorted(SAID)), st.sets(st.sampled_from(SOURCES[1:])))


@given(drawn, st.booleans())
@settings(max_examples=150, deadline=None)
def test_flags_before_environment_before_file_before_defaults(chosen: dict[str, set[str]], hyphens: bool) -> None:
    file, environment, flags = {}, {"XDG_CONFIG_HOME": "/nowhere"}, {}
    for name, sources in chosen.items():
        in_file, in_environment, as_flag = SAID[name][0]
        if "file" in sources:
            file[name.replace("_", "-") if hyphens else name] = in_file
        if "environment" in sources:
            environment[f"LORASRV_{name.upper()}"] = in_environment
        if "flag" in sources:
            flags[name] = as_flag
    defaults = ServerSettings()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, environment):
        path = Path(folder) / "c.toml"
        # A text, list, number or switch in JSON is TOML.
        path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in file.items()))
        gathered = Sources.gather(flags, path)
        done = gathered.settings()
        for name in SAID:
            highest = max(chosen.get(name, set()) | {"default"}, key=SOURCES.index)
            origin = gathered.origin(name)
            assert origin.kind == highest
            if highest == "default":
                assert getattr(done, name) == getattr(defaults, name)
            else:
                assert getattr(done, name) == SAID[name][1][SOURCES.index(highest) - 1]
        said_by = {"file": str(path), "environment": "LORASRV_PORT", "flag": "--port", "default": ""}
        assert gathered.origin("port").name == said_by[gathered.origin("port").kind]


def write(folder: Path, text: str) -> Path:
    path = folder / "c.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "{file}: unknown key prot; did you mean port?"),
        ("x = 1", "{file}: unknown key x; lorasrv config init lists all there are"),
        ("port = 70000", "{file}: port: 70000 is not allowed; expected a whole number, at least 0 and at most 65535"),
        ("port = true", "{file}: port: true is not allowed; expected a whole number, at least 0 and at most 65535"),
        ('port = "x"', "{file}: port: 'x' is not allowed; expected a whole number, at least 0 and at most 65535"),
        ("model = 1", "{file}: model: 1 is not allowed; expected a text"),
        ("pool_bytes = -1", "{file}: pool_bytes: must not be negative, not -1"),
        ('pool-bytes = "lots"', "{file}: pool_bytes: 'lots' is not allowed; expected a size: 512MiB, 2GB or bytes"),
        ("max_num_seqs = 0", "{file}: max_num_seqs must be positive, not 0"),
        ('policy = "fare"', "{file}: policy 'fare' is unknown; choose from fair, fcfs, mlfq, sjf"),
        ("early_abort = 7", "{file}: early_abort: 7 is not allowed; expected true or false"),
        ('api_key = "s3 cret"', "{file}: api_key: takes 8 or more letters, digits and signs without spaces; "
         "lorasrv key create makes one"),
        ("api_key = 12345678", "{file}: api_key: what is given is not allowed; expected a text"),
        ("port = 1\nport = 2", "{file}: cannot overwrite a value (at end of document)"),
        ("port = \nhost = 1", "{file}: invalid value (at line 1, column 8)"),
        ("max-queued = 1\nmax_queued = 2", "{file}: max_queued stands there twice, with - and with _"),
        ("client = 1", "{file}: client: expected a table, [client] with server and api_key"),
        ("[client]\nserve = 'x'", "{file}: unknown key client.serve; did you mean server?"),
        ("[client]\nserver = 7", "{file}: client.server: expected a text that is not empty"),
    ],
)  # fmt: skip
def test_one_line_with_file_key_and_range(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        Sources.gather({}, path).settings()
    assert str(caught.value) == says.format(file=path)


def test_what_is_wrong_is_said_of_whom_it_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "max_num_seqs = 0")
    assert Sources.gather({"max_num_seqs": 4}, path).settings().max_num_seqs == 4, "a flag that is right goes before"
    monkeypatch.setenv("LORASRV_MAX_NUM_SEQS", "0")
    with pytest.raises(ConfigError, match=r"^LORASRV_MAX_NUM_SEQS must be positive, not 0$"):
        Sources.gather({}, path).settings()
    monkeypatch.setenv("LORASRV_MAX_NUM_SEQS", "many")
    with pytest.raises(ConfigError, match=r"^LORASRV_MAX_NUM_SEQS: 'many' is not allowed; expected a whole number$"):
        Sources.gather({}, path).settings()
    with pytest.raises(ConfigError, match=r"^--max-num-seqs must be positive, not 0$"):
        Sources.gather({"max_num_seqs": 0}, path).settings()


class TestWhere:
    def test_the_default_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert Sources.gather().file is None
        (tmp_path / "lorasrv").mkdir()
        (tmp_path / "lorasrv" / "config.toml").write_text("port = 5")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        assert Sources.gather().settings().port == 5

    def test_a_named_one_must_be_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            Sources.gather({}, tmp_path / "none.toml")
        monkeypatch.setenv("LORASRV_CONFIG", str(tmp_path / "none.toml"))
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            Sources.gather()
        with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
            Sources.gather({}, tmp_path)

    def test_one_line_for_a_file_of_bytes(self, tmp_path: Path) -> None:
        path = tmp_path / "c.toml"
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match="is no UTF-8 text"):
            Sources.gather({}, path)

    def test_of_clients(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert client_options() == {}
        path = write(tmp_path, '[client]\nserver = "http://a"\napi-key = "k"\n')
        monkeypatch.setenv("LORASRV_CONFIG", str(path))
        assert client_options() == {"server": "http://a", "api_key": "k"}


def test_variables_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORASRV_PROT", "1")
    monkeypatch.setenv("LORASRV_SERVER", "http://a")
    assert unknown_variables() == [
        "LORASRV_PROT is in the environment, and nothing reads it; did you mean LORASRV_PORT?"
    ]


def test_every_option_says_what_it_takes() -> None:
    assert all(expected(name).startswith(("a ", "one of ", "true ")) for name in FIELDS)
    assert expected("device") == "one of auto, cpu, cuda"


class TestCommands:
    def test_show(self, cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write(tmp_path, 'port = 5\n[client]\nserver = "http://u:pw@h:1"\napi_key = "sekrit"\n')
        monkeypatch.setenv("LORASRV_POLICY", "sjf")
        monkeypatch.setenv("LORASRV_API_KEY", "also-sekrit")
        done = cli("config", "show", "--origin", "--config", path)
        rows = {name: rest for name, *rest in (line.split("\t") for line in done.out.splitlines())}
        assert rows["option"] == ["value", "from"]
        assert rows["port"] == ["5", f"file {path}"]
        assert rows["policy"] == ["sjf", "environment LORASRV_POLICY"]
        assert rows["max_num_seqs"] == ["64", "default"]
        assert rows["client.server"] == ["http://u:********@h:1", f"file {path}"]
        assert rows["client.api_key"] == rows["api_key"] == ["********", "environment LORASRV_API_KEY"]
        assert "sekrit" not in done.out + done.err
        assert "pw" not in done.out
        assert set(FIELDS) < set(rows)

    def test_show_json(self, cli, tmp_path: Path) -> None:
        path = write(tmp_path, "port = 5")
        assert json.loads(cli("config", "show", "--json", "--config", path).out)["port"] == 5
        shown = json.loads(cli("config", "show", "--json", "--origin", "--config", path).out)
        assert shown["port"] == {"value": 5, "origin": "file", "from": str(path)}
        assert shown["host"] == {"value": "127.0.0.1", "origin": "default", "from": None}

    def test_show_flags_of_serve(self, cli, tmp_path: Path) -> None:
        path = tmp_path / "c.toml"
        path.write_text("port = 5\nearly-abort = true\n")
        command = ("config", "show", "--origin", "--json", "--")
        flags = ("--config", path, "--port", 9, "--no-early-abort", "--lora-modules", "a=/a", "b=/b")
        shown = json.loads(cli(*command, *flags, "--store", "/x", "--api-key", "secret-secret").out)
        assert shown["port"] == {"value": 9, "origin": "flag", "from": "--port"}
        assert shown["early_abort"] == {"value": False, "origin": "flag", "from": "--early-abort"}
        assert shown["store"] == {"value": "/x", "origin": "flag", "from": "--store"}
        assert shown["lora_modules"]["value"] == ["a=/a", "b=/b"]
        assert shown["api_key"] == {"value": "********", "origin": "flag", "from": "--api-key"}
        assert shown["model"]["origin"] == "default"
        assert {name for name, one in shown.items() if one["origin"] == "flag"} == {
            *("port", "early_abort", "store", "lora_modules", "api_key")
        }
        for wrong, says in ((("--prt", 9), "no such option"), (("--port", 70000), "--port: 70000"), (("x",), "x")):
            done = cli(*command, *wrong)
            assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
            assert says in done.err

    def test_wrong_files_are_usage(self, cli, tmp_path: Path) -> None:
        path = write(tmp_path, "prot = 5")
        for command in ("show", "serve"):
            done = cli(*(("config", "show") if command == "show" else ("serve",)), "--config", path)
            assert (done.code, done.out, done.err) == (
                2,
                "",
                f"lorasrv: {path}: unknown key prot; did you mean port?\n",
            )

    def test_what_init_prints_is_a_configuration(self, cli, tmp_path: Path) -> None:
        text = cli("config", "init").out
        assert tomllib.loads(text) == {"client": {}}
        lines = [line.removeprefix("# ") for line in text.splitlines() if " = " in line and " = ..." not in line]
        path = write(tmp_path, "\n".join(line for line in lines if not line.startswith("server")))
        assert Sources.gather({}, path).settings() == ServerSettings()
        assert {name for name in FIELDS if f"\n# {name} = " not in text} == set()
        assert set(json.loads(cli("config", "init", "--json").out)) == set(FIELDS)

    def test_serve_has_a_flag_for_every_option(self, cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        given = []
        monkeypatch.setattr("api.server.run", lambda settings, *_: given.append(settings))
        path = write(tmp_path, "early_abort = true\nport = 5\ninsecure = true\n")
        assert cli("serve", "--config", path, "--no-early-abort", "--port", 6).code == 0
        assert (given[0].early_abort, given[0].port, given[0].insecure) == (False, 6, True)
        for flags in (("--early-abort", "--no-early-abort"), ("--enable-prefix-caching", "--no-enable-prefix-caching")):
            done = cli("serve", *flags)
            assert (done.code, done.err) == (2, f"lorasrv: {flags[0]} and {flags[1]} exclude each other\n")
        parameters = set(inspect.signature(serve).parameters)
        assert parameters - {"config", "as_json"} == {*FIELDS, *(f"no_{name}" for name in _SWITCHES)}

    def test_serve_tells_of_misspelled_variables(self, cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("api.server.run", lambda *_: None)
        monkeypatch.setenv("LORASRV_PROT", "1")
        assert cli("serve").err.startswith("warning: LORASRV_PROT is in the environment, and nothing reads it; did")

    def test_clients_ask_the_configured_server(self, cli, server, tmp_path: Path, monkeypatch) -> None:
        path = write(tmp_path, f'[client]\nserver = "{server.url}"\n')
        monkeypatch.setenv("LORASRV_CONFIG", str(path))
        assert cli("list").code == 0
        assert cli("list", "--server", "http://127.0.0.1:1").code == 3, "a flag goes before"
        monkeypatch.setenv("LORASRV_SERVER", "http://127.0.0.1:1")
        assert cli("list").code == 3, "so does the environment"
        path.write_text("[client]\nserver = 1")
        monkeypatch.delenv("LORASRV_SERVER")
        done = cli("list")
        assert (done.code, done.err) == (2, f"lorasrv: {path}: client.server: expected a text that is not empty\n")
        assert cli("list", "--help").code == 0
