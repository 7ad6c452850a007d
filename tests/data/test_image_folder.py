import io
import os
import warnings

import numpy
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from mpt.data import image_folder
from mpt.data.loading.loader import Loader, to_device
from mpt.data.pictures import augment, decoding
from mpt.data.pictures.augment import preserved_generator
from mpt.errors import ConfigError, DataError
from mpt.vision_ops import import_torchvision

pytestmark = pytest.mark.tier("fast")


def write_image(path, level=128, size=(12, 10), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(numpy.full((size[1], size[0]), level, dtype=numpy.uint8)).convert(mode).save(
        path
    )


def classes_folder(root, count=6):
    for number, name in enumerate(("cat", "dog")):
        for index in range(count):
            write_image(root / name / f"{index:02d}.png", 3 * index + number)
    return root


def build(root, split="train", seed=0, **settings):
    settings = {"image_size": 8, **settings}
    return image_folder.build(image_folder.Settings(root=str(root), **settings), split, seed)


def test_classes_files_and_order_are_those_of_torchvisions_image_folder(tmp_path):
    classes_folder(tmp_path / "train")
    write_image(tmp_path / "train" / "dog" / "deeper" / "x.JPG")
    (tmp_path / "train" / "dog" / "notes.txt").write_text("no image")
    write_image(tmp_path / "val" / "cat" / "a.bmp")
    ours, theirs = (
        build(tmp_path),
        import_torchvision("datasets").ImageFolder(str(tmp_path / "train")),
    )
    assert list(ours.spec.classes) == theirs.classes
    assert [
        (str(path), label) for path, label in zip(ours.paths, ours.labels, strict=True)
    ] == theirs.samples
    assert [path.name for path in build(tmp_path, "test").paths] == ["a.bmp"]


def test_images_are_cut_square_resized_and_scaled(tmp_path):
    picture = numpy.zeros((10, 30, 3), dtype=numpy.uint8)
    picture[:, 10:20] = 255  # a white square in the middle of a black strip
    (tmp_path / "train" / "x").mkdir(parents=True)
    Image.fromarray(picture).save(tmp_path / "train" / "x" / "a.png")
    write_image(tmp_path / "test" / "x" / "a.png")
    data = build(tmp_path, image_size=5)
    assert data.fetch([0], 0)["image"].dtype == torch.uint8 == data.spec.fields["image"].dtype
    batch = to_device(data.fetch([0], 0), "cpu", data.spec)
    assert batch["image"].shape == (1, 3, 5, 5)
    assert torch.equal(batch["image"][..., 1:4], torch.ones(1, 3, 5, 3))
    assert batch["image"].min() > 0.8  # the filter reaches a little over the cut
    assert batch["label"].tolist() == [0]


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "I;16", "LA", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_every_mode_of_file_becomes_the_wanted_channels(tmp_path, mode, channels):
    if mode == "I;16":
        picture = Image.fromarray(numpy.full((8, 8), 51 * 257, dtype=numpy.uint16))
    else:
        picture = Image.fromarray(numpy.full((8, 8), 51, dtype=numpy.uint8)).convert(mode)
    path = tmp_path / "a.tif"
    picture.save(path)
    image = decoding.decode_bytes(path, channels, None, 1000).float() / 255
    assert image.shape == (channels, 8, 8)
    if mode in ("L", "RGB", "I;16", "LA"):
        assert torch.allclose(image[0], torch.full((8, 8), 0.2))


def test_one_folder_is_split_by_name_and_new_files_move_no_old_one(tmp_path):
    classes_folder(tmp_path, count=40)
    before = {
        split: set(build(tmp_path, split, test_fraction=0.25).paths) for split in ("train", "test")
    }
    assert not before["train"] & before["test"]
    assert len(before["train"] | before["test"]) == 80
    assert 8 <= len(before["test"]) <= 32
    for index in range(40, 60):
        write_image(tmp_path / "cat" / f"{index}.png")
    for split in ("train", "test"):
        assert before[split] <= set(build(tmp_path, split, test_fraction=0.25).paths)


def test_a_flat_folder_has_no_labels(tmp_path):
    classes_folder(tmp_path)
    data = build(tmp_path, flat=True, test_fraction=0.3)
    assert set(data.fetch([0, 1], 0)) == {"image"} == set(data.spec.fields)
    assert data.spec.classes == ()


@pytest.mark.parametrize("damage", ["half", "empty", "text", "gone", "png bomb", "noise"])
def test_bad_files_are_named_or_skipped_and_counted(tmp_path, damage):
    numbers = numpy.random.default_rng(0)
    folder = tmp_path / "train" / "x"
    folder.mkdir(parents=True)
    for index in range(4):
        Image.fromarray(numbers.integers(0, 256, (64, 64, 3), dtype=numpy.uint8)).save(
            folder / f"{index}.jpg"
        )
    write_image(tmp_path / "test" / "x" / "a.png")
    stop, skip = build(tmp_path), build(tmp_path, on_bad_image="skip")
    bad = folder / "1.jpg"
    content = bad.read_bytes()
    bomb = io.BytesIO()
    Image.new("1", (13000, 13000)).save(bomb, "png")
    assert len(bomb.getvalue()) < 40_000
    replacement = {
        "half": content[: len(content) // 2],
        "empty": b"",
        "text": b"hello" * 100,
        "png bomb": bomb.getvalue(),
    }
    replacement["noise"] = content[:20] + numbers.bytes(len(content))
    if damage == "gone":
        bad.unlink()
    else:
        bad.write_bytes(replacement[damage])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DataError) as caught:
            stop.fetch([0, 1], 0)
        batch = skip.fetch([0, 1, 2], 0)
    assert str(bad) in str(caught.value)
    assert "on_bad_image=skip" in str(caught.value)
    assert caught.value.exit_code == 3
    assert torch.equal(batch["image"][1], batch["image"][2])  # the next good file stands in
    assert list(skip.bad_files) == [str(bad)]
    assert torch.equal(skip.fetch([1], 3)["image"], batch["image"][2:])
    if damage in ("empty", "text"):
        assert skip.bad_files[str(bad)].startswith("not an image of a known kind")
    if damage == "png bomb":
        assert "13000 x 13000 pixels" in skip.bad_files[str(bad)]


def test_a_bomb_is_refused_before_its_pixels_are_decoded(tmp_path, monkeypatch):
    Image.new("L", (200, 200)).save(tmp_path / "a.png")
    monkeypatch.setattr(decoding, "convert_mode", lambda *arguments: pytest.fail("decoded"))
    with pytest.raises(
        decoding.BadImageError, match=r"200 x 200 pixels are more than dataset\.max_pixels=39999"
    ):
        decoding.decode_bytes(tmp_path / "a.png", 3, (8, 8), 39_999)


def test_a_folder_of_bad_files_only_stops_even_when_skipping(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split / "x").mkdir(parents=True)
        (tmp_path / split / "x" / "a.png").write_bytes(b"no")
    with pytest.raises(DataError, match="are all bad"):
        build(tmp_path, on_bad_image="skip").fetch([0], 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_files_are_known_to_the_main_process_for_any_number_of_workers(tmp_path, workers):
    classes_folder(tmp_path / "train", count=4)
    write_image(tmp_path / "test" / "cat" / "a.png")
    (tmp_path / "train" / "cat" / "02.png").write_bytes(b"no image")
    data = build(tmp_path, on_bad_image="skip")
    images = torch.cat(
        [batch["image"] for batch in Loader(data, 3, 0, workers=workers).evaluation_batches()]
    )
    assert list(data.bad_files) == [str(tmp_path / "train" / "cat" / "02.png")]
    assert torch.equal(images[2], images[3])
    assert [index for index in range(len(data)) if data.is_left_out(index)] == [2]


def test_random_resized_crop_cuts_from_the_whole_picture(tmp_path):
    picture = numpy.zeros((10, 40, 3), dtype=numpy.uint8)
    picture[:, :5] = 255  # outside the centred square
    (tmp_path / "train" / "x").mkdir(parents=True)
    Image.fromarray(picture).save(tmp_path / "train" / "x" / "a.png")
    write_image(tmp_path / "test" / "x" / "a.png")
    crop = {"RandomResizedCrop": {"scale": [0.9, 1.0], "ratio": [3.0, 4.0]}}
    assert build(tmp_path, augment=[crop]).fetch([0], 0)["image"].max() > 0.5
    assert build(tmp_path, augment=["RandomHorizontalFlip"]).fetch([0], 0)["image"].max() == 0


def test_what_is_missing_or_empty_is_a_data_error_with_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"no folder .*nowhere.*dataset\.root"):
        build(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no class folders"):
        build(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="no images in it"):
        build(tmp_path)
    write_image(tmp_path / "cat" / "a.png")
    empty_split = "test" if len(build_or_none(tmp_path, "train") or ()) else "train"
    with pytest.raises(DataError, match=f"none of its 1 images falls to the {empty_split} split"):
        build(tmp_path, empty_split)
    with pytest.raises(ConfigError, match=r"dataset\.image_size is not set"):
        build(tmp_path, "train" if empty_split == "test" else "test", image_size=None)


@pytest.mark.parametrize("root", ["train", "."])
def test_a_class_without_images_is_refused_for_nothing_could_be_learnt_of_it(tmp_path, root):
    classes_folder(tmp_path / root)
    os.makedirs(tmp_path / root / "emu")
    (tmp_path / root / "emu" / "notes.txt").write_text("no image")
    with pytest.raises(DataError, match="emu: no images in this class"):
        build(tmp_path)
    assert not build(tmp_path, flat=True).spec.classes


def build_or_none(root, split):
    try:
        return build(root, split)
    except DataError:
        return None


def test_a_test_class_that_is_not_trained_is_refused(tmp_path):
    write_image(tmp_path / "train" / "cat" / "a.png")
    write_image(tmp_path / "test" / "cow" / "a.png")
    with pytest.raises(DataError, match="there is no class 'cow'"):
        build(tmp_path, "test")


def test_a_test_folder_with_fewer_classes_is_refused_or_numbered_as_in_training(tmp_path):
    for name in ("ant", "bee", "cat"):
        write_image(tmp_path / "train" / name / "a.png")
    write_image(tmp_path / "test" / "cat" / "a.png")
    os.makedirs(tmp_path / "test" / "bee")
    assert build(tmp_path, "test").labels == [2]


def test_links_that_lead_back_end_and_give_no_image_a_second_label(tmp_path):
    classes_folder(tmp_path / "train", count=4)
    write_image(tmp_path / "test" / "cat" / "a.png")
    before = build(tmp_path)
    cat = tmp_path / "train" / "cat"
    (cat / "loop").symlink_to("..")
    (cat / "here").symlink_to(".")
    (cat / "there").symlink_to(".")
    (cat / "dogs").symlink_to("../dog")
    data = build(tmp_path)
    assert (data.paths, data.labels) == (before.paths, before.labels)
    assert set(data.bad_files) == {str(cat / name) for name in ("loop", "here", "there", "dogs")}
    assert "which is listed already" in data.bad_files[str(cat / "loop")]


def test_a_link_to_a_folder_elsewhere_is_followed_once(tmp_path):
    classes_folder(tmp_path / "train", count=2)
    write_image(tmp_path / "test" / "cat" / "a.png")
    write_image(tmp_path / "elsewhere" / "more" / "x.png")
    (tmp_path / "train" / "cat" / "one").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "train" / "cat" / "two").symlink_to(tmp_path / "elsewhere")
    data = build(tmp_path)
    assert [
        path.relative_to(tmp_path / "train").as_posix()
        for path in data.paths
        if path.name == "x.png"
    ] == ["cat/one/more/x.png"]


def test_a_class_that_is_a_link_to_the_folder_itself_is_refused(tmp_path):
    classes_folder(tmp_path / "train", count=2)
    write_image(tmp_path / "test" / "cat" / "a.png")
    (tmp_path / "train" / "self").symlink_to(".")
    with pytest.raises(
        DataError, match=r"train/self: a link to .*train, which is a class already or holds them"
    ):
        build(tmp_path)


def test_a_pipe_among_the_images_does_not_hang(tmp_path):
    classes_folder(tmp_path / "train", count=2)
    write_image(tmp_path / "test" / "cat" / "a.png")
    os.mkfifo(tmp_path / "train" / "cat" / "pipe.png")
    data = build(tmp_path)
    assert str(tmp_path / "train" / "cat" / "pipe.png") not in map(str, data.paths)
    assert data.bad_files == {str(tmp_path / "train" / "cat" / "pipe.png"): "not a regular file"}
    with pytest.raises(decoding.BadImageError, match="not a regular file"):
        decoding.decode_bytes(tmp_path / "train" / "cat" / "pipe.png", 3, None, 1000)


def tiff(path, pixels):
    Image.fromarray(pixels).save(path)
    return decoding.decode_bytes(path, 1, None, 1000)


def test_float_pixels_from_0_to_1_keep_their_levels(tmp_path):
    ramp = numpy.linspace(0, 1, 256, dtype=numpy.float32).reshape(16, 16)
    found = tiff(tmp_path / "a.tif", ramp)
    assert torch.equal(found.flatten(), torch.arange(256, dtype=torch.uint8))


def test_integers_in_16_bits_keep_their_range_in_any_width(tmp_path):
    ramp = (numpy.arange(256) * 257).reshape(16, 16)
    for dtype in (numpy.uint16, numpy.int32):
        assert torch.equal(
            tiff(tmp_path / "a.tif", ramp.astype(dtype)).flatten(), torch.arange(256).byte()
        )


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (numpy.full((4, 4), 200.0, numpy.float32), "float pixels from 200 to 200"),
        (numpy.full((4, 4), -0.1, numpy.float32), "float pixels from -0.1 to -0.1"),
        (numpy.array([[0.5, numpy.nan]], numpy.float32), "float pixels from nan to nan"),
        (numpy.array([[0, 70000]], numpy.int32), "32-bit pixels from 0 to 70000"),
        (numpy.array([[-1, 5]], numpy.int32), "32-bit pixels from -1 to 5"),
    ],
)
def test_pixels_of_an_unclear_range_are_refused_by_name(tmp_path, pixels, message):
    with pytest.raises(decoding.BadImageError, match=message):
        tiff(tmp_path / "a.tif", pixels)


def photograph(path, size=(200, 150)):
    path.parent.mkdir(parents=True, exist_ok=True)
    smooth = torch.nn.functional.interpolate(
        torch.rand(1, 3, 6, 8), size=size[::-1], mode="bicubic"
    )[0].clamp(0, 1)
    Image.fromarray((smooth * 255).byte().permute(1, 2, 0).numpy()).save(path, quality=95)


@pytest.mark.parametrize("fit", ["crop", "letterbox", "stretch"])
def test_fast_decoding_reduces_large_jpegs_and_changes_pixels_by_little(tmp_path, monkeypatch, fit):
    path = tmp_path / "a.jpg"
    photograph(path)
    sizes = []
    whole = decoding.fitted
    monkeypatch.setattr(
        decoding,
        "fitted",
        lambda picture, *rest: sizes.append(picture.size) or whole(picture, *rest),
    )
    exact, fast = (
        decoding.decode_bytes(path, 3, (32, 32), 10**6, fit, reduces=one) for one in (False, True)
    )
    assert sizes == [(200, 150), (100, 75)]
    difference = (exact.float() - fast.float()).abs()
    assert 0 < float(difference.mean()) < 1
    assert float(difference.max()) <= 16
    # a letterbox wants fewer rows
    decoding.decode_bytes(path, 3, (48, 48), 10**6, fit, reduces=True)
    assert sizes[2:] == [(100, 75) if fit == "letterbox" else (200, 150)]


@pytest.mark.parametrize(
    "settings", [{}, {"subsampling": 0}, {"subsampling": 2, "progressive": True}, {"quality": 30}]
)
def test_simplejpeg_decodes_to_the_pixels_of_pillow(tmp_path, monkeypatch, settings):
    pytest.importorskip("simplejpeg")
    photograph(tmp_path / "a.jpg", size=(61, 43))
    with Image.open(tmp_path / "a.jpg") as picture:
        picture.effect_spread(3).save(tmp_path / "a.jpg", **settings)
    decode, decoded = decoding.jpeg_decoder(), []
    monkeypatch.setattr(
        decoding, "jpeg_decoder", lambda: lambda data: decoded.append(len(data)) or decode(data)
    )
    faster = decoding.decode_bytes(tmp_path / "a.jpg", 3, None, 10**6, reduces=True)
    assert decoded
    assert torch.equal(faster, decoding.decode_bytes(tmp_path / "a.jpg", 3, None, 10**6))


@pytest.mark.parametrize("is_there", [False, True])
def test_what_simplejpeg_cannot_read_is_read_or_refused_by_pillow(tmp_path, monkeypatch, is_there):
    if not is_there:
        monkeypatch.setattr(decoding, "jpeg_decoder", lambda: None)
    photograph(tmp_path / "a.jpg", size=(64, 48))
    whole = (tmp_path / "a.jpg").read_bytes()
    Image.open(tmp_path / "a.jpg").convert("CMYK").save(tmp_path / "cmyk.jpg")
    Image.open(tmp_path / "a.jpg").convert("L").save(tmp_path / "grey.jpg")
    (tmp_path / "odd.jpg").write_bytes(whole[:-2] + b"\0\0" + whole[-2:])
    for name in ("cmyk.jpg", "grey.jpg", "odd.jpg"):
        pair = [
            decoding.decode_bytes(tmp_path / name, 3, None, 10**6, reduces=one)
            for one in (False, True)
        ]
        assert torch.equal(*pair), name
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(decoding.BadImageError, match="cannot be decoded"):
        decoding.decode_bytes(tmp_path / "cut.jpg", 3, None, 10**6, reduces=True)


def test_fast_decoding_cuts_bytes_at_the_same_places(tmp_path):
    photograph(tmp_path / "train" / "x" / "a.jpg")
    write_image(tmp_path / "test" / "x" / "a.png")
    augment = ["RandomResizedCrop", "RandomHorizontalFlip"]
    exact, fast = (
        build(tmp_path, image_size=16, augment=augment, decoding=one) for one in ("exact", "fast")
    )
    for epoch in range(4):
        pair = [data.fetch([0], epoch)["image"] for data in (exact, fast)]
        assert pair[1].dtype == torch.float32
        assert 0 < float((pair[0] - pair[1]).abs().max()) <= 1.01 / 255


@pytest.mark.parametrize(
    ("arguments", "channels"),
    [
        ({}, 3),
        ({}, 1),
        ({"interpolation": "bicubic"}, 4),
        ({"antialias": False}, 3),
        ({"ratio": [2.5, 4.0]}, 1),
    ],
)
def test_exact_decoding_cuts_first_and_gives_the_bits_of_the_whole_picture(
    tmp_path, monkeypatch, arguments, channels
):
    photograph(tmp_path / "train" / "x" / "a.jpg")
    photograph(tmp_path / "train" / "x" / "b.png")
    write_image(tmp_path / "test" / "x" / "a.png")
    data = build(
        tmp_path,
        image_size=16,
        channels=channels,
        augment=[
            {"RandomResizedCrop": arguments},
            "RandomHorizontalFlip",
            {"RandomAffine": {"degrees": 20}},
        ],
    )
    wholes = [
        decoding.decode_bytes(path, channels, None, 10**6).float().div_(255) for path in data.paths
    ]
    converted: list[int] = []
    real = augment.as_floats
    monkeypatch.setattr(
        augment, "as_floats", lambda cut: converted.append(cut.numel()) or real(cut)
    )
    for epoch in range(20):
        found = data.fetch([0, 1], epoch)["image"]
        with preserved_generator():
            expected = [
                data.augmentation.apply(whole, epoch, index) for index, whole in enumerate(wholes)
            ]
        assert torch.equal(found, torch.stack(expected))
    assert len(converted) == 40
    assert sum(converted) < 40 * wholes[0].numel()


def test_a_stand_in_for_a_bad_file_has_its_own_label_and_the_first_one_stands_in_for_the_last(
    tmp_path,
):
    classes_folder(tmp_path / "train", count=2)
    write_image(tmp_path / "test" / "cat" / "a.png")
    for name in ("cat", "dog"):
        (tmp_path / "train" / name / "01.png").write_bytes(b"no image")
    data = build(tmp_path, on_bad_image="skip")
    batch = data.fetch([0, 1, 2, 3], 0)
    assert batch["label"].tolist() == [0, 1, 1, 0]
    assert torch.equal(batch["image"][[1, 3]], batch["image"][[2, 0]])


def test_a_bad_file_is_read_once(tmp_path, monkeypatch):
    classes_folder(tmp_path / "train", count=2)
    write_image(tmp_path / "test" / "cat" / "a.png")
    (tmp_path / "train" / "cat" / "01.png").write_bytes(b"no image")
    data, decode, read = build(tmp_path, on_bad_image="skip"), image_folder.decode_bytes, []
    monkeypatch.setattr(
        image_folder,
        "decode_bytes",
        lambda path, *a, **k: read.append(path) or decode(path, *a, **k),
    )
    for epoch in (0, 1):
        data.fetch([1], epoch)
    assert [f"{path.parent.name}/{path.name}" for path in read] == [
        "cat/01.png",
        "dog/00.png",
        "dog/00.png",
    ]


def test_files_of_one_name_in_two_classes_fall_to_either_side_by_themselves(tmp_path):
    classes_folder(tmp_path, count=40)
    held_out = {name: set() for name in ("cat", "dog")}
    for path in build(tmp_path, "test", test_fraction=0.25).paths:
        held_out[path.parent.name].add(path.name)
    assert held_out["cat"] != held_out["dog"]
    assert 10 <= sum(map(len, held_out.values())) <= 30  # of 80, a quarter


@pytest.mark.parametrize("size", [(333, 250), (250, 333), (256, 256)])
def test_testing_may_look_at_the_middle_share_alone_as_torchvision_resizes_and_cuts(tmp_path, size):
    for split in ("train", "val"):
        photograph(tmp_path / split / "x" / "a.png", size=size)
    train, test, whole = (
        build(tmp_path, split, image_size=224, test_share=share)
        for split, share in (("train", 0.875), ("test", 0.875), ("train", 1.0))
    )
    ours = test.fetch([0], 0)["image"][0].float()
    assert torch.equal(train.fetch([0], 0)["image"], whole.fetch([0], 0)["image"])
    transforms = import_torchvision("transforms.v2")
    picture = Image.open(tmp_path / "val" / "x" / "a.png")
    theirs = numpy.array(transforms.CenterCrop(224)(transforms.Resize(256)(picture)), numpy.float32)
    difference = (ours - torch.from_numpy(theirs).permute(2, 0, 1)).abs()
    assert float(difference.mean()) < 0.6  # theirs cuts at whole pixels
    assert float(difference.max()) < 6
    other = build(tmp_path, "test", image_size=224).fetch([0], 0)["image"][0].float()
    assert float((ours - other).abs().mean()) > 2
    with pytest.raises(ValidationError, match="belongs to fit: crop"):
        build(tmp_path, "test", image_size=224, test_share=0.875, fit="stretch")
