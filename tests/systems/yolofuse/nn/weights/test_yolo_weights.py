"""Starting from a state dict of one's own network or of a one-camera YOLO."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mpt.engine.building.initial_weights import load_initial_weights
from mpt.errors import CheckpointError
from mpt.systems.yolofuse.nn.weights.yolo_weights import by_layer
from mpt.systems.yolofuse.nn.yolofuse import Settings, YoloFuse, translate_weights


def start_from(net: YoloFuse, path: str) -> str:
    """Load as a run does."""
    return load_initial_weights({"net": net}, Path(path), translate_weights).message


def saved(net: YoloFuse, path: Path, prefix: str = "") -> str:
    save_file({prefix + name: value.clone() for name, value in net.state_dict().items()}, path)
    return str(path)


def test_the_same_network_is_loaded_by_name_whatever_the_prefix(tmp_path: Path) -> None:
    source = YoloFuse(Settings(fusion="mid"), 1)
    given = source.state_dict()
    for prefix in ("", "model."):
        net = YoloFuse(Settings(fusion="mid"), 1)
        said = start_from(net, saved(source, tmp_path / "a.safetensors", prefix))
        assert "loaded all 739 tensors" in said
        assert all(torch.equal(value, given[name]) for name, value in net.state_dict().items())


def test_class_branches_stay_where_the_number_of_classes_differs(tmp_path: Path) -> None:
    source, net = YoloFuse(Settings(fusion="rgb"), 80), YoloFuse(Settings(fusion="rgb"), 2)
    before = net.state_dict()["model.22.cv3.0.2.bias"].clone()
    torch.save(source.state_dict(), tmp_path / "a.pt")
    start_from(net, str(tmp_path / "a.pt"))
    assert torch.equal(
        net.state_dict()["model.22.cv2.0.2.bias"], source.state_dict()["model.22.cv2.0.2.bias"]
    )
    assert torch.equal(net.state_dict()["model.22.cv3.0.2.bias"], before)


def test_one_cameras_backbone_starts_both_branches(tmp_path: Path) -> None:
    source, net = YoloFuse(Settings(fusion="rgb"), 80), YoloFuse(Settings(fusion="deyolo"), 1)
    start_from(net, saved(source, tmp_path / "a.safetensors"))
    state, given = net.state_dict(), source.state_dict()
    for layer, first, second in ((0, 3, 13), (4, 7, 17), (9, 12, 22)):
        names = [name for name in given if name.startswith(f"model.{layer}.")]
        for name in names:
            rest = name.split(".", 2)[2]
            assert torch.equal(state[f"model.{first}.{rest}"], given[name])
            assert torch.equal(state[f"model.{second}.{rest}"], given[name])


def test_layers_are_taken_whole_and_not_by_shapes_that_agree_by_chance() -> None:
    """Of another width counters and a few norms have the shapes of a layer that does something else."""
    given = YoloFuse(Settings(fusion="rgb"), 80).state_dict()
    for fusion in ("mid", "early", "decision", "easy", "deyolo", "defa"):
        net = YoloFuse(Settings(fusion=fusion), 1)
        taken = translate_weights({"net": net}, given)
        assert taken is not None
        own = by_layer(net.state_dict())
        for layer, rests in by_layer(taken).items():
            if layer != max(own):
                assert set(rests) == set(own[layer]), f"{fusion}: layer {layer} is taken in part"
        assert (len(taken) == 0) == (fusion in ("mid", "early"))


def test_neck_and_head_start_where_they_are_built_alike(tmp_path: Path) -> None:
    source, net = YoloFuse(Settings(fusion="rgb"), 80), YoloFuse(Settings(fusion="deyolo"), 1)
    start_from(net, saved(source, tmp_path / "a.safetensors"))
    state, given = by_layer(net.state_dict()), by_layer(source.state_dict())
    last = max(state)
    for layer in (12, 15, 16, 18, 19, 21):
        mine = state[last - (22 - layer)]
        assert all(torch.equal(mine[name], value) for name, value in given[layer].items())
    assert torch.equal(state[last]["cv2.0.2.bias"], given[22]["cv2.0.2.bias"])
    assert state[last]["cv3.0.2.bias"].shape == (1,)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    net = YoloFuse(Settings(fusion="mid"), 1)
    with pytest.raises(CheckpointError, match="it is of another model"):
        start_from(
            net, saved(YoloFuse(Settings(fusion="rgb", scale="s"), 80), tmp_path / "a.safetensors")
        )
    save_file({"encoder.weight": torch.zeros(2)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="it is of another model"):
        start_from(net, str(tmp_path / "b.safetensors"))


@pytest.mark.parametrize("family", ["yolov8", "yolo26"])
def test_the_tensors_of_a_pickled_model_are_read_without_running_it(
    family: str, tmp_path: Path
) -> None:
    """As published files are: a whole model, in a class that need not be here, among other things."""
    source, net = (YoloFuse(Settings(fusion="rgb", family=family), 1) for _ in range(2))
    torch.save({"epoch": 3, "model": source}, tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    assert b"mpt.systems.yolofuse" in content
    start_from(net, str(tmp_path / "a.pt"))
    given = source.state_dict()
    assert all(torch.equal(value, given[name]) for name, value in net.state_dict().items())


def test_a_network_on_both_cameras_channels_takes_a_one_camera_file_whole(tmp_path: Path) -> None:
    source, net = (
        YoloFuse(Settings(fusion="rgb", family="yolo11"), 1),
        YoloFuse(Settings(fusion="data", family="yolo11"), 1),
    )
    infrared = net.state_dict()["model.0.conv.weight"][:, 3:].clone()
    assert "all 499" in start_from(net, saved(source, tmp_path / "a.safetensors"))
    first = net.state_dict()["model.0.conv.weight"]
    assert torch.equal(first[:, :3], source.state_dict()["model.0.conv.weight"])
    assert torch.equal(first[:, 3:], infrared)
    assert torch.equal(
        net.state_dict()["model.10.cv1.conv.weight"],
        source.state_dict()["model.10.cv1.conv.weight"],
    )
