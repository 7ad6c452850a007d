import math

import numpy as np
import pytest
import torch

from mpt.systems.deepfacelab.data.faces.face_warp import (
    NODES,
    NUMBERS,
    Warps,
    bend_map,
    draw_numbers,
    draw_warps,
    from_hsv,
    node_offsets,
    shift_hues,
    to_hsv,
    warp,
)
from mpt.systems.deepfacelab.data.faces.resampling import resize
from tests.systems.deepfacelab.pixels import arrays, facts


def still(count=1):
    affine = torch.tensor([[1.0, 0, 0], [0, 1, 0]]).expand(count, 2, 3)
    return Warps(affine, torch.zeros(count, 2, NODES, NODES), torch.zeros(count, dtype=torch.bool))


def test_numbers_depend_on_seed_stream_epoch_and_index_alone():
    batch = draw_numbers(1, 0, 2, [5, 6, 7])
    assert torch.equal(batch[1], draw_numbers(1, 0, 2, [6])[0])
    others = [
        draw_numbers(*key)[0]
        for key in ((2, 0, 2, [6]), (1, 1, 2, [6]), (1, 0, 3, [6]), (1, 0, 2, [8]))
    ]
    assert not any(torch.equal(batch[1], other) for other in others)


def test_no_motion_changes_nothing_but_the_bent_input_by_half_a_pixel():
    image, masks = torch.rand(2, 3, 16, 16), torch.rand(2, 2, 16, 16)
    bent, target, moved = warp(image, masks, still(2), bend=True)
    torch.testing.assert_close(target, image, atol=1e-5, rtol=0)
    torch.testing.assert_close(moved, masks, atol=1e-5, rtol=0)
    ramp = torch.arange(16.0).expand(1, 3, 16, 16) / 16
    bent = warp(ramp, masks[:1], still(), bend=True)[0]
    torch.testing.assert_close(
        bent[0, 0, 8, 4:12], ramp[0, 0, 8, 4:12] + 0.5 / 16, atol=1e-3, rtol=0
    )


def test_a_flip_mirrors_face_target_and_masks():
    image, masks = torch.rand(1, 3, 16, 16), torch.rand(1, 2, 16, 16)
    warps = Warps(still().affine, still().offsets, torch.tensor([True]))
    bent, target, moved = warp(image, masks, warps, bend=True)
    torch.testing.assert_close(
        bent, warp(image, masks, still(), bend=True)[0].flip(3), atol=1e-5, rtol=0
    )
    for found, given in ((target, image), (moved, masks)):
        torch.testing.assert_close(found, given.flip(3), atol=1e-5, rtol=0)


def test_the_affine_map_rotates_scales_and_shifts_about_the_centre():
    numbers = torch.zeros(1, NUMBERS, dtype=torch.float64)
    numbers[0, :4] = torch.tensor([1.0, 1.0, 0.75, 0.5])  # 10 degrees, 1.15, 2.5 % right
    affine = draw_warps(numbers, 101, transform=True, flip_chance=0).affine[0].double().numpy()
    assert math.hypot(affine[0, 0], affine[0, 1]) == pytest.approx(1 / 1.15, rel=1e-5)
    assert math.degrees(math.atan2(affine[1, 0], affine[0, 0])) == pytest.approx(10, rel=1e-4)
    # The picture's centre lands 2.5 % to the right: that output pixel reads the centre.
    read = affine @ np.array([50 + 0.025 * 101, 50, 1])
    np.testing.assert_allclose(read, [50, 50], atol=1e-3)


WARPS = sorted(
    key.removesuffix("_jitter1") for key in arrays("random_warp") if key.endswith("_jitter1")
)


def stored_warp(name):
    """DeepFaceLab's draws as ours."""
    stored = arrays("random_warp")
    size = int(name[1:].partition("_")[0])
    jitters = torch.from_numpy(
        np.stack((stored[f"{name}_jitter1"], stored[f"{name}_jitter2"]))
    ).float()[None]
    degrees, scale, right, down = stored[f"{name}_rotation_scale_tx_ty"]
    numbers = torch.zeros(1, NUMBERS, dtype=torch.float64)
    share = (scale - 1 / 1.15) / (1.15 - 1 / 1.15)
    numbers[0, :4] = torch.tensor(
        [(degrees / 10 + 1) / 2, share, (right / 0.05 + 1) / 2, (down / 0.05 + 1) / 2]
    )
    affine = draw_warps(numbers, size, transform=True, flip_chance=0).affine
    return size, Warps(affine, node_offsets(jitters), torch.tensor([bool(stored[f"{name}_flip"])]))


@pytest.mark.parametrize("name", WARPS)
def test_the_same_draws_give_deepfacelabs_maps(name):
    cv2 = pytest.importorskip("cv2")
    stored = arrays("random_warp")
    size, warps = stored_warp(name)
    found = bend_map(warps.offsets, size)[0].numpy()
    every = 1 if f"{name}_mapx" in stored else 4
    expected = stored[f"{name}_mapx" if every == 1 else f"{name}_mapx_every4"]
    np.testing.assert_allclose(found[0][::every, ::every], expected, atol=3e-5)
    np.testing.assert_allclose(found[1], found[0].T, atol=3e-5)
    np.testing.assert_allclose(
        warps.affine[0], cv2.invertAffineTransform(stored[f"{name}_rmat"]), atol=1e-5
    )


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in WARPS
        if f"{name.replace('_seed', '_pictures_seed')}_warped" in arrays("random_warp")
    ],
)
def test_the_same_draws_give_deepfacelabs_pictures(name):
    """OpenCV 4 knows 32 places within a pixel; the rest is a fraction of a grey level."""
    stored = arrays("random_warp")
    size, warps = stored_warp(name)
    image, hull, regions = (
        torch.from_numpy(stored[f"sample_{part}u8"].astype(np.float32) / 255)
        .reshape(160, 160, -1)
        .permute(2, 0, 1)
        for part in ("", "hull_mask_", "eyes_mouth_mask_")
    )
    image = resize(image, size, "bicubic")[None]
    masks = torch.cat([resize(mask, size, "bilinear") for mask in (hull, regions)])[None]
    bent, target, moved = warp(image, masks, warps, bend=True)
    key = name.replace("_seed", "_pictures_seed")
    found = {
        "warped": bent,
        "target": target,
        "mask": moved[:, :1],
        "eyes_mouth": moved[:, 1:] / moved[:, 1:].max(),
    }
    if f"{key}_warped_hsv10" in stored:  # hues turn before the picture is bent
        degrees, *others = stored[f"w{size}_hsv_draws_seed{name[-1]}"]
        shifts = torch.tensor([[(degrees + 18.5) / 37, *others]], dtype=torch.float64)
        turned = shift_hues(image.clamp(0, 1).flip(1), shifts, 0.1).flip(1)
        found["warped_hsv10"] = warp(image, masks, warps, bend=True, inputs_b3hw=turned)[0]
    for part, picture in found.items():
        expected = stored[f"{key}_{part}"].reshape(size, size, -1)
        difference = np.abs(picture[0].permute(1, 2, 0).numpy() - expected) * 255
        assert difference.mean() < 0.3, part
        assert difference.max() < 6, part


@pytest.mark.parametrize("size", [64, 128])
def test_inputs_are_bent_as_far_as_deepfacelab_bends_them(size):
    numbers = torch.from_numpy(np.random.default_rng(0).random((2000, NUMBERS)))
    offsets = draw_warps(numbers, size, transform=False, flip_chance=0).offsets
    line = torch.arange(size, dtype=torch.float32)
    moved = bend_map(offsets, size)[:, 0] - line
    assert moved.square().mean().sqrt() == pytest.approx(
        facts("random_warp")[f"statistics_w{size}"]["all"]["rms_dx"], rel=0.03
    )


def test_control_points_stay_within_their_share_of_a_cell_and_the_border_is_still():
    numbers = torch.from_numpy(np.random.default_rng(0).random((300, NUMBERS)))
    warps = draw_warps(numbers, 64, transform=False, flip_chance=0)
    offsets = warps.offsets
    assert (offsets[:, :, 0] == 0).all()
    assert (offsets[:, :, :, -1] == 0).all()
    cells = 2 ** (1 + (numbers[:, 5] * 3).long())
    reach = offsets.abs().amax(dim=(1, 2, 3)) * cells
    assert (reach <= 0.48 + 1e-5).all()
    assert reach.max() > 0.3
    assert set(cells.tolist()) == {2, 4, 8}
    assert torch.equal(warps.affine[0], torch.tensor([[1.0, 0, 0], [0, 1, 0]]))


def test_flips_come_at_their_chance():
    numbers = draw_numbers(0, 0, 0, range(2000))
    share = draw_warps(numbers, 8, transform=False, flip_chance=0.4).flipped.float().mean().item()
    assert share == pytest.approx(0.4, abs=0.03)


def test_a_bend_moves_the_input_and_leaves_the_target_and_a_control_point_reads_where_it_says():
    size = 64
    ramp = torch.arange(size).float().expand(1, 3, size, size) / size
    offsets = torch.zeros(1, 2, NODES, NODES)
    offsets[0, 0, 4, 4] = 0.05  # the middle node reads 5 % further right
    warps = Warps(still().affine, offsets, torch.tensor([False]))
    bent, target, _ = warp(ramp, torch.zeros(1, 2, size, size), warps, bend=True)
    torch.testing.assert_close(target, ramp, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        bent[0, 0, 32, 32], ramp[0, 0, 32, 32] + 0.05 + 0.5 / size, atol=8e-3, rtol=0
    )  # half a pixel further, and between nodes
    torch.testing.assert_close(
        bent[0, 0, 16, 32], ramp[0, 0, 16, 32] + 0.5 / size, atol=2e-3, rtol=0
    )


def test_beyond_the_border_images_repeat_and_masks_are_zero():
    affine = torch.tensor([[[1.0, 0, -8], [0, 1, 0]]])  # everything moves eight pixels right
    warps = Warps(affine, still().offsets, torch.tensor([False]))
    image, masks = torch.rand(1, 3, 16, 16), torch.ones(1, 2, 16, 16)
    _, target, moved = warp(image, masks, warps, bend=False)
    torch.testing.assert_close(
        target[..., :8], image[..., :1].expand(-1, -1, -1, 8), atol=1e-5, rtol=0
    )
    assert (moved[..., :7] == 0).all()
    assert (moved[..., 9:] == 1).all()


def test_hues_turn_as_opencvs_do():
    cv2 = pytest.importorskip("cv2")
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    hue, saturation, value = to_hsv(images)
    expected = cv2.cvtColor(images[0].permute(1, 2, 0).numpy(), cv2.COLOR_RGB2HSV)
    torch.testing.assert_close(
        torch.stack((hue, saturation, value))[:, 0], torch.from_numpy(expected).permute(2, 0, 1)
    )
    torch.testing.assert_close(from_hsv(hue, saturation, value), images)
    still = shift_hues(images, torch.full((2, 3), 0.5), 0.1)
    torch.testing.assert_close(still, images, atol=1e-5, rtol=0)
    assert (shift_hues(images, torch.rand(2, 3), 0.3) - images).abs().max() > 0.05


def test_fine_detail_survives_as_with_opencvs_cubic():
    """Waves of four pixels, moved by half a pixel: bilinear interpolation leaves .71 of them."""
    size = 64
    wave = (
        (0.5 + 0.4 * torch.sin(torch.arange(size) * 2 * torch.pi / 4))
        .expand(1, 3, size, size)
        .contiguous()
    )
    affine = torch.tensor([[[1.0, 0, 0.5], [0, 1.0, 0]]])
    warps = Warps(affine, torch.zeros(1, 2, NODES, NODES), torch.tensor([False]))
    target = warp(wave, torch.zeros(1, 2, size, size), warps, bend=False)[1]
    amplitude = (target[0, 0, 32, 8:56] - 0.5).square().mean().sqrt() / (
        wave[0, 0, 32, 8:56] - 0.5
    ).square().mean().sqrt()
    assert amplitude == pytest.approx(0.97, abs=0.01)
