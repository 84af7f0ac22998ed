"""A state is a value: mapped, copied, cut from a graph, saved and loaded as a whole."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from recavsr.errors import InputError
from recavsr.state import State


@dataclass(frozen=True)
class Leaf(State):
    value: Tensor
    positions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tree(State):
    leaves: tuple[Leaf | None, ...]
    extra: Tensor | None
    step: int
    name: str


def tree() -> Tree:
    leaves = (Leaf(torch.arange(6.0).view(2, 3), (1, 5)), None, Leaf(torch.ones(2, dtype=torch.bfloat16)))
    return Tree(leaves, torch.tensor([7], dtype=torch.int32), 3, "Straße")


def same(a: State, b: State) -> bool:
    pairs = list(zip(a.tensors(), b.tensors(), strict=True))
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def test_tensors_in_field_order_and_bytes() -> None:
    state = tree()
    assert [tuple(x.shape) for x in state.tensors()] == [(2, 3), (2,), (1,)]
    assert state.nbytes == 6 * 4 + 2 * 2 + 4


def test_map_changes_tensors_only() -> None:
    state = tree()
    doubled = state.map(lambda x: 2 * x)
    assert torch.equal(doubled.leaves[0].value, 2 * state.leaves[0].value)
    assert doubled.leaves[0].positions == (1, 5)
    assert doubled.leaves[1] is None
    assert (doubled.step, doubled.name) == (3, "Straße")
    assert same(state, tree())


def test_to_changes_the_dtype() -> None:
    assert {x.dtype for x in tree().to(torch.float64).tensors()} == {torch.float64}


def test_a_clone_shares_no_memory() -> None:
    state = tree()
    copy = state.clone()
    for tensor in state.tensors():
        tensor.zero_()
    assert same(copy, tree())


def test_detach_cuts_the_graph() -> None:
    weight = torch.ones(3, requires_grad=True)
    state = Leaf(weight * 2)
    assert state.value.requires_grad
    assert not state.detach().value.requires_grad


def test_states_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        tree().step = 4  # type: ignore[misc]


def test_save_and_load(tmp_path: Path) -> None:
    state = tree()
    state.save(tmp_path / "state", model="nano", size=[4, 5])
    loaded, metadata = Tree.load(tmp_path / "state")
    assert same(loaded, state)
    assert metadata == {"model": "nano", "size": [4, 5]}
    assert loaded.leaves[0].positions == (1, 5)
    assert isinstance(loaded.leaves, tuple)
    assert (loaded.leaves[1], loaded.step, loaded.name) == (None, 3, "Straße")


def test_save_takes_views_and_shared_memory(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    state = Tree((Leaf(base.t()), Leaf(base[1:])), base, 0, "")
    state.save(tmp_path / "state")
    assert same(Tree.load(tmp_path / "state")[0], state)


def test_another_kind_is_refused(tmp_path: Path) -> None:
    tree().save(tmp_path / "state")
    with pytest.raises(InputError, match="holds a Tree, not a Leaf"):
        Leaf.load(tmp_path / "state")
    assert isinstance(State.load(tmp_path / "state")[0], Tree)


def damaged_file(path: Path, how: str) -> None:
    tree().save(path)
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    elif how == "text":
        path.write_text("not a state")
    elif how == "other":
        save_file({"weight": torch.ones(2)}, str(path))
    elif how == "metadata":
        save_file({"value": torch.ones(2)}, str(path), metadata={"structure": "{", "metadata": "{}"})
    elif how == "unknown class":
        structure = '{"state": "Nowhere", "fields": {}}'
        save_file({"value": torch.ones(2)}, str(path), metadata={"structure": structure, "metadata": "{}"})
    elif how == "tensor gone":
        structure = '{"state": "Leaf", "fields": {"value": {"tensor": true}}}'
        save_file({"other": torch.ones(2)}, str(path), metadata={"structure": structure, "metadata": "{}"})
    elif how == "field gone":
        structure = '{"state": "Leaf", "fields": {}}'
        save_file({"other": torch.ones(2)}, str(path), metadata={"structure": structure, "metadata": "{}"})


@pytest.mark.parametrize(
    "how",
    ["missing", "empty", "cut", "text", "other", "metadata", "unknown class", "tensor gone", "field gone"],
)
def test_a_damaged_file_is_refused(tmp_path: Path, how: str) -> None:
    path = tmp_path / "state"
    damaged_file(path, how)
    with pytest.raises(InputError, match="not a readable recavsr state") as error:
        State.load(path)
    assert str(path) in str(error.value)
