"""Pictures and captions encoded once: as the pipeline encodes them, kept while nothing changes, refused by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from mpt.errors import ConfigError, DataError
from mpt.systems.diffusion.commands import prepare, prior
from mpt.systems.diffusion.commands.shared.captions import find_pictures, split
from mpt.systems.diffusion.commands.shared.encoding import nearest_size
from mpt.systems.diffusion.data.latents import Latents
from tests.systems.diffusion.library import diffusers
from tests.systems.diffusion.pipelines import MAKERS, make_pictures, make_pipeline


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
        return image


def go(pipeline: Path, pictures: Path, output: Path, **changes: Any) -> dict[str, torch.Tensor]:
    settings = {"size": "16", "device": "cpu", **changes}
    prepare.run(prepare.Command(pipeline=pipeline, pictures=pictures, output=output, **settings))
    return load_file(output / "train.safetensors")


@pytest.mark.parametrize("kind", MAKERS)
def test_every_family_is_encoded_as_its_pipeline_encodes(kind: str, tmp_path: Path) -> None:
    folder = make_pipeline(kind, tmp_path / "pipeline")
    pictures = make_pictures(tmp_path / "pictures")
    size = "16x24"
    made = go(folder, pictures, tmp_path / "out", size=size)
    assert made["latent"].shape == (4, 4, 12, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = getattr(diffusers(), kind).from_pretrained(str(folder))
    held = split(find_pictures(pictures, None), 0.1, 2)[0]
    prompts = {
        "StableDiffusion3Pipeline": 3,
        "FluxPipeline": 2,
        "StableDiffusionXLPipeline": 2,
    }.get(kind, 1)
    captions = [[one.caption for one in held]] * prompts
    if kind == "StableDiffusionPipeline":
        expected = {"text": pipeline.encode_prompt(*captions, "cpu", 1, False)[0]}
    elif kind == "FluxPipeline":
        text, pooled, _ = pipeline.encode_prompt(*captions, device="cpu")
        expected = {"text": text, "pooled": pooled}
    else:
        text, _, pooled, _ = pipeline.encode_prompt(
            *captions, device="cpu", do_classifier_free_guidance=False
        )
        expected = {"text": text, "pooled": pooled}
    for name, value in expected.items():
        torch.testing.assert_close(made[name], value, rtol=1e-3, atol=1e-4)
    assert ("sizes" in made) == (kind == "StableDiffusionXLPipeline")
    if "sizes" in made:
        assert made["sizes"][0, :2].tolist() == [32.0, float(opened(held[0].path).width)]
        assert made["sizes"][0, 4:].tolist() == [24.0, 16.0]
    config = yaml.safe_load((tmp_path / "out" / "train.yaml").read_text())
    task = {"StableDiffusionPipeline": "epsilon", "StableDiffusionXLPipeline": "v"}.get(
        kind, "flow"
    )
    assert config["task"]["objective"] == task
    assert Path(config["model"]["weights"]).is_file()


def test_latents_are_within_the_noise_of_the_encoder(tmp_path: Path) -> None:
    folder = make_pipeline("FluxPipeline", tmp_path / "pipeline")
    pictures = make_pictures(tmp_path / "pictures")
    made = go(folder, pictures, tmp_path / "out")
    again = go(folder, pictures, tmp_path / "again", seed=1)
    first = split(find_pictures(pictures, None), 0.1, 2)[0][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = diffusers().FluxPipeline.from_pretrained(str(folder))
    red, green, blue = (number / 127.5 - 1 for number in opened(first.path).getpixel((0, 0)))
    pixels = torch.tensor([red, green, blue]).view(1, 3, 1, 1).expand(1, 3, 16, 16)
    with torch.no_grad():
        spread = pipeline.vae.encode(pixels).latent_dist
    for one in (made, again):
        apart = ((one["latent"][0] / 0.5 + 0.1) - spread.mean[0]) / spread.std[0]
        assert float(apart.abs().max()) < 6
        assert 0.5 < float(apart.std()) < 1.5
    assert not torch.equal(made["latent"], again["latent"])


def test_what_was_made_of_the_same_is_kept_and_anything_else_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_pipeline("StableDiffusionPipeline", tmp_path / "pipeline")
    pictures = make_pictures(tmp_path / "10_things")
    made = go(folder, pictures, tmp_path / "out")
    assert len(made["latent"]) == 40, "a folder's number is how often its pictures count"
    assert "wrote" in capsys.readouterr().out
    go(folder, pictures, tmp_path / "out")
    said = capsys.readouterr().out
    assert said.count("kept ") == 2
    assert "wrote" in said, "the configuration"
    for text in pictures.glob("*.txt"):
        text.write_text("something else")
    other = go(folder, pictures, tmp_path / "out")
    assert "kept" not in capsys.readouterr().out
    assert torch.equal(other["latent"], made["latent"])
    assert not torch.equal(other["text"], made["text"])
    with safe_open(tmp_path / "out" / "train.safetensors", "pt") as file:
        assert len(file.metadata()["made_by"]) == 64


def test_proportions_are_kept_masks_are_as_the_latents_and_the_class_counts_less(
    tmp_path: Path,
) -> None:
    folder = make_pipeline("StableDiffusionPipeline", tmp_path / "pipeline")
    pictures, masks = tmp_path / "pictures", tmp_path / "masks"
    prior = make_pictures(tmp_path / "class", 3)
    pictures.mkdir()
    masks.mkdir()
    for number, size in enumerate([(64, 32), (32, 64), (64, 64), (66, 32), (40, 30)]):
        Image.new("RGB", size, (90, 40 * number, 0)).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text("a")
        mask = Image.new("L", size, 0)
        mask.paste(255, (0, 0, size[0] // 2, size[1]))
        mask.save(masks / f"{number}.png")
    with pytest.raises(DataError, match=r"--masks: .* has no 0.png, the mask of"):
        go(folder, pictures, tmp_path / "out", masks=prior / "none")
    changes = {
        "buckets": 8,
        "masks": masks,
        "prior": prior,
        "prior_weight": 0.5,
        "test_fraction": 0.0,
    }
    with pytest.raises(
        ConfigError, match="--buckets: 9; sides of a StableDiffusionPipeline are multiples of 2"
    ):
        go(folder, pictures, tmp_path / "out", **{**changes, "buckets": 9})
    made = go(folder, pictures, tmp_path / "out", **changes)
    train = split(find_pictures(pictures, None), 0.0, 2)[0]
    data = Latents(tmp_path / "out" / "train.safetensors")
    assert len(data) == 2 * len(train) == len(made["text"]) == len(made["weight"])
    assert sorted(made["weight"].tolist()) == [0.5] * 3 + [1.0] * 3
    shapes = {
        name: tuple(value.shape[2:]) for name, value in made.items() if name.startswith("latent")
    }
    assert shapes == {
        name: tuple(map(int, name.removeprefix("latent_").split("x"))) for name in shapes
    }
    assert sum(len(made[name]) for name in shapes) == 6
    assert len(shapes) > 1
    batch = data.fetch(range(len(data)), 0)
    for index in range(len(data)):
        one = data.fetch([index], 0)
        half = one["mask"].shape[-1] // 2
        is_prior = float(one["weight"]) == 0.5
        assert float(one["mask"][..., half:].mean()) == pytest.approx(float(is_prior), abs=0.2), (
            "resized softly"
        )
        assert float(one["mask"][..., :half].mean()) == pytest.approx(1, abs=0.2)
    assert batch["latent"].shape[0] == 6


def test_pictures_of_the_class_are_made_once_each_with_its_own_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = (
        make_pipeline("StableDiffusionPipeline", tmp_path / "pipeline"),
        tmp_path / "class",
    )
    asked = {
        "pipeline": folder,
        "caption": "a dog",
        "output": out,
        "size": "16",
        "steps": 1,
        "device": "cpu",
    }
    prior.run(prior.Command(**asked, count=1))
    first = (out / "00000.png").read_bytes()
    prior.run(prior.Command(**asked, count=2))
    assert capsys.readouterr().out.endswith("1 pictures made, 1 were there\n")
    assert first == (out / "00000.png").read_bytes() != (out / "00001.png").read_bytes()
    (out / "00000.png").unlink()
    prior.run(prior.Command(**asked, count=2))
    assert first == (out / "00000.png").read_bytes()
    assert [one.caption for one in find_pictures(out, None)] == ["a dog"] * 2
    assert opened(out / "00001.png").size == (16, 16)
    with pytest.raises(ConfigError, match=r"--size: 15x15: .* divisible by"):
        prior.run(prior.Command(**{**asked, "size": "15"}, count=3))


@pytest.mark.parametrize(
    ("proportion", "size"),
    [
        (1.0, (512, 512)),
        (1.5, (640, 384)),
        (0.6, (384, 640)),
        (9.0, (1024, 256)),
        (1.26, (576, 448)),
    ],
)
def test_the_nearest_size_has_no_more_pixels(proportion: float, size: tuple[int, int]) -> None:
    assert nearest_size(proportion, 512, 512, 64) == size
    with pytest.raises(ConfigError, match="no size of multiples of 640"):
        nearest_size(1.0, 512, 512, 640)


def test_a_mask_lies_next_to_its_picture_as_one_trainer_has_it(tmp_path: Path) -> None:
    pictures = make_pictures(tmp_path / "pictures", 2)
    Image.new("L", (8, 8)).save(pictures / "1-masklabel.png")
    first, second = find_pictures(pictures, None)
    assert (first.mask, second.mask) == (None, pictures / "1-masklabel.png")


def test_bad_input_is_one_line_and_leaves_what_is_there(tmp_path: Path) -> None:
    folder = make_pipeline("StableDiffusionPipeline", tmp_path / "pipeline")
    pictures, out = make_pictures(tmp_path / "pictures"), tmp_path / "out"
    (pictures / "alone.txt").write_text("nothing to see")
    with pytest.raises(DataError, match=r"alone.txt is a caption without a picture"):
        go(folder, pictures, out)
    (pictures / "alone.txt").unlink()
    (pictures / "0.txt").unlink()
    with pytest.raises(DataError, match=r"0.png has no caption \(0.txt\).*--caption"):
        go(folder, pictures, out)
    assert len(go(folder, pictures, out, caption="a thing")["latent"]) == 4
    (pictures / "0.txt").write_text("a thing")
    (pictures / "3.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"3.png"):
        go(folder, pictures, out, caption="a thing")
    with pytest.raises(ConfigError, match="sides of a StableDiffusionPipeline are multiples of 2"):
        go(folder, pictures, out, size="15", caption="a thing")
    with pytest.raises(ConfigError, match="--size: found 'large'"):
        go(folder, pictures, out, size="large")
    with pytest.raises(DataError, match="there is no folder"):
        go(folder, tmp_path / "nowhere", out)
    (folder / "vae").rename(folder / "elsewhere")
    with pytest.raises(ConfigError, match="lacks vae, without which nothing can be encoded"):
        go(folder, pictures, out)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(
        json.dumps({**index, "_class_name": "PixArtAlphaPipeline"})
    )
    with pytest.raises(
        ConfigError, match="is a PixArtAlphaPipeline; known here are StableDiffusionPipeline"
    ):
        go(folder, pictures, out)
    with pytest.raises(ConfigError, match=r"model_index.json is missing"):
        go(tmp_path, pictures, out)
