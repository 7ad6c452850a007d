import pytest
import torch

from mpt.data import shapes

pytestmark = pytest.mark.tier("fast")


def test_pictures_depend_on_data_seed_and_split_alone():
    settings = shapes.Settings(size=30, image_size=24)
    one, other = shapes.build(settings, "train", 0), shapes.build(settings, "train", 7)
    assert torch.equal(one.images, other.images)
    assert not torch.equal(one.images[:8], shapes.build(settings, "test", 0).images[:8])
    moved = shapes.build(shapes.Settings(size=30, image_size=24, data_seed=1), "train", 0)
    assert not torch.equal(one.images, moved.images)


def test_every_kind_is_drawn_and_covers_about_its_own_area():
    images, labels = shapes.draw_shapes(300, 64, 0)
    assert images.shape == (300, 3, 64, 64)
    assert torch.bincount(labels, minlength=3).min() > 60
    half = torch.full((1, 14), 0.5)
    half[:, :6], half[:, 6:9] = 0.0, 1.0  # white on black, radius 0.225 in the middle
    areas = [
        shapes.render(torch.tensor([kind]), half, 256)[0, 0].mean().item() for kind in range(3)
    ]
    radius = 0.225
    height = 3 * 0.65 * radius  # an equilateral triangle is three of its inner radii high
    expected = [3.14159 * radius**2, (2 * 0.85 * radius) ** 2, height**2 / 3**0.5]
    assert all(abs(area - true) < 0.02 * true for area, true in zip(areas, expected, strict=True))


def test_size_counts_training_images_and_a_quarter_more_for_the_test():
    assert len(shapes.build(shapes.Settings(size=10, image_size=8), "train", 0)) == 10
    batch = shapes.build(shapes.Settings(size=10, image_size=8, channels=1), "test", 0).fetch(
        [2], 0
    )
    assert batch["image"].shape == (1, 1, 8, 8)
