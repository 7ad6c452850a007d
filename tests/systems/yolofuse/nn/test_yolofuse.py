"""The networks against the published programs: names, counts and outputs."""

import pytest
import torch

from mpt.errors import ConfigError
from mpt.seams import DataSpec, FieldSpec
from mpt.systems.yolofuse.nn.layers.yolo_head import decode
from mpt.systems.yolofuse.nn.yolofuse import Settings, YoloFuse, build, fuse
from tests.systems.yolofuse.published import KEPT, read_arrays, read_json, state_of

LISTINGS = read_json("listings.json.gz")
NETWORKS = [("yolov8n_nc80", "rgb", 80), ("yolov8n_nc1", "rgb", 1)] + [
    (f"yolofuse_{fusion}", fusion, 1)
    for fusion in ("early", "mid", "decision", "easy", "deyolo", "defa")
]


def pair_spec(height: int = 64, width: int = 64, classes: int = 1) -> DataSpec:
    fields = {name: FieldSpec((3, height, width), torch.float32) for name in ("rgb", "ir")}
    return DataSpec(fields, 10, tuple(f"class{n}" for n in range(classes)))


@pytest.mark.parametrize(("name", "fusion", "classes"), NETWORKS)
def test_names_shapes_order_and_counts_are_the_published_ones(
    name: str, fusion: str, classes: int
) -> None:
    net = YoloFuse(Settings(fusion=fusion), classes)
    listing = LISTINGS[name]
    assert {key: list(value.shape) for key, value in net.state_dict().items()} == listing[
        "state_dict"
    ]
    assert list(net.state_dict()) == list(listing["state_dict"])
    assert sum(p.numel() for p in net.parameters()) == listing["total_parameters"]
    assert list(net.strides) == listing["strides"]


def test_yolov8_has_its_published_number_of_parameters() -> None:
    counts = [
        sum(p.numel() for p in YoloFuse(Settings(fusion="rgb", scale=s), 80).parameters())
        for s in ("n", "s")
    ]
    assert counts == [3_157_200, 11_166_560]


def loaded(name: str, fusion: str, classes: int, arrays: dict) -> YoloFuse:
    net = YoloFuse(Settings(fusion=fusion), classes)
    net.load_state_dict(state_of(LISTINGS[name.removesuffix("_640")]["state_dict"], arrays))
    return net.eval()


@pytest.mark.parametrize(
    ("name", "fusion", "classes"),
    [n for n in NETWORKS if n[0] not in ("yolov8n_nc1", "yolofuse_defa")],
)
def test_outputs_and_decoded_boxes_agree_with_the_published_network(
    name: str, fusion: str, classes: int
) -> None:
    arrays = read_arrays(f"{name}.npz")
    net = loaded(name, fusion, classes, arrays)
    pictures = (torch.from_numpy(arrays["input_u8"]).float() / 255).split(3, 1)
    with torch.no_grad():
        single = net(*pictures)
        fused = fuse(net)(*pictures)
        raw = net.double()(*(picture.double() for picture in pictures))
        boxes, scores = decode(raw, net.strides)
    for number, level in enumerate(raw):
        expected = torch.from_numpy(arrays[f"raw{number}_f64"])
        torch.testing.assert_close(level.flatten()[::KEPT], expected, rtol=0, atol=1e-7)
        # Rounding in float32 moves logits by up to 2e-3, and merging BatchNorm by as much.
        torch.testing.assert_close(
            single[number].flatten()[::KEPT].double(), expected, rtol=0, atol=5e-3
        )
        torch.testing.assert_close(
            fused[number].flatten()[::KEPT].double(), expected, rtol=0, atol=1e-2
        )
    middle, size = (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
    decoded = torch.cat((middle, size, scores), 2).transpose(1, 2).flatten()[::KEPT]
    torch.testing.assert_close(decoded, torch.from_numpy(arrays["decoded_f64"]), rtol=0, atol=1e-6)


def test_the_pyramid_of_deyolo_runs_at_640_pixels_as_published() -> None:
    arrays = read_arrays("yolofuse_deyolo_640.npz")
    net = loaded("yolofuse_deyolo_640", "deyolo", 1, arrays)
    picture = torch.from_numpy(arrays["input_u8"]).float() / 255
    picture = picture.repeat_interleave(5, 2).repeat_interleave(5, 3)
    with torch.no_grad():
        raw = net(*picture.split(3, 1))
    raw[0] = raw[0][:, :, ::4, ::4]
    for level, key in zip(raw, ("raw0_every4", "raw1", "raw2"), strict=True):
        torch.testing.assert_close(
            level.flatten()[::KEPT], torch.from_numpy(arrays[key]), rtol=0, atol=5e-3
        )


def test_merging_batch_norm_leaves_none_and_the_original_as_it_was() -> None:
    net = YoloFuse(Settings(fusion="mid"), 1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    merged = fuse(net)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in merged.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_grey_infrared_picture_is_the_same_as_three_equal_channels() -> None:
    net = YoloFuse(Settings(fusion="mid"), 2).eval()
    visible, infrared = torch.rand(1, 3, 64, 64), torch.rand(1, 1, 64, 64)
    with torch.no_grad():
        assert torch.equal(
            net(visible, infrared)[0], net(visible, infrared.expand(-1, 3, -1, -1))[0]
        )


@pytest.mark.parametrize(
    ("fusion", "scale"),
    [
        *((fusion, "m") for fusion in ("rgb", "ir", "early", "mid", "easy", "deyolo", "defa")),
        ("mid", "l"),
        pytest.param("decision", "l", marks=pytest.mark.slow),  # seconds of meta kernels in Python
    ],
)
def test_every_fusion_is_built_in_larger_sizes_too(
    fusion: str, scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # whose kernel on meta is most of the time, and which changes no shape
    monkeypatch.setattr(torch.nn.BatchNorm2d, "forward", lambda self, x: x)
    with torch.device("meta"):
        nets = build(Settings(fusion=fusion, scale=scale), pair_spec())
        maps = nets["net"](*(torch.zeros(1, 3, 64, 64) for _ in nets["net"].cameras))
    assert {level.shape[1] for level in maps} == {65}


def test_sides_that_the_strides_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="divisible by 32"):
        build(Settings(fusion="mid"), pair_spec(72, 64))
