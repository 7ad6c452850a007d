"""Networks are named, and changes proposed, as a script could write them."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from mpt.planner.answers.own_plan import Way
from mpt.planner.own.plan import worth_their_changes
from mpt.planner.own.proposals.changes import Recomputed, find_recomputed, pieces_of
from mpt.planner.own.text.names import as_written, named_networks


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def stages() -> nn.Module:
    """A network whose list of levels holds lists of blocks, as those of U-Nets."""
    model = nn.Module()
    model.levels = nn.ModuleList([nn.ModuleList([block(), block(), nn.Linear(2, 2)]) for _ in "12"])
    return model


def weights_of(*models: nn.Module) -> set[int]:
    return {id(weight) for model in models for weight in model.parameters()}


def test_networks_in_objects_and_collections_have_the_names_of_their_places() -> None:
    first, second, third, average = (block() for _ in range(4))
    owner = SimpleNamespace(generator=first, size=3)
    found = named_networks(
        {"owner": owner, "nets": {"a": second}, "both": [third, first], "ema": average, "torch": torch}
    )  # fmt: skip
    names = {id(one): name for name, one in found.items()}
    wanted = ["owner.generator", "nets['a']", "both[0]", "ema"]
    assert [names[id(one)] for one in (first, second, third, average)] == wanted
    assert len(found) == 4


def test_a_network_has_its_own_name_before_that_of_a_wrapper() -> None:
    model = block()
    wrapped = nn.Sequential(model)
    assert list(named_networks({"averaged": wrapped, "model": model})) == ["model", "averaged"]


def test_lists_to_recompute_are_those_that_are_called_and_trained_once_each() -> None:
    model = stages()
    average = copy.deepcopy(model)
    networks = {"model": model, "average": average, "wrapped": nn.Sequential(model)}
    found = find_recomputed(networks, weights_of(model))
    assert found == Recomputed(lists=("model.levels.0", "model.levels.1"))
    (line,) = found.lines(networks)
    assert line.startswith("for block in [*model.levels[0], *model.levels[1]]: block.forward = ")
    assert as_written("model.levels.0.1.0", networks) == "model.levels[0][1][0]"
    assert as_written("nets['a'].levels.0", {}) == "nets['a'].levels[0]"


def test_blocks_of_a_list_of_lists_are_recomputed_and_single_layers_in_it_are_not() -> None:
    layers = (nn.ModuleList([Twins(), nn.Linear(2, 2), None, block()]) for _ in range(2))
    model = nn.ModuleDict({"layers": nn.ModuleList(layers), "other": nn.Linear(2, 2)}).eval()
    found = find_recomputed({"model": model}, weights_of(model))
    paths = ("0.0", "0.3", "1.0", "1.3")
    assert found == Recomputed(blocks=tuple(f"model.layers.{one}" for one in paths))


def test_names_that_no_attribute_can_have_are_written_as_python_takes_them() -> None:
    model = nn.Module()
    model.add_module("0", nn.ModuleDict({"3": block(), "up-down": block()}))
    model.add_module("class", block())
    networks = {"model": model}
    written = [as_written(f"model.{name}", networks) for name, _ in model.named_modules() if name]
    assert all(isinstance(eval(one, {"model": model}), nn.Module) for one in written)
    assert written[1] == "model.get_submodule('0')['3']"


class Twins(nn.Module):
    """Blocks as attributes, and layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down1, self.down2 = nn.Linear(2, 2), block(), block()
        self.tail = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)), nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 2)


def test_blocks_that_are_attributes_and_layers_in_a_row_are_recomputed_where_there_are_no_lists() -> (
    None
):
    model = Twins()
    found = find_recomputed({"model": model}, weights_of(model))
    assert found == Recomputed(
        blocks=("model.down1", "model.down2"), pieces=(("model.tail", 3),), has_statistics=True
    )
    tail, blocks = found.lines({"model": model})
    assert tail.startswith("model.tail.forward = functools.partial(torch.utils.checkpoint.")
    assert "checkpoint_sequential, model.tail, 3, " in tail
    assert blocks.startswith("for block in [model.down1, model.down2]: block.forward = ")
    assert blocks.endswith("# updates the statistics of batch normalization twice")
    assert find_recomputed({"model": model}, set()) == Recomputed()


def test_no_piece_and_no_block_begins_with_a_layer_that_works_in_place() -> None:
    def layers() -> list[nn.Module]:
        return [nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU(inplace=True)]

    assert pieces_of(nn.Sequential(*layers(), *layers(), *layers())) == 3
    # three pieces of seven would begin at 0, 2 and 4
    assert pieces_of(nn.Sequential(*layers(), *layers(), nn.Linear(2, 2))) == 2
    before = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), block(), block(), before, nn.ReLU(inplace=True))
    found = find_recomputed({"model": model}, weights_of(model))
    assert found == Recomputed(blocks=("model.1", "model.2"))


def test_a_change_that_adds_nothing_to_others_is_left_out() -> None:
    def way(reserved: int, seconds: float) -> Way:
        return Way([], True, cast(Any, SimpleNamespace(reserved=reserved, step_seconds=seconds)))

    low, half = frozenset({"optimizer"}), frozenset({"autocast"})
    more = low | {"recompute"}
    ways = [
        (low, way(80, 1.0)),
        (half, way(90, 0.5)),
        (low | half, way(79, 0.5)),
        (more, way(80, 1.5)),
    ]
    kept = worth_their_changes(ways)
    # the third saves more than the second, and is sooner than the first
    assert [(one.plan.reserved, one.plan.step_seconds) for one in kept] == [
        (80, 1.0),
        (90, 0.5),
        (79, 0.5),
    ]


class Lazy(dict[str, object]):
    """A library's classes by name, imported when they are asked for."""

    def items(self) -> Any:
        raise ImportError("there are many")


def test_a_mapping_that_imports_what_it_is_asked_for_is_not_asked() -> None:
    layer = nn.Linear(2, 2)
    assert named_networks({"classes": Lazy(), "layer": layer}) == {"layer": layer}
