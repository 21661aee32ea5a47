"""`lorasrv watermark detect`: a marked text and a plain one, from files and stdin; no server and no torch."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from api.config.settings import ServerSettings
from lorasrv.errors import ConfigError
from lorasrv.models.loader.locate import read_tokenizer
from lorasrv.sampling.watermark import green
from lorasrv.sampling_params import Watermark

PLAIN = """The harbour was quiet before sunrise, and the boats lay in a row along the old stone wall. A man with a lamp
walked from one to the next, counting ropes and knocking on wood, as his father had done and as nobody would do after
him. When he came to the last of them he sat down, blew out the light and waited for the gulls to begin their quarrel.
"""


def _marked(mark: Watermark) -> str:
    """Words of a list, each with a space before it and of one token, that are green after the one before."""
    tokenizer = read_tokenizer("smollm2-135m")
    spelled = [tokenizer.encode(f" {word}", add_special_tokens=False) for word in PLAIN.replace(".", "").split()]
    words = np.array(sorted({ids[0] for ids in spelled if len(ids) == 1}), dtype=np.uint32)
    ids = [int(words[0])]
    while len(ids) < 60:
        choices = words[green(mark, ids[-1], words)]
        ids.append(int(choices[len(ids) % len(choices)]))
    return tokenizer.decode(ids)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "marked.txt"
    file.write_text(_marked(Watermark()), "utf-8")
    return file


def test_found(cli, marked: Path) -> None:
    done = cli("watermark", "detect", "--text", marked)
    verdict, pairs, z, p = done.out.splitlines()
    assert (done.code, verdict, " of " in pairs) == (0, "watermarked", True)
    assert (float(z.split()[1]) > 4, float(p.split()[1]) < 1e-4) == (True, True)
    found = json.loads(cli("watermark", "detect", "--text", marked, "--json").out)
    assert (found["verdict"], found["green"]) == ("watermarked", found["scored"])
    assert found["z_score"] == pytest.approx(found["scored"] ** 0.5)
    assert set(found) == {"verdict", "green", "scored", "z_score", "p_value", "tokens", "gamma", "threshold"}


def test_plain_text_from_stdin(cli) -> None:
    done = cli("watermark", "detect", stdin=PLAIN)
    assert (done.code, done.out.splitlines()[0]) == (0, "no watermark found")
    assert cli("watermark", "detect", "--text", "-", stdin="Hello there.").out.startswith("too short to tell")
    assert cli("watermark", "detect").out.startswith("too short to tell")


@pytest.mark.parametrize("command", [("watermark", "detect"), ("generate", "-"), ("chat",)])
def test_a_pipe_that_is_not_utf8(cli, server, command: tuple[str, ...]) -> None:
    where = () if command[0] == "watermark" else ("--server", server.url)
    done = cli(*command, *where, stdin="ab\udcff")
    assert (done.code, done.err) == (2, "lorasrv: stdin: the text is not UTF-8; convert it first\n")


def test_another_key_or_threshold_finds_nothing(cli, marked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ("watermark", "detect", "--text", marked, "--json")
    verdict = lambda *options: json.loads(cli(*text, *options).out)["verdict"]  # noqa: E731
    assert verdict("--watermark-key", 5) == "not_watermarked"
    assert verdict("--threshold", 100) == "too_short"
    monkeypatch.setenv("LORASRV_WATERMARK_KEY", "5")
    assert verdict() == "not_watermarked"


def test_bad_input_is_one_line(cli, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"ab\xff")
    assert "--text: the text is not UTF-8 (byte 2)" in cli("watermark", "detect", "--text", bad).err
    missing = cli("watermark", "detect", "--text", tmp_path / "none.txt")
    assert (missing.code, missing.err.startswith(f"lorasrv: --text: {tmp_path}")) == (2, True)
    wrong = cli("watermark", "detect", "--watermark-gamma", "2")
    assert (wrong.code, wrong.err) == (2, "lorasrv: --watermark-gamma must be between 0.01 and 0.99, not 2.0\n")


def test_needs_no_torch(marked: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from api.cli.main import main; main()"
    command = [sys.executable, "-c", code, "watermark", "detect", "--text", str(marked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout[:11]) == (0, "", "watermarked")


def test_options_of_the_server() -> None:
    settings = ServerSettings(watermark_gamma=0.25, watermark_delta=3, watermark_key=12345678)
    assert settings.engine_config().watermark == Watermark(0.25, 3.0, 12345678)
    assert "12345678" not in repr(settings)
    assert ServerSettings().engine_config().watermark == Watermark()
    with pytest.raises(ConfigError, match="--watermark-gamma must be"):
        ServerSettings(watermark_gamma=0).engine_config()
