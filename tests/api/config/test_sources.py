"""Where options come from: flag, variable or key; their order as a property; one line for whatever is wrong."""

import json
import os
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from cli_reference import commands, parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from api.config.engine_settings import engine_options
from api.config.file import client_options
from api.config.lora_module_path import LoraModulePath
from api.config.option_spec import flag
from api.config.settings import OPTIONS, SPELLINGS, ServerSettings
from api.config.sources import FIELDS, Sources, expected, unknown_variables
from lorasrv.config import EngineConfig
from lorasrv.errors import ConfigError

SOURCES = ("default", "file", "environment", "flag")
# What each source says: in TOML, in the environment, as a flag; and what comes of it.
SAID: dict[str, tuple[tuple[Any, str, Any], tuple[Any, Any, Any]]] = {
    "port": ((1001, "1002", 1003), (1001, 1002, 1003)),
    "model": (("f.gguf", "e.gguf", "x.gguf"), ("f.gguf", "e.gguf", "x.gguf")),
    "pool_bytes": (("1MiB", "2MiB", 3), (1 << 20, 2 << 20, 3)),
    "store": (("/f", "/e", "/x"), (Path("/f"), Path("/e"), Path("/x"))),
    "scheduling_policy": (("fcfs", "sjf", "mlfq"), ("fcfs", "sjf", "mlfq")),
    "target_itl_ms": ((7, "off", "8.5"), (7.0, None, 8.5)),
    "early_abort": ((True, "false", True), (True, False, True)),
    "enable_prefix_caching": ((False, "true", False), (False, True, False)),
    "allowed_origins": (
        (["http://f"], "http://e,http://g", ["http://x"]),
        (("http://f",), ("http://e", "http://g"), ("http://x",)),
    ),
    "queue_timeout_s": ((1.5, "2.5", 3.5), (1.5, 2.5, 3.5)),
}

MIA = LoraModulePath("mia", Path("/mia"))
ADAPTER, KEY = "scheduler.adapter_limits.", "scheduler.key_limits."
# Of every option: a text that is not its default, what comes of it, and where that is in the engine's configuration.
SAMPLES: dict[str, tuple[str, Any, str]] = {
    "model": ("m.gguf", "m.gguf", "model.model"),
    "served_model_name": ("house", "house", ""),
    "quantization": ("int4", "int4", "model.quantization"),
    "quantization_group": ("64", 64, "model.quantization_group"),
    "quantized_weights": ("/w.st", Path("/w.st"), "model.quantized_weights"),
    "bf16_linears": ("auto", "auto", "model.bf16_linears"),
    "dtype": ("float32", "float32", "model.dtype"),
    "device": ("cpu", "cpu", "model.device"),
    "kernels": ("torch", "torch", "model.kernels"),
    "load_format": ("dummy", "dummy", "model.load_format"),
    "max_model_len": ("99", 99, "model.max_model_len"),
    "store": ("/s", Path("/s"), ""),
    "max_adapters": ("7", 7, ""),
    "store_bytes": ("3GiB", 3 << 30, ""),
    "max_lora_rank": ("8", 8, "memory.max_lora_rank"),
    "adapter_storage": ("int8", "int8", ""),
    "lora_modules": ("mia=/mia", (MIA,), ""),
    "lora_import_root": ("/usr", Path("/usr"), ""),
    "accept_base_change": ("true", True, ""),
    "kv_cache_dtype": ("float32", "float32", "memory.kv_cache_dtype"),
    "pool_bytes": ("1MiB", 1 << 20, "memory.pool_bytes"),
    "gpu_memory_utilization": ("0.9", 0.9, "memory.gpu_memory_utilization"),
    "host_cache_bytes": ("2MiB", 2 << 20, "memory.host_cache_bytes"),
    "swap_bytes": ("3KiB", 3072, "memory.swap_bytes"),
    "enable_prefix_caching": ("false", False, "memory.enable_prefix_caching"),
    "snapshot_bytes": ("5KiB", 5120, "memory.snapshot_bytes"),
    "adapter_pool_fraction": ("0.5", 0.5, "memory.adapter_pool_fraction"),
    "max_num_seqs": ("9", 9, "scheduler.max_num_seqs"),
    "max_num_batched_tokens": ("128", 128, "scheduler.max_num_batched_tokens"),
    "scheduling_policy": ("sjf", "sjf", "scheduler.scheduling_policy"),
    "preemption_mode": ("swap", "swap", "scheduler.preemption_mode"),
    "target_itl_ms": ("off", None, "scheduler.target_itl_ms"),
    "target_itl_ratio": ("2.5", 2.5, "scheduler.target_itl_ratio"),
    "max_wait_steps": ("5", 5, "scheduler.max_wait_steps"),
    "queue_timeout_s": ("1.5", 1.5, "scheduler.queue_timeout_s"),
    "load_timeout_s": ("2.5", 2.5, "scheduler.load_timeout_s"),
    "early_abort": ("true", True, "scheduler.early_abort"),
    "speculation": ("off", "off", "speculation.speculation"),
    "drafters": ("lookup,corpus", ("lookup", "corpus"), "speculation.drafters"),
    "corpus_bytes": ("2MiB", 2 << 20, "speculation.corpus_bytes"),
    "draft_model": ("smollm2-135m", "smollm2-135m", "speculation.draft_model"),
    "draft_layers": ("7", 7, "speculation.draft_layers"),
    "draft_heads": ("heads", "heads", "speculation.draft_heads"),
    "draft_head_bytes": ("3MiB", 3 << 20, "speculation.draft_head_bytes"),
    "lookahead": ("5x4", "5x4", "speculation.lookahead"),
    "accept": ("rejection", "rejection", "speculation.accept"),
    "draft_trees": ("true", True, "speculation.draft_trees"),
    "max_num_queued_seqs": ("11", 11, "scheduler.max_num_queued_seqs"),
    "max_num_queued_tokens": ("12", 12, "scheduler.max_num_queued_tokens"),
    "max_running_per_adapter": ("2", 2, ADAPTER + "max_running"),
    "max_queued_per_adapter": ("3", 3, ADAPTER + "max_queued"),
    "tokens_per_s_per_adapter": ("4.5", 4.5, ADAPTER + "tokens_per_s"),
    "resident_bytes_per_adapter": ("1KiB", 1024, ADAPTER + "resident_bytes"),
    "max_running_per_key": ("4", 4, KEY + "max_running"),
    "max_queued_per_key": ("5", 5, KEY + "max_queued"),
    "tokens_per_s_per_key": ("6.5", 6.5, KEY + "tokens_per_s"),
    "resident_bytes_per_key": ("2KiB", 2048, KEY + "resident_bytes"),
    "host": ("::1", "::1", ""),
    "port": ("9", 9, ""),
    "allowed_origins": ("http://a", ("http://a",), ""),
    "api_key": ("secret-secret", "secret-secret", ""),
    "insecure": ("true", True, ""),
    "max_connections": ("13", 13, ""),
    "header_timeout_s": ("1.25", 1.25, ""),
    "body_timeout_s": ("2.25", 2.25, ""),
    "write_timeout_s": ("3.25", 3.25, ""),
    "keep_alive_s": ("4.25", 4.25, ""),
    "watermark_gamma": ("0.25", 0.25, "watermark.gamma"),
    "watermark_delta": ("3.5", 3.5, "watermark.delta"),
    "watermark_key": ("77", 77, "watermark.key"),
    "drain_s": ("5.5", 5.5, ""),
    "watchdog_s": ("6.5", 6.5, ""),
    "inject_faults": ("slow-disk:1ms", "slow-disk:1ms", ""),
    "testing": ("true", True, ""),
    "log_format": ("json", "json", ""),
    "log_level": ("error", "error", ""),
    "log_prompts": ("true", True, ""),
    "metrics_compat": ("vllm", "vllm", ""),
    "metrics_adapters": ("3", 3, ""),
    "otlp_traces_endpoint": ("http://c:4318", "http://c:4318", ""),
    "record_trace": ("/t.jsonl", Path("/t.jsonl"), ""),
    "profile": ("/p.json", Path("/p.json"), ""),
    "partition": ("0&1;2", "0&1;2", "partition.partition"),
    "tp": ("2", 2, "partition.tp"),
    "pp": ("3", 3, "partition.pp"),
    "tp_exchange": ("sums", "sums", "partition.tp_exchange"),
    "cp": ("4", 4, "partition.cp"),
    "registry": ("http://registry:8000", "http://registry:8000", ""),
    "registry_key": ("of-a-follower", "of-a-follower", ""),
    "cluster_secret": ("of-one-cluster", "of-one-cluster", ""),
    "cluster_secret_file": ("secret", Path("secret"), ""),
    "role": ("decode", "decode", ""),
    "replicas": ("2", 2, ""),
    "max_replicas": ("3", 3, ""),
    "prefill_replicas": ("2", 2, ""),
    "target_backlog_s": ("0.5", 0.5, ""),
    "placement": ("least", "least", ""),
}


def leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Values of a dataclass and of those inside it, by their paths."""
    for part in fields(config):
        value = getattr(config, part.name)
        yield from leaves(value, f"{path}{part.name}.") if is_dataclass(value) else [(path + part.name, value)]


def test_every_option_has_a_sample_and_every_engine_path_exists() -> None:
    assert SAMPLES.keys() == set(FIELDS)
    assert engine_options() == {path: name for name, (_, _, path) in SAMPLES.items() if path}
    assert set(dict(leaves(EngineConfig()))) - set(engine_options()) == {ADAPTER + "weight", KEY + "weight"}


@pytest.mark.parametrize("source", SOURCES[1:])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_option_from_every_source(cli, monkeypatch, tmp_path: Path, spelling: str, source: str) -> None:
    name = SPELLINGS[spelling]
    text, value, path = SAMPLES[name]
    command = ["serve", *(["--testing"] if name == "inject_faults" else [])]
    if source == "flag":
        command += [flag(f"no_{spelling}" if value is False else spelling)]
        command += [] if isinstance(value, bool) else [text]
    elif source == "environment":
        monkeypatch.setenv(f"LORASRV_{spelling.upper()}", text)
    else:
        in_toml = [text] if isinstance(value, tuple) else value if type(value) in (bool, int, float) else text
        command += ["--config", write(tmp_path, f"{spelling} = {json.dumps(in_toml)}")]
    seen: list[ServerSettings] = []
    for run in ("api.server.run", "api.cluster.local.run"):
        monkeypatch.setattr(run, lambda settings, *_: seen.append(settings))
    done = cli(*command)
    assert done.code == 0, done.err
    [got] = seen
    taken = getattr(got, name)
    assert (taken.get_secret_value() if isinstance(taken, SecretStr) else taken) == value
    assert dict(leaves(got.engine_config())) == dict(leaves(EngineConfig())) | ({path: value} if path else {})


@pytest.mark.parametrize(("alias", "name"), [(alias, name) for name, o in OPTIONS.items() for alias in o.aliases])
class TestAliases:
    def test_both_names_in_one_source_are_an_error_that_tells_both(
        self, cli, monkeypatch, tmp_path: Path, alias: str, name: str
    ) -> None:
        monkeypatch.setattr("api.server.run", lambda *_: None)
        text = SAMPLES[name][0]
        done = cli("serve", flag(name), text, flag(alias), text)
        says = f"{flag(name)} and {flag(alias)} are the same option; give one of them"
        assert (done.code, done.out, done.err) == (2, "", f"lorasrv: {says}\n")
        path = write(tmp_path, f"{alias} = {json.dumps(text)}\n{name} = {json.dumps(text)}")
        with pytest.raises(ConfigError, match=f"c.toml: {alias} and {name} are the same option"):
            Sources.gather({}, path)
        both = {f"LORASRV_{spelling.upper()}" for spelling in (alias, name)}
        for variable in both:
            monkeypatch.setenv(variable, text)
        with pytest.raises(ConfigError, match=" and ".join(["(LORASRV_[A-Z_]+)"] * 2) + " are the same") as caught:
            Sources.gather()
        assert set(str(caught.value).split()[:3]) == {*both, "and"}

    def test_sources_are_ordered_whatever_the_names(self, monkeypatch, tmp_path: Path, alias: str, name: str) -> None:
        text, value, _ = SAMPLES[name]
        path = write(tmp_path, f'{name} = "wrong"')
        assert getattr(Sources.gather({alias: text}, path).settings(), name) == value
        assert Sources.gather({alias: text}, path).origin(name).name == flag(alias)
        monkeypatch.setenv(f"LORASRV_{alias.upper()}", text)
        assert getattr(Sources.gather({}, path).settings(), name) == value
        assert unknown_variables() == []

    def test_complaints_have_the_name_that_was_given(self, monkeypatch, tmp_path: Path, alias: str, name: str) -> None:
        # Neither a number, nor a choice, nor a name.
        wrong = "0" if type(SAMPLES[name][1]) is int else "nonsense" * 33
        for spelling in (alias, name):
            with pytest.raises(ConfigError, match=f"^{flag(spelling)}[ :]"):
                Sources.gather({spelling: wrong}).settings()
            path = write(tmp_path, f"{spelling} = {json.dumps(wrong)}")
            with pytest.raises(ConfigError, match=f"^{path}: {spelling}[ :]"):
                Sources.gather({}, path).settings()
            with monkeypatch.context() as patched:
                patched.setenv(f"LORASRV_{spelling.upper()}", wrong)
                with pytest.raises(ConfigError, match=f"^LORASRV_{spelling.upper()}[ :]"):
                    Sources.gather().settings()


class TestHelp:
    @pytest.fixture
    def helps(self) -> dict[str, str]:
        serve = dict(commands())["serve"]
        return {opt: param.help for param in parameters(serve) for opt in param.opts if not param.hidden}

    @pytest.mark.parametrize(
        ("name", "default"),
        [
            ("port", "8000"),
            ("max_num_seqs", "64, 256 on CUDA"),
            ("scheduling_policy", "fair"),
            ("max_num_queued_seqs", "4096"),
            ("host_cache_bytes", "1GiB, 12.5 % of free host memory on CUDA"),
            ("swap_bytes", "256MiB, 3 % of free host memory on CUDA"),
            ("drain_s", "25"),
            ("watermark_gamma", "0.5"),
            ("log_format", "auto"),
            ("store", "~/.local/share/lorasrv"),
            ("pool_bytes", "25 % of free memory, 85 % on CUDA"),
            ("max_running_per_key", "no limit"),
        ],
    )
    def test_defaults(self, helps: dict[str, str], name: str, default: str) -> None:
        assert helps[flag(name)].endswith(f" \\[default: {default}]")

    def test_every_value_that_is_not_empty_is_told(self, helps: dict[str, str]) -> None:
        given = {name for name, field in ServerSettings.model_fields.items() if field.default not in (None, ())}
        told = {name for name in FIELDS if "[default: " in helps.get(flag(name), "")}
        assert given - told == {name for name in FIELDS if isinstance(SAMPLES[name][1], bool)}

    def test_choices_aliases_and_switches(self, helps: dict[str, str]) -> None:
        assert helps["--device"].startswith("Device to run on: auto, cpu or cuda.")
        assert helps["--log-level"].startswith("Lowest level of log lines: debug, info, warning or error; info:")
        assert "Also --policy." in helps["--scheduling-policy"]
        assert helps["--no-enable-prefix-caching"] == "Do not reuse the KV cache of prompts with a common prefix."
        assert {"--policy", "--enable-prefix-caching", "--no-early-abort"} & set(helps) == set()


drawn = st.dictionaries(st.sampled_from(sorted(SAID)), st.sets(st.sampled_from(SOURCES[1:])))


@given(drawn, st.booleans())
@settings(max_examples=150, deadline=None)
def test_flags_before_environment_before_file_before_defaults(chosen: dict[str, set[str]], hyphens: bool) -> None:
    file = {name: SAID[name][0][0] for name, sources in chosen.items() if "file" in sources}
    environment = {f"LORASRV_{n.upper()}": SAID[n][0][1] for n, sources in chosen.items() if "environment" in sources}
    environment["XDG_CONFIG_HOME"] = "/nowhere"
    flags = {name: SAID[name][0][2] for name, sources in chosen.items() if "flag" in sources}
    defaults = ServerSettings()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, environment):
        path = Path(folder) / "c.toml"
        # A text, list, number or switch in JSON is TOML.
        spell = (lambda name: name.replace("_", "-")) if hyphens else str
        path.write_text("".join(f"{spell(name)} = {json.dumps(value)}\n" for name, value in file.items()))
        gathered = Sources.gather(flags, path)
        done = gathered.settings()
        for name in SAID:
            highest = max(chosen.get(name, set()) | {"default"}, key=SOURCES.index)
            values = (getattr(defaults, name), *SAID[name][1])
            assert gathered.origin(name).kind == highest
            assert getattr(done, name) == values[SOURCES.index(highest)]
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
        ("x = 1", "{file}: unknown key x; lorasrv config init lists all keys"),
        ("port = 70000", "{file}: port: 70000 is not allowed; expected a whole number, at least 0 and at most 65535"),
        ("port = true", "{file}: port: true is not allowed; expected a whole number, at least 0 and at most 65535"),
        ('port = "x"', "{file}: port: 'x' is not allowed; expected a whole number, at least 0 and at most 65535"),
        ("model = 1", "{file}: model: 1 is not allowed; expected text"),
        ("pool_bytes = -1", "{file}: pool_bytes: must not be negative, not -1"),
        ('pool-bytes = "lots"', "{file}: pool_bytes: 'lots' is not allowed; expected a size: 512MiB, 2GB or bytes"),
        ("max_num_seqs = 0", "{file}: max_num_seqs must be positive, not 0"),
        ('policy = "fare"', "{file}: policy 'fare' is unknown; choose from fair, fcfs, mlfq, sjf"),
        ("early_abort = 7", "{file}: early_abort: 7 is not allowed; expected true or false"),
        ('api_key = "s3 cret"', "{file}: api_key: must be 8 to 512 printable ASCII characters without spaces; "
         "lorasrv key create generates one"),
        ("api_key = 12345678", "{file}: api_key: the given value is not allowed; expected text"),
        ('otlp_traces_endpoint = "collector:4318"', "{file}: otlp_traces_endpoint: 'collector:4318' is not allowed; "
         "expected a URL such as http://collector:4318"),
        ('registry = "up"', "{file}: registry: 'up' is not allowed; expected a URL such as http://registry:8000"),
        ('log_level = "loud"', "{file}: log_level: 'loud' is not allowed; expected one of debug, info, warning, error"),
        ("port = 1\nport = 2", "{file}: is not TOML: cannot overwrite a value (at end of document)"),
        ("port = \nhost = 1", "{file}: is not TOML: invalid value (at line 1, column 8)"),
        ("max-queued = 1\nmax_queued = 2", "{file}: max_queued appears twice, with - and with _"),
        ("port: 9000", "{file}: is not TOML: expected '=' after a key in a key/value pair (at line 1, column 5)"),
        ("[serve]\nport = 9000", "{file}: [serve]: options of serve stand at the top, outside any table"),
        ("client = 1", "{file}: client: expected a table, [client] with server and api_key"),
        ("[client]\nserve = 'x'", "{file}: unknown key client.serve; did you mean server?"),
        ("[client]\nserver = 7", "{file}: client.server: expected text that is not empty"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line_with_file_key_and_range(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        Sources.gather({}, path).settings()
    assert str(caught.value) == says.format(file=path)


def test_a_message_names_the_source_of_a_wrong_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_a_named_file_must_be_readable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
        for path, says in (
            (tmp_path / "none.toml", "cannot be read: No such file"),
            (tmp_path, "cannot be read: Is a directory"),
            (tmp_path / "c.toml", "is not UTF-8, which TOML"),
        ):
            with pytest.raises(ConfigError, match=says):
                Sources.gather({}, path)
        monkeypatch.setenv("LORASRV_CONFIG", str(tmp_path / "none.toml"))
        with pytest.raises(ConfigError, match=r"^LORASRV_CONFIG: .*cannot be read: No such file"):
            Sources.gather()
        with pytest.raises(ConfigError, match=r"^--config: .*cannot be read: Is a directory"):
            Sources.gather({}, tmp_path)

    def test_of_clients(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert client_options() == {}
        path = write(tmp_path, '[client]\nserver = "http://a"\napi-key = "k"\n')
        monkeypatch.setenv("LORASRV_CONFIG", str(path))
        assert client_options() == {"server": "http://a", "api_key": "k"}


def test_every_option_says_what_it_takes() -> None:
    assert all(expected(name).startswith(("a ", "text", "one of ", "true ")) for name in FIELDS)
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
        assert rows["scheduling_policy"] == ["sjf", "environment LORASRV_POLICY"]
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
        path = write(tmp_path, "port = 5\nearly-abort = true\n")
        command = ("config", "show", "--origin", "--json", "--")
        flags = ("--config", path, "--port", 9, "--no-early-abort", "--lora-modules", "a=/a", "b=/b")
        secrets = ("--api-key", "secret-secret", "--watermark-key", 98765)
        shown = json.loads(cli(*command, *flags, "--store", "/x", *secrets).out)
        assert shown["watermark_key"] == {"value": "********", "origin": "flag", "from": "--watermark-key"}
        assert shown["port"] == {"value": 9, "origin": "flag", "from": "--port"}
        assert shown["early_abort"] == {"value": False, "origin": "flag", "from": "--early-abort"}
        assert shown["store"] == {"value": "/x", "origin": "flag", "from": "--store"}
        assert shown["lora_modules"]["value"] == ["a=/a", "b=/b"]
        assert shown["api_key"] == {"value": "********", "origin": "flag", "from": "--api-key"}
        assert shown["model"]["origin"] == "default"
        assert {name for name, one in shown.items() if one["origin"] == "flag"} == {
            *("port", "early_abort", "store", "lora_modules", "api_key", "watermark_key")
        }
        assert json.loads(cli(*command, "./base").out)["model"] == {
            "value": "./base",
            "origin": "flag",
            "from": "--model",
        }
        for wrong, says in (
            (("--prt", 9), "no such option"),
            (("--port", 70000), "--port: '70000'"),
            (("x", "y"), "y"),
        ):
            done = cli(*command, *wrong)
            assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
            assert says in done.err

    def test_wrong_files_are_usage(self, cli, tmp_path: Path) -> None:
        path = write(tmp_path, "prot = 5")
        for command in (("config", "show"), ("serve",)):
            done = cli(*command, "--config", path)
            says = f"lorasrv: {path}: unknown key prot; did you mean port?\n"
            assert (done.code, done.out, done.err) == (2, "", says)

    def test_what_init_prints_is_a_configuration(self, cli, tmp_path: Path) -> None:
        text = cli("config", "init").out
        assert tomllib.loads(text) == {"client": {}}
        lines = [line.removeprefix("# ") for line in text.splitlines() if " = " in line and " = ..." not in line]
        path = write(tmp_path, "\n".join(line for line in lines if not line.startswith("server")))
        assert Sources.gather({}, path).settings() == ServerSettings()
        assert {name for name in FIELDS if f"\n# {name} = " not in text} == set()
        assert set(json.loads(cli("config", "init", "--json").out)) == set(FIELDS)

    def test_switches_both_ways(self, cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        given = []
        monkeypatch.setattr("api.server.run", lambda settings, *_: given.append(settings))
        path = write(tmp_path, "early_abort = true\nport = 5\ninsecure = true\n")
        assert cli("serve", "--config", path, "--no-early-abort", "--port", 6).code == 0
        assert (given[0].early_abort, given[0].port, given[0].insecure) == (False, 6, True)
        for flags in (("--early-abort", "--no-early-abort"), ("--enable-prefix-caching", "--no-enable-prefix-caching")):
            done = cli("serve", *flags)
            assert (done.code, done.err) == (2, f"lorasrv: {flags[0]} and {flags[1]} exclude each other\n")

    def test_serve_warns_of_misspelled_variables(self, cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("api.server.run", lambda *_: None)
        monkeypatch.setenv("LORASRV_PROT", "1")
        monkeypatch.setenv("LORASRV_SERVER", "http://a")
        warning = "LORASRV_PROT is set in the environment, but is not an option; did you mean LORASRV_PORT?"
        assert unknown_variables() == [warning]
        assert cli("serve").err.startswith(f"warning: {warning}")

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
        assert (done.code, done.err) == (2, f"lorasrv: {path}: client.server: expected text that is not empty\n")
        assert cli("list", "--help").code == 0
