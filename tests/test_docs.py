"""The documents tell the truth: the file map, the README's commands and snippets, links, the workflow."""

from __future__ import annotations

import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import recavsr
from recavsr.cli.main import run
from recavsr.stream.load import PACKAGED
from recavsr.video.clips import read_clip, write_clip

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
EQUATIONS = (REPOSITORY / "docs" / "equations.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])


def fenced(text: str, language: str) -> list[str]:
    """Return the contents of a document's code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[str]:
    """Return the README's command lines that call a program."""
    lines = [line for block in fenced(README, "console") for line in block.splitlines()]
    return [line for line in lines if line.split(" ", 1)[0] == program]


# ---------------------------------------------------------------------------------------------- the map


def test_file_map_lists_the_files_that_exist() -> None:
    listed = re.findall(r"^\| `([\w/]+\.py)` \| \S.* \|$", ARCHITECTURE, re.MULTILINE)
    root = REPOSITORY / "src" / "recavsr"
    files = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    wanted = [name for name in files if name == "__init__.py" or not name.endswith("/__init__.py")]
    assert sorted(listed) == sorted(wanted)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


# ------------------------------------------------------------------------------------------ the equations


@pytest.mark.parametrize("name", re.findall(r"`((?:\w+\.)+\w+)`", EQUATIONS))
def test_code_of_the_equations_exists(name: str) -> None:
    assert callable(pkgutil.resolve_name(f"recavsr.{name}"))


@pytest.mark.parametrize("name", re.findall(r"`(test_\w+\.py::\w+)`", EQUATIONS))
def test_tests_of_the_equations_exist(name: str) -> None:
    file, _, test = name.partition("::")
    assert f"\ndef {test}(" in (REPOSITORY / "tests" / file).read_text(encoding="utf-8")


def test_every_equation_has_code_and_a_test() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \| .+ \| (.+) \| (.+) \|$", EQUATIONS, re.MULTILINE)
    assert sorted(int(number) for row in rows for number in row[0].split(",")) == list(range(1, 11))
    assert all("`" in code and "::" in tests for _, code, tests in rows)


# --------------------------------------------------------------------------------------------- the README


@pytest.fixture
def holiday(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with the clip that the README's examples name, and without the user's settings."""
    ramp = np.arange(80, dtype=np.uint8) * 3
    frames = np.broadcast_to(ramp[None, None, :, None], (52, 44, 80, 3)).copy()
    for index, frame in enumerate(frames):
        frame[10:30, index : index + 20] = 250
    write_clip(tmp_path / "holiday.mp4", frames, 25)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "holiday.mp4"


def with_available_model(text: str) -> str:
    """Return an example as it is where `nano` is in the package; before it is, `identity` takes its place."""
    if (PACKAGED / "nano").is_dir():
        return text
    return text.replace('"nano"', '"identity"')


@pytest.mark.parametrize("number", range(len(fenced(README, "python"))))
def test_python_examples_run(number: int, holiday: Path, capsys: pytest.CaptureFixture) -> None:
    snippet = with_available_model(fenced(README, "python")[number])
    if not (PACKAGED / "nano").is_dir():
        snippet = snippet.replace("upscale(", 'upscale(model="identity", source=', 1)
        snippet = snippet.replace(
            'source="holiday.mp4", "large.mp4"', 'source="holiday.mp4", output="large.mp4"'
        )
    exec(compile(snippet, f"README.md, Python example {number}", "exec"), {})
    comments = " ".join(line.partition("#")[2] for line in snippet.splitlines())
    shown = re.findall(r"\(\d[\d, ]+\)", comments)
    printed = capsys.readouterr().out
    assert [shape for shape in shown if shape not in printed] == []


UPSCALE = [line for line in commands("recavsr") if line.startswith("recavsr upscale")]


@pytest.mark.parametrize("line", UPSCALE)
def test_upscale_examples_run(line: str, holiday: Path, request: pytest.FixtureRequest) -> None:
    arguments = shlex.split(line)[1:]
    if "5b" in arguments:
        assert run(["models", "add", "5b", str(request.getfixturevalue("released_layout"))]) == 0
        arguments += ["--scale", "1"]
    elif not (PACKAGED / "nano").is_dir():
        arguments += ["--model", "identity"]
    if "<" in arguments:
        pytest.skip("run by test_pipe_example")
    if "--height" in arguments or "5b" in arguments:
        arguments += ["--frames", "8"]  # large or slow: a few frames show that it runs
    assert run(arguments) == 0
    default = "holiday_320x176.mp4"
    output = Path(arguments[arguments.index("-o") + 1] if "-o" in arguments else default)
    made = read_clip(output)
    expected = 8 if "--frames" in arguments else 25 if "--duration" in arguments else 52
    assert len(made) == expected


def test_pipe_example(holiday: Path, ffmpeg: str) -> None:
    (line,) = [line for line in UPSCALE if "<" in line]
    subprocess.run([ffmpeg, "-v", "error", "-i", "holiday.mp4", "-frames:v", "5", "holiday.y4m"], check=True)
    if not (PACKAGED / "nano").is_dir():
        line = line.replace(" <", " --model identity <")
    # The environment need not be activated: its command lies beside its interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run(line, shell=True, check=True, capture_output=True, env={**os.environ, "PATH": path})
    assert Path("large.y4m").read_bytes().startswith(b"YUV4MPEG2 W320 H176 F25:1")


@pytest.fixture
def released_layout(shared: Path, tmp_path: Path) -> Path:
    """Return a folder in the released layout, with the tiny weights of the parity fixtures."""
    folder = tmp_path / "models" / "recavsr-5b"
    folder.mkdir(parents=True)
    for name in ("transformer", "flashdecoder", "prompt"):
        shutil.copy(shared / "parity" / f"tiny_{name}.safetensors", folder / f"{name}.safetensors")
    for name in ("model_config", "flashdecoder_config"):
        shutil.copy(shared / "parity" / f"tiny_{name}.json", folder / f"{name}.json")
    shutil.copy(shared / "parity" / "latent_norm.json", folder / "vae_config.json")
    return folder


@pytest.mark.parametrize("line", [line for line in commands("recavsr") if line not in UPSCALE])
def test_other_examples_run(line: str, holiday: Path, released_layout: Path) -> None:
    if "large.mkv" in line:  # made by an example before it
        assert run(["upscale", str(holiday), "-o", "large.mkv", "--model", "identity", "--scale", "2"]) == 0
    assert run(shlex.split(line)[1:]) == 0


def test_every_command_of_the_readme_is_known() -> None:
    programs = {line.split(" ", 1)[0] for block in fenced(README, "console") for line in block.splitlines()}
    assert programs == {"make", "pip", "recavsr"}


def test_make_targets_exist() -> None:
    named = {line.split()[1] for line in commands("make")}
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    named |= set(re.findall(r"`make (\w+)", text))
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    assert {"demo", "test", "check", "bench", "clean"} <= targets
    assert named <= targets


def test_changelog_names_this_version() -> None:
    assert f"## {recavsr.__version__}" in (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
