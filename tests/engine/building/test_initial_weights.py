"""`model.weights`: whose files fit, what is said, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from mpt.engine.building.initial_weights import load_initial_weights, never_learnt
from mpt.errors import CheckpointError
from mpt.inference.export import write_weights
from tests.engine.parts import classifier, gan


def network(classes: int = 10, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Linear(4, classes)
    )


def state(seed: int = 1, classes: int = 10, prefix: str = "") -> dict[str, Tensor]:
    return {prefix + name: value for name, value in network(classes, seed).state_dict().items()}


def load(content: Any, path: Path, **options: Any) -> tuple[nn.Module, str]:
    torch.save(content, path, **options)
    net = network()
    return net, load_initial_weights({"net": net}, path).message


def same(net: nn.Module, expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, expected[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("wrap", "key"),
    [
        (lambda: state(), None),
        (lambda: {"model": state(), "args": argparse.Namespace(lr=1.0), "epoch": 3}, "model"),
        (lambda: {"state_dict": state(prefix="module."), "best": 0.9}, "state_dict"),
        (lambda: {"model": state(5), "model_ema": state()}, "model_ema"),
        (
            lambda: {"model_ema": {"n_averaged": torch.tensor(3), **state(prefix="module.")}},
            "model_ema",
        ),
        (lambda: state(prefix="model._orig_mod."), None),
        (lambda: state(prefix="net."), None),
        (lambda: state(prefix="net_ema."), None),
        (lambda: {**state(prefix="modules.net."), "optimizers.net.state.0": torch.ones(3)}, None),
        (lambda: network(seed=1), None),
    ],
    ids=[
        "plain",
        "args",
        "module",
        "ema",
        "averaged model",
        "compiled",
        "export",
        "export of an average",
        "checkpoint",
        "whole network",
    ],
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_weights_load_in_whatever_they_are_wrapped(
    wrap: Any, key: str | None, zipped: bool, tmp_path: Path
) -> None:
    path = tmp_path / "w.pth"
    net, said = load(wrap(), path, _use_new_zipfile_serialization=zipped)
    assert same(net, state())
    source = f"{path} (its '{key}')" if key else str(path)
    assert said.startswith(f"model.weights: loaded all 11 tensors from {source}")


def test_a_head_for_other_classes_stays_new_and_the_line_says_so(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({**state(classes=7), "projection": torch.ones(2)}, path)
    net = network()
    head = net[3].weight.detach().clone()  # type: ignore[index, operator]
    said = load_initial_weights({"net": net}, path).message
    assert said == (
        f"model.weights: loaded 9 of 11 tensors from {path}; new: net.3.weight (the file's is 7x4, not 10x4), "
        "net.3.bias (the file's is 7, not 10); left out: projection"
    )
    assert torch.equal(net[3].weight, head)  # type: ignore[index, arg-type]
    assert torch.equal(net[0].weight, state()["0.weight"])  # type: ignore[index, arg-type]


def embedded(tokens: int) -> nn.Module:
    """Return a network with the position embeddings of a vision transformer."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    net.register_parameter("pos_embed", nn.Parameter(torch.randn(1, tokens, 6)))
    return net


@pytest.mark.parametrize(("before", "old", "new"), [(1, 7, 4), (0, 4, 6), (2, 3, 5)])
def test_position_embeddings_of_another_image_size_are_interpolated(
    before: int, old: int, new: int, tmp_path: Path
) -> None:
    theirs, net = embedded(before + old * old), embedded(before + new * new)
    torch.save(theirs.state_dict(), tmp_path / "vit.pt")
    said = load_initial_weights({"net": net}, tmp_path / "vit.pt").message
    assert said.endswith(
        f"loaded all 5 tensors from {tmp_path}/vit.pt; resampled: net.pos_embed ({old}x{old} to {new}x{new})"
    )
    pictures = torch.arange(6.0).view(1, 6, 1, 1) + torch.rand(
        1, 6, old, old
    )  # the embeddings' six numbers as channels
    with torch.no_grad():
        theirs.get_parameter("pos_embed")[:, before:] = pictures.flatten(2).transpose(1, 2)
    torch.save(theirs.state_dict(), tmp_path / "vit.pt")
    load_initial_weights({"net": net}, tmp_path / "vit.pt")
    expected = (
        functional.interpolate(pictures, (new, new), mode="bicubic", antialias=True)
        .flatten(2)
        .transpose(1, 2)
    )
    result = net.get_parameter("pos_embed")
    assert torch.equal(result[:, :before], theirs.get_parameter("pos_embed")[:, :before])
    assert torch.allclose(result[:, before:], expected, atol=1e-6)


def test_position_embeddings_of_no_square_grid_stay_new(tmp_path: Path) -> None:
    torch.save(embedded(12).state_dict(), tmp_path / "vit.pt")
    said = load_initial_weights({"net": embedded(17)}, tmp_path / "vit.pt").message
    assert said.endswith("new: net.pos_embed (the file's is 1x12x6, not 1x17x6)")


def test_what_is_newly_made_and_frozen_is_warned_of(tmp_path: Path) -> None:
    torch.save(state(classes=7), tmp_path / "w.pt")
    net = network()
    made = load_initial_weights({"net": net}, tmp_path / "w.pt").newly_made
    assert made == ("net.3.weight", "net.3.bias")
    assert never_learnt({"net": net}, made) == []
    net[0].requires_grad_(False)  # type: ignore[index]
    assert never_learnt({"net": net}, made) == []
    net[3].requires_grad_(False)  # type: ignore[index]
    assert (
        "net.3.weight, net.3.bias are newly made and will not be trained"
        in never_learnt({"net": net}, made)[0]
    )


def test_half_weights_are_loaded_into_float32(tmp_path: Path) -> None:
    net, _ = load({name: value.half() if value.is_floating_point() else value for name, value in state().items()},
                  tmp_path / "w.pt")  # fmt: skip
    assert net[0].weight.dtype == torch.float32  # type: ignore[index, union-attr]
    assert torch.equal(net[0].weight, state()["0.weight"].half().float())  # type: ignore[index, arg-type]


def test_the_weights_of_a_backbone_load_into_the_part_that_has_its_names(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "w.pt")
    whole = nn.ModuleDict({"trunk": network(), "head": nn.Linear(2, 2)})
    said = load_initial_weights({"net": whole}, tmp_path / "w.pt").message
    assert same(whole["trunk"], state())
    assert "loaded 11 of 13" in said
    assert "new: net.head.weight, net.head.bias" in said


def test_a_file_that_fits_less_than_half_is_refused_with_a_list(tmp_path: Path) -> None:
    content = {
        **{f"encoder.{n}": torch.ones(2) for n in range(20)},
        "0.weight": state()["0.weight"],
    }
    with pytest.raises(
        CheckpointError,
        match=r"only 1 of the model's 11 tensors .* new: net\.0\.bias, .* and 5 more",
    ):
        load(content, tmp_path / "w.pt")
    with pytest.raises(
        CheckpointError,
        match=r"only 0 of the model's 11 .* new: net\.0\.weight, .*; left out: other$",
    ):
        load({"other": torch.ones(2)}, tmp_path / "none.pt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"0.weight": torch.ones(4, 3, 3, 3, dtype=torch.complex64)},
            "complex numbers, not floating",
        ),
        ({"0.weight": torch.ones(4, 3, 3, 3, dtype=torch.bool)}, "truth numbers, not floating"),
        ({"1.num_batches_tracked": torch.tensor(2.5)}, "floating numbers, not whole"),
        ({"2.bias": torch.tensor([1.0, float("nan"), 0, 0])}, r"net\.2\.bias in .* holds NaN"),
    ],
)
def test_numbers_that_are_no_weights_are_refused(
    change: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load({**state(), **change}, tmp_path / "w.pt")


@pytest.mark.parametrize("content", [[torch.ones(2)], torch.ones(3), {"a": 1}, {}, {"model": None}])
def test_what_is_no_state_dict_is_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not hold tensors by name"):
        load(content, tmp_path / "w.pt")


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path, "is not a run directory"),
        (tmp_path / "absent.pt", "there is no file"),
    ):
        with pytest.raises(CheckpointError, match=rf"model\.weights: .*{said}"):
            load_initial_weights({"net": network()}, path)


def test_every_model_takes_weights_and_its_average_starts_from_them_too(tmp_path: Path) -> None:
    donor = gan(seed=3)
    path = tmp_path / "export.safetensors"
    write_weights(path, {"gen": donor.task.modules["gen"], "disc": donor.task.modules["disc"]}, {})
    model = {
        "name": "dcgan",
        "features": 4,
        "image_size": 16,
        "latent_size": 8,
        "weights": str(path),
    }
    run = gan(model=model, task={"ema": 0.9})
    for name in ("gen", "disc"):
        assert same(run.task.modules[name], donor.task.modules[name].state_dict())
    assert same(run.task.modules["gen_ema"], donor.task.modules["gen"].state_dict())
    assert run.messages[0].startswith("model.weights: loaded all")


@pytest.mark.parametrize("prefix", ["modules.", ""])
def test_a_run_begins_with_what_an_averaged_one_evaluated(prefix: str, tmp_path: Path) -> None:
    donor = gan(seed=3, task={"ema": 0.9})
    gen, average = donor.task.modules["gen"], donor.task.modules["gen_ema"]
    with torch.no_grad():
        for value in average.parameters():
            value.add_(1)
    path = tmp_path / "state.safetensors"
    modules = {name: module.state_dict() for name, module in donor.task.modules.items()}
    save_file(
        {f"{prefix}{name}.{key}": one for name in modules for key, one in modules[name].items()},
        path,
    )
    model = {"name": "dcgan", "features": 4, "image_size": 16, "latent_size": 8}
    without = gan(model={**model, "weights": str(path)}, train={"ema": None})
    assert same(without.task.modules["gen"], average.state_dict())
    assert same(without.task.modules["disc"], modules["disc"])
    assert without.messages[0].endswith("gen: the average, which was evaluated")
    # one that averages too goes on with both
    further = gan(model={**model, "weights": str(path)}, task={"ema": 0.9})
    assert same(further.task.modules["gen"], gen.state_dict())
    assert same(further.task.modules["gen_ema"], average.state_dict())
    assert further.given_averages == ["gen"]
    assert "average" not in further.messages[0]


@pytest.mark.parametrize(
    ("build", "name", "memory"),
    [
        (gan, "gen", {"prune": {"networks": ["gen"]}}),
        (classifier, "net", {"lora": {"targets": ["convolutions"]}}),
    ],
)
def test_networks_that_a_trick_changes_begin_with_the_average_and_so_does_their_own(
    build: Any, name: str, memory: dict[str, Any], tmp_path: Path
) -> None:
    # an average of other shapes would be copied in part: layers of the average between layers of the network
    settings = {"train": {"steps": 4, "batch_size": 8, "ema": 0.9}}
    donor = build(seed=3, **settings)
    with torch.no_grad():
        for value in donor.task.modules[f"{name}_ema"].parameters():
            value.add_(torch.randn(value.shape))
    path = tmp_path / "state.safetensors"
    modules = {key: module.state_dict() for key, module in donor.task.modules.items()}
    save_file({f"{key}.{one}": modules[key][one] for key in modules for one in modules[key]}, path)
    model = {**donor.config.to_data()["model"], "weights": str(path)}
    plain = build(model=model, train={**settings["train"], "ema": None}, memory=memory)
    averaging = build(model=model, memory=memory, **settings)
    expected = plain.task.modules[name].state_dict()
    assert same(averaging.task.modules[name], expected)
    assert same(averaging.task.modules[f"{name}_ema"], expected)
    assert averaging.messages[0].endswith(f"{name}: the average, which was evaluated")


def test_a_run_that_is_resumed_or_infers_does_not_need_the_file() -> None:
    from mpt.engine.building.build import build_run

    with pytest.raises(CheckpointError, match="there is no file"):
        classifier(
            model={"name": "small_cnn", "features": 4, "image_size": 16, "weights": "/nowhere.pt"}
        )
    config = classifier().config
    settings = config.model.settings.model_copy(update={"weights": "/nowhere.pt"})
    import dataclasses

    config = dataclasses.replace(config, model=dataclasses.replace(config.model, settings=settings))
    spec = classifier().data
    assert build_run(config, torch.device("cpu"), spec, restores=True).messages == []
    assert build_run(config, torch.device("cpu"), spec, trains=False).messages == []
