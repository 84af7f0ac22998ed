"""A recipe's settings by name: read them, and change some (`recavsr train RECIPE --set NAME=VALUE`).

Settings are dataclasses, some within others. A name is the path to a value: `plan.first` in every stage that
has it, `polish.plan.first` in that stage alone, `pairs.presets.heavy` of the data that all share. Those of
frame losses need no prefix (`structure_weight`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from recavsr.errors import InputError

if TYPE_CHECKING:
    from recavsr.training.runner import Recipe, RecipeStage

_BARE = "frames"  # the dataclass whose values go by their own names
_DATA = "pairs."


@dataclass(frozen=True)
class Adjustable:
    """A stage's settings, and what makes the stage with others."""

    settings: Any
    remake: Callable[[Any], RecipeStage]


def values(settings: Any) -> dict[str, Any]:
    """Return all numbers, sizes, switches, choices and shares of a settings dataclass, by name."""
    found: dict[str, Any] = {}
    for name, value in ((f.name, getattr(settings, f.name)) for f in fields(settings)):
        if is_dataclass(value):
            prefix = "" if name == _BARE else f"{name}."
            found |= {prefix + inner: x for inner, x in values(value).items()}
        elif isinstance(value, Mapping):
            found |= {f"{name}.{key}": share for key, share in value.items()}
        elif isinstance(value, tuple) and all(isinstance(side, int) for side in value):
            found[name] = "x".join(map(str, value))
        elif value is None or isinstance(value, int | float | str):
            found[name] = value
    return found


def with_settings(recipe: Recipe, assignments: Iterable[str]) -> Recipe:
    """Return the recipe with settings changed, in every stage that has them; each is `NAME=VALUE`.

    Raises InputError where nothing has the name, or the value does not fit it.
    """
    changes = dict(_assignment(text) for text in assignments)
    known = set(settings_of_data(recipe)).union(*(settings_of(stage) for stage in recipe.stages))
    known |= {f"{stage.name}.{name}" for stage in recipe.stages for name in settings_of(stage)}
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = (
                f"did you mean {' or '.join(near)}?" if near else "`recavsr train RECIPE --list` lists them"
            )
            raise InputError(f"the recipe has no setting {name!r}; {hint}")
    data = {name.removeprefix(_DATA): text for name, text in changes.items() if name.startswith(_DATA)}
    return replace(
        recipe,
        pairs=_with(recipe.pairs, data),
        stages=tuple(_adjusted(stage, changes) for stage in recipe.stages),
    )


def settings_of(stage: RecipeStage) -> dict[str, Any]:
    """Return what can be set of a stage, by name."""
    return {} if stage.adjustable is None else values(stage.adjustable.settings)


def settings_of_data(recipe: Recipe) -> dict[str, Any]:
    """Return what can be set of the data that a recipe's stages share, by name."""
    return {_DATA + name: value for name, value in values(recipe.pairs).items()}


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise InputError(f"--set takes NAME=VALUE, not {text!r}")
    return name.strip(), value.strip()


def _adjusted(stage: RecipeStage, changes: Mapping[str, str]) -> RecipeStage:
    """Return the stage with those changes that name a setting of it, by its own name or after the stage's."""
    mine = settings_of(stage)
    named = (
        (name if name in mine else name.removeprefix(f"{stage.name}."), changes[name]) for name in changes
    )
    own = {name: text for name, text in named if name in mine}
    if stage.adjustable is None or not own:
        return stage
    return replace(stage.adjustable.remake(_with(stage.adjustable.settings, own)), run=stage.run)


def _with(settings: Any, changes: Mapping[str, str]) -> Any:
    """Return the dataclass with the named values replaced, all at once: they may only be right together."""
    hints, own = get_type_hints(type(settings)), {f.name: getattr(settings, f.name) for f in fields(settings)}
    inside: dict[str, dict[str, str]] = {}
    new: dict[str, Any] = {}
    for name, text in changes.items():
        first, _, rest = name.partition(".")
        if first not in own:
            first, rest = _BARE, name
        if rest:
            inside.setdefault(first, {})[rest] = text
        else:
            new[first] = _read(text, own[first], hints[first], name)
    for first, named in inside.items():
        if is_dataclass(own[first]):
            new[first] = _with(own[first], named)
        else:  # shares by name
            keys = {str(key): key for key in own[first]}
            read = {keys[key]: _read(text, 0.0, float, f"{first}.{key}") for key, text in named.items()}
            new[first] = {**own[first], **read}
    try:
        return replace(settings, **new)
    except ValueError as error:
        said = " ".join(f"{name}={text}" for name, text in changes.items())
        raise InputError(f"{said}: {error}") from error


def _read(text: str, before: Any, hint: Any, name: str) -> Any:
    """Return `text` as a value of the kind that is there; raise InputError where it is none."""
    if get_origin(hint) is Literal:
        return _one_of(text, {choice: choice for choice in get_args(hint)}, name)
    if sides := re.fullmatch(r"(\d+)x(\d+)", text):
        if tuple[int, int] not in get_args(hint):
            raise InputError(f"{name} is not a size: {text!r}")
        return int(sides[1]), int(sides[2])
    if isinstance(before, tuple):
        before = 0
    if isinstance(before, bool):
        return _one_of(text, {"true": True, "false": False}, name)
    if before is None or type(None) in get_args(hint):
        if text == "none":
            return None
        before = 0 if int in get_args(hint) else 0.0
    if isinstance(before, str):
        return text
    kind = int if isinstance(before, int) else float
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        what = "a whole number" if kind is int else "a number"
        raise InputError(f"{name} is {what} from 0 on, not {text!r}")
    return number


def _one_of(text: str, choices: Mapping[str, Any], name: str) -> Any:
    if text not in choices:
        raise InputError(f"{name} is one of {', '.join(choices)}, not {text!r}")
    return choices[text]
