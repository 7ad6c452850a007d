"""Cached latents: what is read is what was written, and files that do not fit are one line."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mpt.errors import DataError
from mpt.systems.diffusion.data.latents import Latents, Settings, assume, build
from tests.systems.diffusion.latent_files import write_latents

pytestmark = pytest.mark.tier("fast")


def tensors(count: int = 5) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return {
        "latent": torch.randn(count, 4, 2, 2, generator=numbers).bfloat16(),
        "text": torch.randn(count, 3, 6, generator=numbers),
        "label": torch.arange(count) % 2,
    }


def test_samples_come_in_the_order_that_is_asked_for_as_float32(tmp_path: Path) -> None:
    written = tensors()
    write_latents(tmp_path / "train.safetensors", written, ("a", "b"))
    data = build(Settings(root=str(tmp_path)), "train", 0)
    batch = data.fetch([3, 0, 3], 0)
    for name, value in written.items():
        assert torch.equal(batch[name], value[[3, 0, 3]].to(batch[name].dtype))
        assert data.spec.fields[name].dtype == batch[name].dtype
    assert batch["latent"].dtype == torch.float32
    assert data.spec.classes == ("a", "b")
    assert data.spec.extra["class_counts"] == [3, 2]
    assert data.spec.extra["made_by"] == "test"


def test_a_data_set_goes_to_a_worker_without_its_open_file(tmp_path: Path) -> None:
    write_latents(tmp_path / "train.safetensors", tensors(), ())
    data = build(Settings(root=str(tmp_path)), "train", 0)
    data.fetch([0], 0)
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(again.fetch([1], 0)["latent"], data.fetch([1], 0)["latent"])


def sized() -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return {
        "latent_4x2": torch.randn(2, 4, 4, 2, generator=numbers),
        "latent_2x2": torch.randn(3, 4, 2, 2, generator=numbers),
        "mask_4x2": torch.zeros(2, 1, 4, 2),
        "mask_2x2": torch.ones(3, 1, 2, 2),
        "text": torch.randn(5, 3, 6, generator=numbers),
        "weight": torch.tensor([1.0, 0.5, 1, 1, 1]),
    }


def test_sizes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """As text, 16x4 is before 4x8, and the captions would be of other pictures."""
    tensors = {
        "latent_16x4": torch.ones(1, 4, 16, 4),
        "latent_4x8": torch.zeros(2, 4, 4, 8),
        "weight": torch.arange(3.0),
    }
    write_latents(tmp_path / "train.safetensors", tensors, ())
    data = build(Settings(root=str(tmp_path)), "train", 0)
    assert [float(data.fetch([n], 0)["latent"].mean()) for n in range(3)] == [0, 0, 1]


def test_samples_of_several_sizes_come_apart_and_a_plan_sees_the_largest(tmp_path: Path) -> None:
    written = sized()
    write_latents(tmp_path / "train.safetensors", written, ())
    data = build(Settings(root=str(tmp_path)), "train", 0)
    assert data.groups() == [0, 0, 0, 1, 1]
    assert data.spec.fields["latent"].shape == (4, 4, 2)
    assert torch.equal(data.fetch([2, 0], 0)["latent"], written["latent_2x2"][[2, 0]])
    assert torch.equal(data.fetch([4], 0)["latent"], written["latent_4x2"][[1]])
    assert torch.equal(data.fetch([4], 0)["mask"], written["mask_4x2"][[1]])
    assert torch.equal(data.fetch([4, 3], 0)["text"], written["text"][[4, 3]])
    mixed = data.fetch([0, 3], 0)["latent"]
    assert torch.equal(
        mixed, torch.cat([written["latent_2x2"][:1], written["latent_4x2"][:1, :, :2]])
    )


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"text": torch.zeros(2, 3, 4)}, "expected is a tensor 'latent'"),
        ({"latent": torch.zeros(2, 4, 8)}, "latent in .* has the shape"),
        (
            {"latent": torch.zeros(2, 4, 8, 8), "latent_8x8": torch.zeros(2, 4, 8, 8)},
            "expected is a tensor 'latent'",
        ),
        ({**sized(), "mask_2x2": torch.ones(3, 1, 1, 1)}, r"has latent_2x2 of .* and mask_2x2 of"),
        ({"latent_2x2": torch.ones(3, 1, 2, 2), "mask_1x1": torch.ones(3, 1, 1, 1)}, "and no mask"),
        (
            {"latent": torch.zeros(2, 4, 8, 8), "pooled": torch.zeros(3, 4)},
            "has 2 latents, and 3 of pooled",
        ),
    ],
)
def test_files_that_do_not_fit_are_one_line(
    held: dict[str, Tensor], said: str, tmp_path: Path
) -> None:
    save_file(held, tmp_path / "train.safetensors")
    with pytest.raises(DataError, match=said):
        Latents(tmp_path / "train.safetensors")


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_file_that_is_missing_or_cut_short_is_one_line(share: float, tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    with pytest.raises(DataError, match="there is no"):
        Latents(path)
    write_latents(path, tensors(), ())
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(DataError, match="not a whole safetensors file"):
        Latents(path)


def test_a_plan_needs_the_shapes_alone() -> None:
    assert assume(Settings()) is None
    spec = assume(Settings(assumed={"latent": [4, 8, 8], "text": [7, 3]}))
    assert spec is not None
    assert {name: field.shape for name, field in spec.fields.items()} == {
        "latent": (4, 8, 8),
        "text": (7, 3),
    }
