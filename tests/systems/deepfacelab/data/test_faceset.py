import importlib.util
import io
import os
import pickle
import shutil
import struct
import warnings
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from mpt.errors import ConfigError, DataError
from mpt.systems.deepfacelab.data.faces import face_pairs
from mpt.systems.deepfacelab.data.faces.colour_transfer import match_covariance
from mpt.systems.deepfacelab.data.faces.face_files import describe, list_faces
from mpt.systems.deepfacelab.data.faces.face_masks import convex_hull
from mpt.systems.deepfacelab.data.faces.face_pairs import bin_yaws
from mpt.systems.deepfacelab.data.faces.opencv import opencv
from mpt.systems.deepfacelab.data.faceset import Settings, build

SPEC = importlib.util.spec_from_file_location(
    "face_makers", Path(__file__).with_name("face_makers.py")
)
make = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make)


def two_people(tmp_path, **options):
    return {
        "src": str(make.folder(tmp_path / "src", **options)),
        "dst": str(make.folder(tmp_path / "dst")),
    }


def fetch(settings, split="train", seed=0):
    data = build(settings, split, seed)
    return data, data.fetch(range(len(data)), 0)


def test_a_folder_of_aligned_faces_gives_pictures_and_masks_from_landmarks(tmp_path):
    data, batch = fetch(Settings(**two_people(tmp_path), image_size=32), "test")
    assert {name: tuple(value.shape[1:]) for name, value in batch.items()} == {
        name: field.shape for name, field in data.spec.fields.items()
    }
    mask, eyes_mouth = batch["src_mask"][0, 0], batch["src_eyes_mouth"][0, 0]
    assert mask[16, 16] == 1
    assert mask[0, 0] == mask[31, 31] == 0
    assert 0.3 < mask.mean() < 0.8
    assert eyes_mouth[23, 16] > 0.9  # the mouth
    assert eyes_mouth[13, 10] > 0.5  # an eye
    assert eyes_mouth[18, 16] < 0.2  # the nose
    assert torch.equal(batch["src_warped"], batch["src_target"])


def test_a_pak_holds_the_same_faces_as_its_folder(tmp_path):
    paths = two_people(tmp_path)
    _, expected = fetch(Settings(**paths, image_size=32), "test")
    files = sorted(Path(paths["src"]).iterdir())
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "faceset.pak").write_bytes(make.pak([file.read_bytes() for file in files]))
    for place in (packed, packed / "faceset.pak"):
        _, found = fetch(Settings(src=str(place), dst=paths["dst"], image_size=32), "test")
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_plain_images_take_their_masks_from_a_folder(tmp_path):
    place = tmp_path / "plain"
    (place / "masks").mkdir(parents=True)
    make.picture(1).save(place / "a.png")
    mask = np.zeros((64, 64), np.uint8)
    mask[:, :32] = 255
    Image.fromarray(mask).save(place / "masks" / "a.png")
    _, batch = fetch(Settings(src=str(place), dst=str(place), image_size=64), "test")
    assert torch.equal(batch["src_mask"][0, 0], torch.from_numpy(mask).float() / 255)
    assert batch["src_eyes_mouth"].sum() == 0


def test_a_plain_picture_is_turned_upright_as_its_mask_was_painted(tmp_path):
    pixels, mask = np.zeros((64, 64, 3), np.uint8), np.zeros((64, 64), np.uint8)
    pixels[:20] = (255, 0, 0)
    mask[:20] = 255
    (tmp_path / "masks").mkdir()
    Image.fromarray(mask).save(tmp_path / "masks" / "face.png")
    orientation = Image.Exif()
    orientation[274] = 6  # stored turned by a quarter to the left
    stored = Image.fromarray(pixels).transpose(Image.Transpose.ROTATE_90)
    stored.save(tmp_path / "face.jpg", exif=orientation.tobytes(), quality=95)
    red, _, _, masked, _ = list_faces(tmp_path, "src")[0].load(64)
    assert ((red > 0.5) == (masked > 0.5)).float().mean() > 0.98


def test_a_stored_mask_is_preferred_to_the_hull(tmp_path):
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(file, "PNG")
    place = make.folder(tmp_path / "src", metadata={"xseg_mask": file.getvalue()})
    _, batch = fetch(Settings(src=str(place), dst=str(place), image_size=32), "test")
    assert (batch["src_mask"] == 1).all()


def test_every_tenth_face_is_kept_for_testing_and_few_are_used_for_both(tmp_path):
    many, few = make.folder(tmp_path / "many", 20), make.folder(tmp_path / "few", 4)
    settings = Settings(src=str(many), dst=str(few), image_size=32)
    train, test = build(settings, "train", 0), build(settings, "test", 0)
    names = {
        split: {file.name for file in data.identities["src"].files}
        for split, data in (("train", train), ("test", test))
    }
    assert (len(names["train"]), len(names["test"])) == (18, 2)
    assert not names["train"] & names["test"]
    assert len(train.identities["dst"]) == len(test.identities["dst"]) == 4


def test_metadata_that_hold_code_are_refused_and_not_run(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'owned'}",)

    place = make.folder(tmp_path / "src", metadata=pickle.dumps(Hostile()))
    with pytest.raises(DataError, match=r"00000\.jpg: refused at byte"):
        list_faces(place, "src")
    (tmp_path / "faceset.pak").write_bytes(make.pak([make.jpg()], configs=Hostile()))
    with pytest.raises(DataError, match=r"faceset\.pak: refused at byte"):
        list_faces(tmp_path / "faceset.pak", "src")
    assert not (tmp_path / "owned").exists()


def test_mixed_face_types_are_refused_naming_one_of_each(tmp_path):
    paths = two_people(tmp_path, metadata={"face_type": "whole_face"})
    with pytest.raises(
        DataError,
        match=r"wf \(src: .*00000\.jpg\); f \(dst: .*\); set dataset.face_type to the smallest",
    ):
        build(Settings(**paths, image_size=32), "train", 0)


def test_images_without_metadata_are_counted_and_the_first_is_named(tmp_path):
    place = make.folder(tmp_path / "src", 2)
    (place / "zzz.jpg").write_bytes(make.jpg(metadata=False))
    with pytest.raises(DataError, match=r"1 of 3 images .*zzz\.jpg; extract them again"):
        list_faces(place, "src")


def test_an_empty_identity_is_named(tmp_path):
    paths = two_people(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"dataset\.dst: .*empty holds no faces"):
        build(Settings(**(paths | {"dst": str(tmp_path / "empty")}), image_size=32), "train", 0)
    with pytest.raises(DataError, match=r"dataset\.src: .*nowhere does not exist"):
        build(Settings(**(paths | {"src": str(tmp_path / "nowhere")}), image_size=32), "train", 0)


@pytest.mark.parametrize("length", [1, 40, 700, 0.7])
def test_truncated_jpgs_are_refused_by_name(tmp_path, length):
    place = make.folder(tmp_path / "src", 1)
    path = place / "00000.jpg"
    data = path.read_bytes()
    path.write_bytes(data[: int(length if length >= 1 else length * len(data))])
    with pytest.raises(DataError, match=r"00000\.jpg: .*(cut off|no JPG|cannot be decoded)"):
        list_faces(place, "src")[0].load(32)


@pytest.mark.parametrize("kept", [0, 10, 30, 60, 200, -100])
def test_truncated_paks_are_refused_by_name(tmp_path, kept):
    path = tmp_path / "faceset.pak"
    path.write_bytes(make.pak([make.jpg(0), make.jpg(1)])[:kept])
    with pytest.raises(DataError, match=r"faceset\.pak: .*(cut off|version|damaged)"):
        list_faces(path, "src")


def test_a_pak_that_promises_more_than_it_has_is_refused_without_allocating(tmp_path):
    path = tmp_path / "faceset.pak"
    path.write_bytes(struct.pack("<QQ", 1, 2**60) + b"x")
    with pytest.raises(DataError, match="cut off"):
        list_faces(path, "src")
    path.write_bytes(struct.pack("<QQ", 7, 1) + b"x")
    with pytest.raises(DataError, match="version 7"):
        list_faces(path, "src")


@pytest.mark.parametrize(
    "points",
    [None, [[1, 2]], [["a", "b"] for _ in range(68)], [[float("nan"), 0] for _ in range(68)]],
)
def test_landmarks_must_be_68_points(tmp_path, points):
    place = make.folder(tmp_path / "src", 1, metadata={"landmarks": points})
    with pytest.raises(DataError, match="no 68 landmarks"):
        list_faces(place, "src")


def test_an_image_bomb_is_refused_before_it_is_decoded(tmp_path):
    place = tmp_path / "src"
    (place / "masks").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Image.new("L", (13000, 13000)).save(place / "big.png")
    Image.new("L", (8, 8)).save(place / "masks" / "big.png")
    with pytest.raises(DataError, match=r"big\.png"):
        list_faces(place, "src")[0].load(32)


def test_settings_that_faces_cannot_honour_are_refused(tmp_path):
    paths = two_people(tmp_path)
    with pytest.raises(ConfigError, match="colour"):
        build(Settings(**paths, image_size=32, channels=1), "train", 0)
    with pytest.raises(ConfigError, match="random_warp"):
        build(Settings(**paths, image_size=32, augment=["RandomHorizontalFlip"]), "train", 0)
    with pytest.raises(ConfigError, match="image_size is missing"):
        build(Settings(**paths), "train", 0)


def test_the_hull_is_convex_and_holds_every_point():
    points = np.random.default_rng(0).integers(0, 1000, (50, 2))
    corners = np.array(convex_hull(points))
    edges = np.roll(corners, -1, axis=0) - corners
    for point in points:
        offset = point - corners
        assert (edges[:, 0] * offset[:, 1] - edges[:, 1] * offset[:, 0] >= -1e-12).all()
    assert {tuple(corner) for corner in corners} <= {tuple(point) for point in points}


def test_a_whole_face_is_cut_to_the_models_type(tmp_path):
    fixtures = Path(__file__).parents[1] / "fixtures"
    paths = {"src": str(fixtures / "wf_xseg.pak"), "dst": str(fixtures / "wf_polygons.pak")}
    data, batch = fetch(Settings(**paths, image_size=64, face_type="f", random_warp=False))
    assert data.spec.extra["masks"] == {"src": {"xseg": 6}, "dst": {"polygons": 2, "hull": 2}}
    whole = fetch(Settings(**paths, image_size=64))[1]
    assert batch["src_mask"].mean() > 1.3 * whole["src_mask"].mean()
    with pytest.raises(
        DataError, match="is of type wf, which shows less of the head than face_type head"
    ):
        build(Settings(**paths, image_size=64, face_type="head"), "train", 0)


def test_eyes_and_mouth_reach_one_in_every_sample(tmp_path):
    _, batch = fetch(Settings(**two_people(tmp_path), image_size=32))
    torch.testing.assert_close(batch["src_eyes_mouth"].amax(dim=(1, 2, 3)), torch.ones(3))


def test_the_sources_input_alone_changes_its_hue_and_the_source_takes_the_destinations_colours(
    tmp_path,
):
    paths = two_people(tmp_path)
    still = {"image_size": 32, "random_warp": False}
    plain, shifted = (
        fetch(Settings(**paths, **still, random_hsv_power=power))[1] for power in (0.0, 0.2)
    )
    assert not torch.equal(plain["src_warped"], shifted["src_warped"])
    for name in set(plain) - {"src_warped"}:
        assert torch.equal(plain[name], shifted[name]), name
    recoloured, again = (fetch(Settings(**paths, **still, ct_mode="sot"))[1] for _ in range(2))
    assert not torch.equal(plain["src_target"], recoloured["src_target"])
    # by draws of its own
    assert not torch.equal(recoloured["src_warped"], recoloured["src_target"])
    torch.testing.assert_close(
        recoloured["src_warped"], recoloured["src_target"], atol=0.05, rtol=0
    )
    same = fetch(Settings(**paths, **still, ct_mode="rct"))[1]
    torch.testing.assert_close(same["src_warped"], same["src_target"])
    assert torch.equal(plain["dst_target"], recoloured["dst_target"])
    assert torch.equal(recoloured["src_target"], again["src_target"])


def test_colours_are_taken_from_the_whole_picture_whatever_type_the_model_draws(tmp_path):
    fixtures = Path(__file__).parents[1] / "fixtures"
    src = str(fixtures / "wf_xseg.pak")
    dst = tmp_path / "dst"
    dst.mkdir()
    shutil.copy(fixtures / "wf_polygons.jpg", dst)
    still = {
        "random_warp": False,
        "random_transform": False,
        "random_dst_flip": False,
        "hold_out_every": 0,
    }
    _, batch = fetch(
        Settings(src=src, dst=str(dst), image_size=64, face_type="f", ct_mode="lct", **still)
    )
    whole = opencv().imread(str(dst / "wf_polygons.jpg")).astype(np.float32) / 255
    whole = opencv().resize(whole, (64, 64))  # linearly
    for index, file in enumerate(list_faces(Path(src), "src")):
        own = file.load(64, "f")[:3].flip(0).permute(1, 2, 0).numpy()  # overshoots at edges
        wanted = match_covariance(own, whole)
        drawn = batch["src_target"][index].flip(0).permute(1, 2, 0).numpy()
        assert np.abs(drawn - wanted).max() < 0.5 / 255


def test_all_turns_of_the_head_are_drawn_equally_often():
    bins = bin_yaws([0.0] * 90 + [0.5] * 9 + [-1.0])
    assert [len(faces) for faces in bins] == [1, 90, 9]


def test_faces_are_scaled_as_far_as_is_said(tmp_path):
    paths = two_people(tmp_path)
    for said, spread in ((0.0, 0.0), (0.05, 0.05), (0.15, 0.15)):
        settings = Settings(**paths, image_size=32, random_scale=said)
        with patch.object(face_pairs, "draw_warps", wraps=face_pairs.draw_warps) as drawn:
            fetch(settings)
        assert drawn.call_args.args[4].scale == 1 + spread


def test_pretraining_warps_nothing_and_flips(tmp_path):
    paths = two_people(tmp_path)
    data, batch = fetch(Settings(**paths, image_size=32, pretrain=True))
    assert data.spec.extra["pretrain"]
    assert torch.equal(batch["src_warped"], batch["src_target"])
    assert data.flips == {"src": 0.4, "dst": 0.4}
    assert set(data.bins) == {"src", "dst"}


def test_faces_are_held_out_only_where_that_is_asked_for(tmp_path):
    paths = {
        "src": str(make.folder(tmp_path / "src", 6)),
        "dst": str(make.folder(tmp_path / "dst", 6)),
    }
    counts = {
        every: [
            len(build(Settings(**paths, image_size=32, hold_out_every=every), split, 0))
            for split in ("train", "test")
        ]
        for every in (0, 3, 10)
    }
    assert counts == {0: [6, 6], 3: [4, 2], 10: [6, 6]}


@pytest.mark.parametrize("far", [1e8, 1e300, -1e9])
def test_a_landmark_or_polygon_far_outside_is_refused_in_one_line_and_at_once(tmp_path, far):
    points = make.landmarks(64)
    points[3, 0] = far
    for metadata in (
        {"landmarks": points.tolist()},
        {"seg_ie_polys": {"polys": [{"type": 1, "pts": [[0, 0], [far, 3], [5, 60]]}]}},
    ):
        path = tmp_path / "one.jpg"
        path.write_bytes(make.jpg(metadata=metadata))
        with pytest.raises(DataError, match=r"one\.jpg"):
            describe(path)
