import pytest
import torch

from mpt.systems.deepfacelab.data.procedural_faces import (
    DESTINATION,
    SOURCE,
    Settings,
    build,
    draw_expressions,
    render,
)


def psnr(first, second):
    return -10 * torch.log10((first - second).square().mean(dim=(1, 2, 3))).mean().item()


def test_the_true_swap_is_the_other_person_with_the_same_expression_and_background():
    batch = build(Settings(image_size=64), "test", 0).fetch(range(8), 0)
    expressions = draw_expressions(32, 12)[range(8)]
    assert torch.equal(batch["dst_target"], render(DESTINATION, expressions, 64).image)
    assert torch.equal(batch["swap_target"], render(SOURCE, expressions, 64).image)
    outside = (batch["swap_mask"] == 0) & (batch["dst_mask"] == 0)
    outside = outside.expand(-1, 3, -1, -1)
    assert torch.equal(batch["swap_target"][outside], batch["dst_target"][outside])


def test_the_floors_that_a_swap_must_beat():
    batch = build(Settings(image_size=64), "test", 0).fetch(range(32), 0)
    copying = psnr(
        batch["dst_target"] * batch["swap_mask"], batch["swap_target"] * batch["swap_mask"]
    )
    mean = batch["src_target"].mean(dim=0, keepdim=True)
    assert copying == pytest.approx(17.7, abs=0.2)
    assert psnr(mean * batch["src_mask"], batch["src_target"] * batch["src_mask"]) == pytest.approx(
        25.3, abs=0.2
    )


def test_training_samples_depend_on_seed_epoch_and_index_alone():
    settings = Settings(image_size=64, count=10)
    first, again, other = (
        build(settings, "train", 3),
        build(settings, "train", 3),
        build(settings, "train", 4),
    )
    batch = first.fetch([2, 5, 7], 1)
    alone = again.fetch([5], 1)
    assert all(torch.equal(batch[name][1], alone[name][0]) for name in batch)
    assert not torch.equal(first.fetch([5], 2)["src_warped"], alone["src_warped"])
    assert not torch.equal(other.fetch([5], 1)["src_warped"], alone["src_warped"])


def test_people_do_not_share_their_warp():
    batch = build(Settings(image_size=64, random_transform=False), "train", 0).fetch([0], 0)
    moved = [
        (batch[f"{side}_warped"] - batch[f"{side}_target"]).abs().sum(dim=1) > 0.05
        for side in ("src", "dst")
    ]
    assert moved[0].any()
    assert not torch.equal(*moved)


def test_the_destination_partner_changes_with_the_epoch():
    data = build(Settings(image_size=64, count=50), "train", 0)
    partners = {
        epoch: [data.partner(index, epoch, "dst") for index in range(50)] for epoch in range(3)
    }
    assert all(sorted(chosen) == list(range(50)) for chosen in partners.values())
    assert partners[0] != partners[1] or partners[1] != partners[2]


def test_the_layout_is_the_declared_one():
    for split in ("train", "test"):
        data = build(Settings(image_size=64, count=4, test_count=3), split, 0)
        batch = data.fetch([0, 1], 0)
        assert {name: (tuple(value.shape[1:]), value.dtype) for name, value in batch.items()} == {
            name: (field.shape, field.dtype) for name, field in data.spec.fields.items()
        }
        assert all(value.min() >= 0 and value.max() <= 1 for value in batch.values())
    assert len(build(Settings(count=4), "train", 0)) == 4


def test_large_sets_are_drawn_when_asked_for():
    data = build(Settings(image_size=512, count=400), "train", 0)
    assert data.fetch([399], 0)["src_warped"].shape == (1, 3, 512, 512)
    assert "all_faces" not in vars(data.identities["src"])
