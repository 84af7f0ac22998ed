"""`recavsr models`: the names that `--model` knows, and where they lead.

The user's own names are one small JSON file, {name: folder or hub id}, in the user's configuration folder.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from recavsr.cli.console import Console
from recavsr.errors import InputError

BUILT_IN = {
    "nano": "in the package: small, for CPU or GPU",
    "identity": "in the package: resizes only, to try the media path",
}

app = typer.Typer(help="List the models, and give folders or hub ids a name.")


def registry_path() -> Path:
    """Return where the user's own model names are kept."""
    home = os.environ.get("APPDATA" if sys.platform == "win32" else "XDG_CONFIG_HOME")
    return Path(home or Path.home() / ".config") / "recavsr" / "models.json"


def registered() -> dict[str, str]:
    """Return the user's own names and the folders or hub ids they stand for."""
    path = registry_path()
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path} can not be read ({error}): mend it or delete it") from error
    if not isinstance(names, dict) or not all(isinstance(place, str) for place in names.values()):
        raise InputError(f"{path} must map names to folders or hub ids: mend it or delete it")
    return names


def resolve(model: str) -> str:
    """Return the folder or hub id of a registered name; any other text is returned as it is."""
    return model if model in BUILT_IN else registered().get(model, model)


@app.callback(invoke_without_command=True)
def list_models(context: typer.Context) -> None:
    """List the models that --model knows by name."""
    if context.invoked_subcommand is not None:
        return
    own = registered()
    width = max(map(len, [*BUILT_IN, *own]))
    for name, place in {**BUILT_IN, **own}.items():
        print(f"{name:<{width}}  {place}")


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(help="A short name: letters, digits, dot, dash, underscore.")],
    place: Annotated[str, typer.Argument(metavar="PATH", help="A model folder, or a hub id as OWNER/NAME.")],
) -> None:
    """Give a model folder or a hub id a name."""
    if name in BUILT_IN:
        raise InputError(f"{name} is in the package: choose another name")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise InputError(f"{name!r} is no name: use letters, digits, dot, dash, underscore")
    folder = Path(place).expanduser()
    if folder.is_dir():
        place = str(folder.resolve())
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", place):
        raise InputError(f"{place}: no such folder, and no hub id (OWNER/NAME)")
    _save({**registered(), name: place})
    Console(json_lines=False).say(f"{name} is {place}")


@app.command("remove")
def remove(name: Annotated[str, typer.Argument(help="The name to forget; the model's files stay.")]) -> None:
    """Forget a name."""
    names = registered()
    if name not in names:
        raise InputError(f"no registered model is called {name}: `recavsr models` lists them")
    place = names.pop(name)
    _save(names)
    Console(json_lines=False).say(f"forgot {name}; {place} stays as it is")


def _save(names: dict[str, str]) -> None:
    path = registry_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(names, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} can not be written: {error.strerror}") from error
