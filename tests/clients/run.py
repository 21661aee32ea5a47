"""Real clients against one real server: `make test-clients`. Each environment is made once, in build/clients.

The server is `lorasrv serve` with the built-in base and the three personas; agents get one whose base has a chat
template with tools. Prints the versions that were tested; with `--record` also writes them into docs/clients.md.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from served import serve  # noqa: E402
from tool_templates import CHATML_TOOLS  # noqa: E402

from lorasrv.models.loader.locate import builtin_file  # noqa: E402

HERE = Path(__file__).parent
MADE = ROOT / "build" / "clients"
BASE, ADAPTER = "smollm2-135m", "blackbeard"
# Environment -> distribution -> script. Two share an environment where their requirements do not clash.
CLIENTS = {
    "openai": {"openai": "use_openai.py", "huggingface_hub": "use_huggingface_hub.py"},
    "agents": {"openai-agents": "use_agents.py", "pydantic-ai-slim": "use_pydantic_ai.py"},
    "lorax": {"lorax-client": "use_lorax.py"},
    "litellm": {"litellm": "use_litellm.py", "langchain-openai": "use_langchain.py"},
}
WITH_TOOLS = frozenset({"agents"})
"""Environments whose clients need a base with tools."""
ROW = "| {name} | {version} |"
BEGIN, END = "<!-- versions: make test-clients ARGS=--record -->\n", "<!-- end of versions -->"
SCRIPT_SECONDS = 240


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="environments; all by default: " + ", ".join(CLIENTS))
    parser.add_argument("--record", action="store_true", help="write the versions into docs/clients.md")
    given = parser.parse_args()
    wanted = given.only or list(CLIENTS)
    pythons = {name: environment(name) for name in wanted}
    versions = {d: version_of(python, d) for name, python in pythons.items() for d in CLIENTS[name]}
    failed = list[str]()
    for with_tools in (True, False):
        names = [name for name in pythons if (name in WITH_TOOLS) == with_tools]
        if not names:
            continue
        options = ("--model", base_with_tools()) if with_tools else ()
        with serve("--pool-bytes", "512MiB", "--served-model-name", BASE, *options, adapters=personas()) as served:
            print(f"server: {served.url} {' '.join(map(str, options))}", flush=True)
            for name in names:
                for distribution, script in CLIENTS[name].items():
                    print(f"{distribution} {versions[distribution]}", flush=True)
                    started = time.monotonic()
                    if not run(pythons[name], script, served.url):
                        failed.append(distribution)
                    print(f"  {time.monotonic() - started:.1f} s", flush=True)
    if given.record and not failed:
        record(versions)
    print(f"{len(versions) - len(failed)} passed, {len(failed)} failed" + (f": {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def environment(name: str) -> Path:
    """Its python. Made anew when its requirements, or ours, have changed."""
    requirements, constraints = HERE / "requirements" / f"{name}.txt", ROOT / ".ci" / "constraints.txt"
    folder = MADE / name
    wanted = hashlib.sha256(requirements.read_bytes() + constraints.read_bytes()).hexdigest()
    stamp = folder / "made-of"
    python = folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {name} in {folder.relative_to(ROOT)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(constraints), "-r", str(requirements)], check=True)
    stamp.write_text(wanted)
    return python


def base_with_tools() -> Path:
    """The built-in base with a template of tools, made anew."""
    made = MADE / "tools.gguf"
    MADE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force", "--chat-template", CHATML_TOOLS]
    subprocess.run([*command, str(builtin_file()), str(made)], check=True, capture_output=True)
    return made


def personas() -> dict[str, Path]:
    folder = ROOT / "examples" / "persona_bots"
    listed = tomllib.loads((folder / "personas.toml").read_text("utf-8"))["persona"]
    return {persona["id"]: folder / persona["adapter"] for persona in listed}


def version_of(python: Path, distribution: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def run(python: Path, script: str, url: str) -> bool:
    # Neither this project's packages nor a proxy or a key of whoever runs this.
    unwanted = ("PYTHONPATH", "OPENAI_", "HF_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    clean = {key: value for key, value in os.environ.items() if not key.upper().startswith(unwanted)}
    command = [str(python), str(HERE / script), url, BASE, ADAPTER]
    done = subprocess.run(command, env={**clean, "NO_PROXY": "*"}, timeout=SCRIPT_SECONDS, check=False)
    return done.returncode == 0


def record(versions: dict[str, str]) -> None:
    page = ROOT / "docs" / "clients.md"
    text = page.read_text("utf-8")
    rows = [ROW.format(name=name, version=version) for name, version in versions.items()]
    table = "\n".join(["| client | tested |", "|---|---|", *rows]) + "\n"
    changed = re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: BEGIN + table + END, text, flags=re.S)
    page.write_text(changed, "utf-8")


if __name__ == "__main__":
    sys.exit(main())
