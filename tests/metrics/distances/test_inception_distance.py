"""The published FID is refused clearly when its parts are not there."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path

import pytest
import torch

from mpt.errors import ConfigError, DataError
from mpt.metrics.distances.inception_distance import WEIGHTS_NAME, InceptionDistance, check_weights

pytestmark = pytest.mark.tier("fast")


HAS_EXTRA = all(map(importlib.util.find_spec, ("torch_fidelity", "torchmetrics")))


def test_a_missing_file_says_what_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=WEIGHTS_NAME):
        check_weights(str(tmp_path / "weights.pth"))


@pytest.mark.parametrize(
    "content", [b"not weights", b"hello\n", b"", b"PK\x03\x04", b"\x80\x02}."], ids=repr
)
def test_a_file_that_holds_no_tensors_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.pth"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"notes\.pth is not the Inception feature file"):
        check_weights(str(path))


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"layer.weight": torch.zeros(2)}, "it holds no layer fc"),
        ([torch.zeros(2)], "refused as a weights file: it does not hold tensors by name"),
        # torchvision's
        ({"fc.weight": torch.zeros(1000, 2048)}, "its last layer is 1000x2048, not 1008x2048"),
    ],
)
def test_other_weights_are_told_from_those_of_fid(
    state: object, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.pth"
    torch.save(state, path)
    with pytest.raises(DataError, match=problem):
        check_weights(str(path))


def test_a_hostile_file_is_refused_and_nothing_in_it_runs(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (str(canary),))

    path = tmp_path / "hostile.pth"
    path.write_bytes(pickle.dumps({"fc.weight": Hostile()}))
    with pytest.raises(DataError, match="is not the Inception feature file"):
        check_weights(str(path))
    assert not canary.exists()


@pytest.mark.skipif(HAS_EXTRA, reason="torch-fidelity is installed")
def test_without_the_extra_the_message_says_how_to_get_it(tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS_NAME
    torch.save({"fc.weight": torch.zeros(1008, 2048)}, path)
    with pytest.raises(ConfigError, match=r"pip install 'mpt-trainer\[fid\]'"):
        InceptionDistance(str(path), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_EXTRA, reason="torch-fidelity is not installed")
def test_the_distance_is_torch_fidelity_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric

    path = tmp_path / WEIGHTS_NAME
    save_random_inception(path, monkeypatch)
    numbers = torch.Generator().manual_seed(0)
    real, fake = (
        torch.rand(12, 3, 40, 40, generator=numbers),
        torch.rand(12, 1, 40, 40, generator=numbers),
    )
    distance = InceptionDistance(str(path), torch.device("cpu"))
    for first, second in zip(real.split(5), fake.split(5), strict=True):
        distance.update(first, real=True)
        distance.update(second, real=False)
    theirs = FeatureExtractorInceptionV3(
        "reference", ["2048"], feature_extractor_weights_path=str(path)
    ).eval()
    pixels = [(image.expand(-1, 3, -1, -1) * 255).round().byte() for image in (real, fake)]
    with torch.no_grad():
        statistics = [fid_features_to_statistics(theirs(one)[0]) for one in pixels]
    wanted = fid_statistics_to_metric(*statistics, False)["frechet_inception_distance"]
    assert distance.compute() == pytest.approx(wanted, rel=1e-4)
    # with an alpha channel
    distance.update(torch.rand(2, 4, 16, 16, generator=numbers), real=False)


@pytest.mark.skipif(not HAS_EXTRA, reason="torch-fidelity is not installed")
@pytest.mark.parametrize("size", [40, 320])
def test_features_are_those_of_torch_fidelity(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchmetrics resizes with antialiasing by default; FID is defined by TensorFlow 1's resize, without it."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    path = tmp_path / WEIGHTS_NAME
    save_random_inception(path, monkeypatch)
    image = torch.randint(
        0, 256, (2, 3, size, size), generator=torch.Generator().manual_seed(0)
    ).byte()
    theirs = FeatureExtractorInceptionV3(
        "reference", ["2048"], feature_extractor_weights_path=str(path)
    ).eval()
    with torch.no_grad():
        expected = theirs(image)[0]
    found = InceptionDistance(str(path), torch.device("cpu")).features(image / 255)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def save_random_inception(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a state dict in the form of the published file, of random weights: torch-fidelity's network wants a file."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    path.touch()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *_, **__: {})
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        torch.manual_seed(0)
        network = FeatureExtractorInceptionV3(
            "random", ["2048"], feature_extractor_weights_path=str(path)
        )
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight)
    torch.save(network.state_dict(), path)
