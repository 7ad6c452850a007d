"""Triplets by formula, from the published layouts, and from a user's own frames and videos."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from mpt.errors import ConfigError, DataError
from mpt.systems.dain.data import frame_triplets, procedural_triplets
from mpt.systems.dain.data.shared.triplets import Triplets
from mpt.systems.dain.nn.operators.projection import project_flow
from mpt.systems.dain.nn.operators.warping import warp

DRAWN = {"count": 6, "test_count": 4, "image_size": 48, "times": [0.25, 0.75]}


def write(path: Path, level: int, size: tuple[int, int] = (40, 24)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (level,) * 3).save(path)


def level(image: Tensor) -> float:
    return float(image.float().mean())


def open_set(root: Path, split: str = "train", **changes: object) -> Triplets:
    return frame_triplets.build(frame_triplets.Settings(root=str(root), **changes), split, 0)  # type: ignore[arg-type]


def test_drawn_samples_depend_on_seed_epoch_and_index_alone():
    data = procedural_triplets.build(procedural_triplets.Settings(**DRAWN), "train", 5)
    one, other = data.fetch([0, 3, 1], 2), data.fetch([3], 2)
    assert all(torch.equal(one[name][1:2], other[name]) for name in other)
    times = {float(data.fetch([0], epoch)["time"]) for epoch in range(8)}
    assert times == {0.25, 0.75}
    assert all(spec.shape == one[name].shape[1:] for name, spec in data.spec.fields.items())
    assert all(spec.dtype == one[name].dtype for name, spec in data.spec.fields.items())


@pytest.mark.parametrize("epoch", range(4))
def test_flows_stay_true_when_samples_are_flipped_and_played_backwards(epoch):
    settings = procedural_triplets.Settings(**{**DRAWN, "shapes": 0, "max_motion": 5.0})
    batch = procedural_triplets.build(settings, "train", 1).fetch(list(range(6)), epoch)
    first, last = batch["first"].float(), batch["last"].float()
    for here, there, flow in (
        (first, last, batch["flow"][:, :2]),
        (last, first, batch["flow"][:, 2:]),
    ):
        inner = (..., slice(6, -6), slice(6, -6))
        assert (warp(there, flow, masked=False) - here)[inner].abs().mean() < 2
    assert (first - last).abs().mean() > 5


@pytest.mark.parametrize("epoch", range(4))
def test_the_order_of_surfaces_turns_with_the_flows(epoch):
    settings = procedural_triplets.Settings(**{**DRAWN, "depth_order": True})
    data = procedural_triplets.build(settings, "train", 1)
    batch = data.fetch(list(range(6)), epoch)
    assert batch["order"].shape[1:] == data.spec.fields["order"].shape
    assert set(batch["order"].unique().tolist()) == {0, 1, 2}
    for flow, order in zip(batch["flow"], batch["order"], strict=True):
        for surface in order.unique():
            there, back = flow[:2, order[0] == surface], -flow[2:, order[1] == surface]
            motions = torch.cat((there, back), dim=1)
            assert torch.equal(motions, motions[:, :1].expand_as(motions))


def test_projected_by_the_true_order_the_nearer_surface_keeps_its_flow():
    scene = procedural_triplets.draw_scene(8, 48, 1, 7.0, 3)
    first, middle = (procedural_triplets.render(scene, 48, time) for time in (0.0, 0.5))
    wrong = []
    for weight in (torch.exp(12.0 * first.surface[:, None]), torch.ones(8, 1, 48, 48)):
        found = -2 * project_flow(0.5 * first.motion, weight)
        off = (found - middle.motion).abs().amax(1) > 0.1
        wrong.append(float(off[middle.surface == 1].float().mean()))
    assert wrong[0] < 0.02 < 0.1 < wrong[1]


def vimeo(root: Path, frames: int, prefix: str) -> Path:
    for split, names in (("train", ["00001/0001", "00001/0002"]), ("test", ["00002/0001"])):
        root.mkdir(exist_ok=True)
        (root / f"{prefix}_{split}list.txt").write_text("\n".join(names) + "\n\n")
        for name in names:
            for number in range(1, frames + 1):
                write(root / "sequences" / name / f"im{number}.png", 10 * number)
    return root


def test_vimeo_triplets_are_read_whole_and_both_lists_to_their_last_line(tmp_path):
    root = vimeo(tmp_path / "vimeo_triplet", 3, "tri")
    assert (len(open_set(root)), len(open_set(root, "test"))) == (2, 1)
    batch = open_set(root, "test").fetch([0], 0)
    assert [level(batch[name]) for name in ("first", "middle", "last")] == [10, 20, 30]
    assert batch["time"].tolist() == [0.5]
    cut = open_set(root, crop=[16, 32]).fetch([0, 1], 0)
    assert cut["first"].shape == (2, 3, 16, 32)
    assert cut["first"].dtype == torch.uint8
    with pytest.raises(ConfigError, match="larger than the frames"):
        open_set(root, crop=[64, 32])


def test_septuplets_give_every_time_between_in_training_and_the_middle_in_testing(tmp_path):
    root = vimeo(tmp_path / "vimeo_septuplet", 7, "sep")
    assert open_set(root, "test").fetch([0], 0)["time"].tolist() == [0.5]
    found = set()
    for epoch in range(40):
        batch = open_set(root, temporal_swap=False).fetch([0], epoch)
        time = float(batch["time"])
        assert level(batch["middle"]) == pytest.approx(10 + 60 * time)
        found.add(round(6 * time))
    assert found == {1, 2, 3, 4, 5}


def test_middlebury_sequences_of_several_sizes_share_a_batch_and_give_their_names(tmp_path):
    for name, size in (("Beanbags", (40, 24)), ("Walking", (32, 30))):
        write(tmp_path / "mb/other-data" / name / "frame10.png", 10, size)
        write(tmp_path / "mb/other-data" / name / "frame11.png", 30, size)
        write(tmp_path / "mb/other-gt-interp" / name / "frame10i11.png", 20, size)
    train = open_set(vimeo(tmp_path / "vimeo_triplet", 3, "tri"), test_root=str(tmp_path / "mb"))
    assert train.spec.extra["test_names"] == ["Beanbags", "Walking"]
    batch = open_set(tmp_path / "vimeo_triplet", "test", test_root=str(tmp_path / "mb")).fetch(
        [0, 1], 0
    )
    assert batch["first"].shape == (2, 3, 30, 40)
    assert batch["size"].tolist() == [[24, 40], [30, 32]]
    with pytest.raises(ConfigError, match="is for testing"):
        open_set(tmp_path / "mb")


def test_ucf101_is_in_the_order_of_its_numbers(tmp_path):
    for number in ("10", "2", "1"):
        for name, value in (
            ("frame_00.png", 10),
            ("frame_01_gt.png", int(number)),
            ("frame_02.png", 30),
        ):
            write(tmp_path / number / name, value)
    batch = open_set(tmp_path, "test").fetch([0, 1, 2], 0)
    assert batch["middle"][:, 0, 0, 0].tolist() == [1, 2, 10]


def test_own_frames_become_triplets_but_not_across_a_cut(tmp_path):
    torch.manual_seed(0)
    scenes = torch.randint(256, (2, 24, 40, 3), dtype=torch.uint8)
    for number in range(8):
        Image.fromarray(scenes[number // 4].numpy()).save(tmp_path / f"f{number:02d}.png")
    whole = [len(open_set(tmp_path, split, scene_cut=0)) for split in ("train", "test")]
    assert sum(whole) == 6
    assert sum(len(open_set(tmp_path, split)) for split in ("train", "test")) == 4
    (tmp_path / "f05.png").unlink()
    with pytest.raises(DataError, match=r"from f04\.png to f06\.png"):
        open_set(tmp_path)


def test_a_video_becomes_triplets(tmp_path):
    pytest.importorskip("av")
    from mpt.data.video.video_writer import VideoWriter

    with VideoWriter(tmp_path / "clip.mp4", 10) as writer:
        for number in range(8):
            writer.write(torch.full((3, 32, 48), 20 * number, dtype=torch.uint8))
    sets = [open_set(tmp_path / "clip.mp4", split, scene_cut=0) for split in ("train", "test")]
    assert [len(data) for data in sets] == [5, 1]
    batch = sets[1].fetch([0], 0)
    assert [round(level(batch[name]) / 20) for name in ("first", "middle", "last")] == [5, 6, 7]


def test_bad_sets_are_named(tmp_path):
    root = vimeo(tmp_path / "v", 3, "tri")
    (root / "tri_trainlist.txt").write_text("../outside\n")
    with pytest.raises(DataError, match="leads out of the data set"):
        open_set(root)
    (root / "tri_trainlist.txt").write_text("00001/0009\n")
    with pytest.raises(DataError, match=r"0009.im1\.png: missing"):
        open_set(root)
    (root / "tri_trainlist.txt").write_text("00001/0001\n")
    write(root / "sequences/00001/0001/im3.png", 5, (10, 10))
    with pytest.raises(DataError, match="different sizes"):
        open_set(root).fetch([0], 0)
    with pytest.raises(DataError, match="there is no folder or video"):
        open_set(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"dataset\.image_size"):
        open_set(root, image_size=64)


def test_a_plan_needs_no_frames(tmp_path):
    settings = frame_triplets.Settings(root="/nowhere", layout="vimeo_triplet")
    spec = frame_triplets.assume(settings)
    assert spec is not None
    assert spec.size == 51_312
    assert spec.fields["first"].shape == (3, 256, 448)
    cropped = frame_triplets.assume(frame_triplets.Settings(root="/nowhere", crop=[64, 96]))
    assert cropped is not None
    data = open_set(vimeo(tmp_path, 3, "tri"), crop=[16, 24])
    same = frame_triplets.assume(frame_triplets.Settings(root="/nowhere", crop=[16, 24]))
    assert same is not None
    assert data.spec.fields == same.fields
    assert frame_triplets.assume(frame_triplets.Settings(root="/nowhere")) is None
