"""Structure of the packages: rooms, one-way imports, sizes. The layers are those of import-linter in pyproject.toml."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("adapter_store", "api", "lorasrv", "sgmv_kernels")
MAX_ROOMS = 12
MAX_FILES = 12
MAX_LINES = 600
TORCH_FREE_IMPORTS = (
    "adapter_store.store",
    "api.cli.program",
    "api.server",
    "lorasrv.distributed.rank_spec",
    "lorasrv.memory.memory_manager",
    "lorasrv.metrics.request_stats",
    "lorasrv.placement.kinds",
    "lorasrv.request",
    "lorasrv.scheduler.scheduler",
    "lorasrv.text.tokenizer",
)
# Words that a docstring must not begin with: its subject would be the identifier or the sentence before it.
BAD_FIRST_WORDS = {
    "It",
    "They",
    "Those",
    "These",
    "Who",
    "Whoever",
    "Whose",
    "Of",
    "As",
    "So",
    "One",
    "All",
    "What",
    "From",
}


def _module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@pytest.fixture(scope="module")
def trees() -> Mapping[str, ast.Module]:
    """Module -> its syntax tree. Parsed for the tests that read it: every worker that runs tests imports this file."""
    return {module: ast.parse(path.read_text("utf-8")) for module, path in MODULES.items()}


@pytest.fixture(scope="module")
def imports(trees: Mapping[str, ast.Module]) -> Mapping[str, set[str]]:
    """Module -> modules of ours that it imports, at any level of nesting and for type checking too."""
    found: dict[str, set[str]] = {}
    for module, tree in trees.items():
        targets = found[module] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                targets |= {t if (t := f"{node.module}.{a.name}") in MODULES else node.module for a in node.names}
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
        targets &= MODULES.keys() - {module}
    return found


def _room_of(module: str) -> str:
    """`lorasrv.scheduler.policies.fair` -> `lorasrv.scheduler`; a file beside the rooms is a room of its own."""
    return ".".join(module.split(".")[:2])


def _circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Strongly connected components of more than one node (Kosaraju)."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(node: str, edges: Mapping[str, set[str]], out: list[str]) -> None:
        stack = [(node, iter(edges.get(node, ())))]
        seen.add(node)
        while stack:
            rest = stack[-1][1]
            for other in rest:
                if other not in seen:
                    seen.add(other)
                    stack.append((other, iter(edges.get(other, ()))))
                    break
            else:
                out.append(stack.pop()[0])

    for node in graph:
        if node not in seen:
            visit(node, graph, order)
    reverse: dict[str, set[str]] = {}
    for node, others in graph.items():
        for other in others:
            reverse.setdefault(other, set()).add(node)
    seen.clear()
    circles = []
    for node in reversed(order):
        if node not in seen:
            component: list[str] = []
            visit(node, reverse, component)
            if len(component) > 1:
                circles.append(set(component))
    return circles


def _layers() -> Iterator[tuple[str, list[list[str]]]]:
    """(container, layers from top to bottom) of every layers contract."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    for contract in settings["contracts"]:
        if contract["type"] == "layers":
            layers = [[name.strip() for name in layer.replace(":", "|").split("|")] for layer in contract["layers"]]
            yield contract.get("containers", [""])[0], layers


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_a_few_rooms(package: str) -> None:
    rooms = [path for path in (ROOT / package).iterdir() if (path / "__init__.py").exists()]
    files = list((ROOT / package).glob("*.py"))
    assert len(rooms) <= MAX_ROOMS
    assert len(files) <= MAX_FILES


def test_files_are_one_concept_long() -> None:
    lengths = {module: len(path.read_text("utf-8").splitlines()) for module, path in MODULES.items()}
    assert {module: lines for module, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_two_classes_of_a_package_share_a_name(trees: Mapping[str, ast.Module]) -> None:
    names: dict[tuple[str, str], list[str]] = {}
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                names.setdefault((module.split(".")[0], node.name), []).append(module)
    assert {name: modules for (_, name), modules in names.items() if len(modules) > 1} == {}


def test_no_circle_of_files(imports: Mapping[str, set[str]]) -> None:
    assert _circles(imports) == []


def test_no_circle_of_rooms(imports: Mapping[str, set[str]]) -> None:
    rooms: dict[str, set[str]] = {}
    for module, targets in imports.items():
        # `from lorasrv import __version__` reads the package itself, which imports nothing.
        rooms.setdefault(_room_of(module), set()).update(_room_of(t) for t in targets if t not in PACKAGES)
    for room, others in rooms.items():
        others.discard(room)
    assert _circles(rooms) == []


def test_no_import_points_upward(imports: Mapping[str, set[str]]) -> None:
    """Holds function-level and type-checking imports to the layers, and every room and file to have a layer."""
    upward = []
    for container, layers in _layers():
        floor = {f"{container}.{name}".strip("."): level for level, names in enumerate(layers) for name in names}
        if container:
            here = {_room_of(module) for module in MODULES if module.startswith(f"{container}.")}
            assert here == floor.keys(), f"rooms and files of {container} without a layer, or layers of nothing"
        for module, targets in imports.items():
            for target in targets:
                source, goal = (_room_of(m) if container else m.split(".")[0] for m in (module, target))
                if source in floor and goal in floor and source != goal and floor[source] >= floor[goal]:
                    upward.append(f"{module} -> {target}")
    assert upward == []


def test_no_call_is_wired_upward_by_assignment(trees: Mapping[str, ast.Module]) -> None:
    """No method is stored into another object's attribute from outside: imports would not show that call."""
    wired = []
    for module, tree in trees.items():
        methods = {
            item.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for item in node.body
            if isinstance(item, ast.FunctionDef)
            and not any(isinstance(d, ast.Name) and d.id == "property" for d in item.decorator_list)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign):
                continue
            value = node.value
            is_method = isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.attr in methods
            is_method = is_method and value.value.id == "self"  # type: ignore[union-attr]
            for target in node.targets:
                outside = isinstance(target, ast.Attribute) and not (
                    isinstance(target.value, ast.Name) and target.value.id == "self"
                )
                if outside and (is_method or isinstance(value, ast.Lambda)):
                    wired.append(f"{module}:{node.lineno}")
    assert wired == []


def test_every_module_says_what_it_is(trees: Mapping[str, ast.Module]) -> None:
    assert [module for module, tree in trees.items() if ast.get_docstring(tree) is None] == []


def test_no_pickle_in_the_packages(trees: Mapping[str, ast.Module]) -> None:
    named = {
        (module, alias.name)
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert [module for module, name in named if name == "pickle"] == []


def test_processes_import_nothing_of_the_working_directory() -> None:
    """A file there named as a library's module would be run in its place."""
    started = [
        (path, match)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for match in re.findall(r'sys\.executable, "([^"]+)"', path.read_text("utf-8"))
    ]
    assert len(started) > 4
    assert {first for _, first in started} == {"-P"}, started


def test_every_room_is_in_the_map() -> None:
    """ARCHITECTURE.md has a line for every room."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    rooms = [path for package in PACKAGES for path in (ROOT / package).iterdir() if (path / "__init__.py").exists()]
    assert [room.name for room in rooms if f"`{room.name}/`" not in text] == []


def test_docstrings_begin_with_their_subject(trees: Mapping[str, ast.Module]) -> None:
    """A public docstring stands alone: no pronoun for its first word."""
    bad = []
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                text = ast.get_docstring(node)
                if text and text.split(maxsplit=1)[0].rstrip(",.:;") in BAD_FIRST_WORDS:
                    bad.append(f"{module}.{node.name}: {text.splitlines()[0]}")
    assert bad == []


@pytest.mark.parametrize("module", TORCH_FREE_IMPORTS)
def test_importing_it_brings_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_server_imports_its_routes_while_kernels_are_compiled() -> None:
    """At a first start, the compiling process is the last to end; importing the routes first would delay it."""
    code = "import sys, api.server; sys.exit('api.app' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
