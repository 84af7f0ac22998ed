"""The floors of docs/architecture.md hold: nothing imports upward, heavy imports stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "src" / "recavsr"

# The first part of a module's path inside the package -> its floor, as in docs/architecture.md.
FLOORS = {
    "errors": 0,
    "geometry": 0,
    "cache_policy": 0,
    "state": 1,
    "attention": 1,
    "rope": 1,
    "layers": 1,
    "lora": 1,
    "causal_conv": 1,
    "fp8": 1,
    "fused": 1,
    "onednn": 1,
    "kernels": 1,
    "models": 2,
    "video": 2,
    "stream": 3,
    "data": 3,
    "training": 3,
    "evaluation": 3,
    "cli": 4,
    "serve": 4,
    "cluster": 4,
    "integrations": 4,
    "bench": 4,
}
# The package itself hands out `load`, `upscale` and so on by name, and runs the command line.
PACKAGE_DOORS = {"__init__", "__main__"}
FILES = sorted(ROOT.rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Return every module that a file imports anywhere, functions and type-checking blocks included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(path: Path) -> str:
    """Return the part of the package that a file belongs to: `geometry`, `models`, ..."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_every_part_has_a_floor() -> None:
    assert {part_of(path) for path in FILES} - PACKAGE_DOORS <= set(FLOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_upward_import(path: Path) -> None:
    part = part_of(path)
    if part in PACKAGE_DOORS:
        return
    for module in imported_modules(path):
        pieces = module.split(".")
        if pieces[0] != "recavsr" or len(pieces) == 1 or pieces[1] not in FLOORS:
            continue
        assert FLOORS[pieces[1]] <= FLOORS[part], f"{part} (floor {FLOORS[part]}) imports {module}"
        opened = pieces[1] == part or part == "cli"  # a command may open another door
        assert FLOORS[pieces[1]] < 4 or opened, f"{module} is a door: nothing imports doors"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pyav_only_in_video(path: Path) -> None:
    imports_av = any(module.split(".")[0] == "av" for module in imported_modules(path))
    assert not imports_av or part_of(path) == "video"


def modules_after(statement: str) -> set[str]:
    """Return the modules loaded after running a statement in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(' '.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("module", [name for name, floor in FLOORS.items() if floor == 0])
def test_floor_0_needs_no_torch(module: str) -> None:
    loaded = modules_after(f"import recavsr.{module}")
    assert f"recavsr.{module}" in loaded
    assert not loaded & {"torch", "av", "numpy"}


def test_importing_the_package_is_light() -> None:
    assert not modules_after("import recavsr") & {"torch", "av", "numpy", "typer"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["upscale", "--help"],
        ["batch", "--help"],
        ["live", "--help"],
        ["degrade", "--help"],
        ["data", "--help"],
        ["--version"],
        ["models"],
    ],
)
def test_help_is_light(arguments: list[str]) -> None:
    loaded = modules_after(f"from recavsr.cli.main import run\nassert run({arguments!r}) == 0")
    assert "recavsr.cli.main" in loaded
    assert not loaded & {"torch", "av", "numpy", "safetensors", "huggingface_hub", "ray"}
