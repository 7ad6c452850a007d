"""Published RIFE against what its own networks gave with the same weights, and which version a file holds."""

import zlib
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from mpt.config.load import load_config
from mpt.errors import ConfigError
from mpt.inference.half import halve
from mpt.systems.dain.inference.tiles import whole
from mpt.systems.dain.nn.rife_published.networks import PublishedRife
from mpt.systems.dain.nn.rife_published.practical import PracticalRife
from mpt.systems.dain.nn.rife_published.version_settings import Version
from mpt.systems.dain.nn.rife_published.versions import (
    ALIKE,
    BUILDERS,
    PLANS,
    build_version,
    version_of,
)

from .rife_formula import formula_state, network, recorded, recorded_frames

VERSIONS = ("ifnet", "ifnet_m", "hd3", "hd3_older", "4.0", "4.6", "4.25")
FURTHER = ("4.2", "4.5", "4.7", "4.10", "4.12.lite", "4.13", "4.14.lite", "4.15.lite", "4.22.lite")
LATEST = ("4.25.lite", "4.25.heavy", "4.26.heavy")
WIDE = [pytest.param(version, marks=pytest.mark.slow) for version in ("4.20", "4.21", "4.25.heavy")]
MIDDLE_ONLY = ("ifnet", "hd3", "hd3_older")
PARAMETERS = {
    "ifnet": 10_708_215,
    "ifnet_m": 10_710_780,
    "hd3": 2_533_295,
    "hd3_older": 3_038_015,
    "4.0": 5_160_980,
    "4.1": 5_160_980,
    "4.2": 5_156_420,
    "4.4": 5_156_420,
    "4.5": 5_275_520,
    "4.6": 5_306_256,
    "4.9": 5_325_012,
    "4.11": 5_364_312,
    "4.12.lite": 2_631_804,
    "4.13.lite": 2_631_804,
    "4.14.lite": 2_968_152,
    "4.17.lite": 2_616_476,
    "4.18": 5_364_312,
    "4.20": 15_376_512,
    "4.22": 9_322_416,
    "4.22.lite": 4_866_052,
    "4.25": 5_664_776,
    "4.25.lite": 5_622_700,
    "4.25.heavy": 21_663_528,
    "4.26.heavy": 5_723_156,
}


def made(net: PublishedRife, time: float, frames: str = "frames") -> Tensor:
    """Return every second row and column of the frame, padded and cut back as a user's frames are."""
    with torch.no_grad():
        return whole(net, *recorded_frames(frames), torch.tensor([[time]]))[0, 0, :, ::2, ::2]


def distance(image: Tensor, version: str, name: str) -> float:
    return float(np.abs(image.numpy() - recorded()[f"{version}/{name}"]).max())


@pytest.mark.parametrize("version", VERSIONS)
def test_names_and_values_are_those_of_the_original_in_its_order(version):
    state = formula_state(version)
    assert list(state) == recorded()[f"{version}/names"].tolist()
    sums = [zlib.crc32(np.ascontiguousarray(value.numpy()).tobytes()) for value in state.values()]
    assert sums == recorded()[f"{version}/crc"].tolist()


@pytest.mark.parametrize(("version", "count"), PARAMETERS.items())
def test_every_version_has_the_published_number_of_parameters(version, count):
    with torch.device("meta"):
        assert sum(value.numel() for value in build_version(version).parameters()) == count


@pytest.mark.parametrize("version", VERSIONS)
def test_frames_are_the_originals(version):
    net = network(version)
    times = {"t5": 0.5} if version in MIDDLE_ONLY else {"t25": 0.25, "t5": 0.5, "t75": 0.75}
    for name, time in times.items():
        assert distance(made(net, time), version, f"{name}_merged") < 3e-5, name
    assert net.any_time == (version not in MIDDLE_ONLY)


@pytest.mark.parametrize("version", [*FURTHER, "4.25.lite", "4.26.heavy", *WIDE])
def test_names_and_frames_of_further_versions_are_the_originals(version):
    """Every fourth row and column at 1/4, recorded of vs-rife 5.6.0's networks with the formula's weights."""
    state = formula_state(version)
    listing = "\n".join(f"{name} {tuple(value.shape)}" for name, value in state.items())
    assert zlib.crc32(listing.encode()) == int(recorded()[f"{version}/names"])
    assert version_of({f"module.{name}": value for name, value in state.items()}) == version
    net = network(version)
    most = 1e-4 if version in LATEST else 3e-5
    assert (
        float(
            np.abs(made(net, 0.25)[:, ::2, ::2].numpy() - recorded()[f"{version}/t25_merged"]).max()
        )
        < most
    )
    wanted = recorded().get(f"{version}/ensemble_t25_merged")
    assert (wanted is not None) == (not net.plan.passes_features)
    if wanted is not None:
        net.ensemble = True
        assert float(np.abs(made(net, 0.25)[:, ::2, ::2].numpy() - wanted).max()) < most


@pytest.mark.parametrize("version", ["ifnet", "ifnet_m", "hd3_older", "4.0", "4.6", "4.25"])
def test_frames_at_half_the_scale_are_the_originals(version):
    net = network(version)
    net.use_scale(0.5)
    time = {"ifnet": 0.5, "hd3_older": 0.5, "ifnet_m": 0.25}.get(version, 0.75)
    assert distance(made(net, time), version, "scale05_merged") < 3e-5


@pytest.mark.parametrize("version", VERSIONS)
def test_frames_of_odd_sizes_are_padded_as_the_programs_do(version):
    net = network(version)
    time = {"ifnet_m": 0.75, **dict.fromkeys(MIDDLE_ONLY, 0.5)}.get(version, 0.25)
    if f"{version}/odd_merged" in recorded():
        assert distance(made(net, time, "odd_frames"), version, "odd_merged") < 3e-5
    if f"{version}/odd128_merged" in recorded():
        net.multiple = 128
        assert distance(made(net, time, "odd_frames"), version, "odd128_merged") < 3e-5


@pytest.mark.parametrize("version", ["4.0", "4.6"])
def test_the_ensemble_of_both_directions_is_the_originals(version):
    net = network(version)
    assert isinstance(net, PracticalRife)
    net.ensemble = True
    assert distance(made(net, 0.25), version, "ensemble_merged") < 3e-5


def test_large_motion_doubles_the_scales_of_4_0_for_the_sample_that_has_it_alone():
    net = network("4.0")
    assert isinstance(net, PracticalRife)
    factor = float(recorded()["4.0/large_factor"])
    with torch.no_grad():
        net.block1.lastconv.weight.mul_(factor)
        net.block1.lastconv.bias.mul_(factor)
    frames = recorded_frames()
    assert distance(made(net, 0.25), "4.0", "large_merged") < 1e-3
    still = [torch.zeros_like(frame) for frame in frames]
    with torch.no_grad():
        both = whole(
            net,
            torch.cat((frames[0], still[0])),
            torch.cat((frames[1], still[1])),
            torch.full((2, 1), 0.25),
        )
        alone = whole(net, *frames, torch.tensor([[0.25]]))
        odd = whole(net, *(frame[..., :32, :] for frame in frames), torch.tensor([[0.25]]))
    assert (both[:1] - alone).abs().max() < 1e-3
    assert odd.isfinite().all()  # 32 rows: the original ends in an error about shapes


@pytest.mark.parametrize(("version", "most"), [("4.0", 2.2e-4), ("4.6", 2.3e-4), ("4.25", 3.4e-4)])
def test_half_is_no_farther_from_float32_than_the_originals_half(version, most):
    """By the mean: the largest difference is that of one pixel at an edge. The originals' are 2.16, 2.23, 3.33e-4."""
    net = network(version)
    exact = made(net, 0.25)
    halve(net, torch.float16)
    with torch.autocast("cpu", torch.float16):
        half = made(net, 0.25)
    assert 0 < (half - exact).abs().mean() < most


def test_a_file_says_which_version_it_holds():
    for version in VERSIONS:
        wrapped = {f"module.{name}": value for name, value in formula_state(version).items()}
        wrapped["module.teacher.block0.conv0.0.0.weight"] = torch.zeros(1)
        assert version_of(wrapped) == version
    assert version_of({"block0.conv0.0.0.weight": torch.zeros(1)}) is None


def test_every_name_is_that_of_one_network():
    names = [*BUILDERS, *PLANS, *(other for others in ALIKE.values() for other in others)]
    assert sorted(names) == sorted(get_args(Version))


@pytest.mark.parametrize(
    ("given", "version"), [("4.6", "4.6"), ("4.25", "4.25"), ("'4.10'", "4.10"), ("4.0", "4.0")]
)
def test_a_version_that_yaml_reads_as_a_number_is_taken(given, version):
    assert configured(given).model.settings.version == version


@pytest.mark.parametrize("given", ["4.10", "4.1", "4.20", "4.2"])
def test_a_number_that_may_be_two_versions_is_refused(given):
    with pytest.raises(ConfigError, match="write it in quotes"):
        configured(given)


def configured(version):
    fields = {
        "model": {"name": "rife"},
        "dataset": {"name": "procedural_triplets"},
        "train": {"steps": 1},
    }
    return load_config(fields, [f"model.version={version}"])
