"""Files of latents and text embeddings from pictures and captions, with a hash of all that made them."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mpt.config.text.yaml_text import write_text
from mpt.data.pictures.decoding import BadImageError, decode_bytes, upright_size
from mpt.engine.building.devices import choose_device
from mpt.errors import ConfigError, DataError
from mpt.run.process.files import failures_explained, write_atomically
from mpt.systems.diffusion.commands.shared.captions import (
    Captioned,
    find_pictures,
    split,
    with_prior,
)
from mpt.systems.diffusion.commands.shared.pipelines import (
    Pipeline,
    encoder_files,
    hash_of,
    open_pipeline,
)

MOST_PIXELS = 178_000_000
LEAST_TEST = 2
"""As many as the task needs to be evaluated."""


@dataclass(frozen=True)
class Wish:
    """The pictures to encode, and how."""

    pipeline: Path
    pictures: Path
    output: Path
    width: int
    height: int
    caption: str | None
    test_fraction: float
    seed: int
    device: str
    buckets: int | None = None
    masks: Path | None = None
    prior: Path | None = None
    prior_weight: float = 1.0
    text_encoders: bool = False
    """Captions stay tokens, and the text encoders are trained."""


def prepare(wish: Wish) -> None:
    """Write both splits and a configuration. Raises DataError and ConfigError for anything that cannot be encoded."""
    pictures = find_pictures(wish.pictures, wish.caption, wish.masks)
    train, test = split(pictures, wish.test_fraction, LEAST_TEST)
    if wish.prior is not None:
        train = with_prior(
            train, find_pictures(wish.prior, None, where="--prior"), wish.prior_weight
        )
    pipeline = open_pipeline(wish.pipeline, choose_device(wish.device))
    if wish.width % pipeline.side or wish.height % pipeline.side:
        raise ConfigError(
            f"--size: {wish.width}x{wish.height}; sides of a {pipeline.kind} are multiples of {pipeline.side}"
        )
    if wish.buckets is not None and wish.buckets % pipeline.side:
        raise ConfigError(
            f"--buckets: {wish.buckets}; sides of a {pipeline.kind} are multiples of {pipeline.side}"
        )
    output = wish.output.expanduser()
    with failures_explained(output):
        output.mkdir(parents=True, exist_ok=True)
    for name, pictures in (("train", train), ("test", test)):
        write_split(output / f"{name}.safetensors", pipeline, pictures, wish)
    config = output / "train.yaml"
    with failures_explained(config):
        write_atomically(config, configuration(wish, pipeline, output).encode())
    print(f"wrote {config}: train with `mpt train {config}`")


def write_split(path: Path, pipeline: Pipeline, pictures: Sequence[Captioned], wish: Wish) -> None:
    """Write one file, unless the present one was made of the same."""
    pictures = sorted(pictures, key=lambda one: size_for(one, wish)[::-1])
    made_by = made_of(pipeline, pictures, wish)
    if hash_in(path) == made_by:
        print(
            f"kept {path}: {len(pictures)} samples, made of the same pictures, captions and encoders"
        )
        return
    tensors = encode(pipeline, pictures, wish)
    if wish.buckets is not None:
        print(f"{path.name}: {sizes_in_words(pictures, wish)}")
    with failures_explained(path):
        write_atomically(path, save(tensors, {"classes": "[]", "made_by": made_by}))
    shapes = ", ".join(
        f"{key} {'x'.join(map(str, value.shape[1:]))}" for key, value in tensors.items()
    )
    print(f"wrote {path}: {len(pictures)} samples ({shapes})")


def made_of(pipeline: Pipeline, pictures: Sequence[Captioned], wish: Wish) -> str:
    """Return the hash of the encoders, the pictures, their captions and their preparation."""
    files = encoder_files(pipeline.folder, pipeline.kind)
    files |= {f"picture {number}": one.path for number, one in enumerate(pictures)}
    files |= {
        f"mask {number}": one.mask for number, one in enumerate(pictures) if one.mask is not None
    }
    captions, weights = [one.caption for one in pictures], [one.weight for one in pictures]
    settings = {"size": [wish.width, wish.height], "seed": wish.seed, "kind": pipeline.kind}
    more: dict[str, Any] = {"buckets": wish.buckets} if wish.buckets else {}
    more |= {"weights": weights} if set(weights) != {1.0} else {}
    more |= {"tokens": True} if wish.text_encoders else {}
    return hash_of(files, {"captions": captions, **settings, **more})


def hash_in(path: Path) -> str | None:
    """Return the hash that a file was written with; None for none."""
    try:
        with safe_open(path, framework="pt") as file:
            found: str | None = (file.metadata() or {}).get("made_by")
            return found
    except (OSError, SafetensorError):
        return None


def encode(pipeline: Pipeline, pictures: Sequence[Captioned], wish: Wish) -> dict[str, Tensor]:
    """Return the tensors of some pictures, each encoded once however often it counts: a latent's for each size."""
    known: dict[Path, dict[str, Tensor]] = {}
    has_masks = any(one.mask is not None for one in pictures)
    for one in pictures:
        if one.path not in known:
            known[one.path] = encode_one(pipeline, one, wish)
            if has_masks:
                known[one.path]["mask"] = mask_of(one, wish, known[one.path]["latent"].shape)
    samples = [known[one.path] for one in pictures]
    together: dict[str, list[Tensor]] = {}
    for sample in samples:
        end = "" if wish.buckets is None else "_{}x{}".format(*sample["latent"].shape[1:])
        for name, value in sample.items():
            together.setdefault(name + end if name in ("latent", "mask") else name, []).append(
                value
            )
    stacked = {name: torch.stack(values) for name, values in together.items()}
    if any(one.weight != 1.0 for one in pictures):
        stacked["weight"] = torch.tensor([one.weight for one in pictures])
    return stacked


def encode_one(pipeline: Pipeline, one: Captioned, wish: Wish) -> dict[str, Tensor]:
    """Return one picture's fields. Raises DataError for a picture that cannot be read, or latents that overflow."""
    width, height = size_for(one, wish)
    try:
        whole = decode_bytes(one.path, 3, None, MOST_PIXELS)
        image = decode_bytes(one.path, 3, (height, width), MOST_PIXELS)
    except BadImageError as error:
        raise DataError(str(error)) from error
    number = (
        int.from_bytes(hashlib.sha256(f"{wish.seed} {one.path.name}".encode()).digest()[:8], "big")
        >> 1
    )
    latent = pipeline.encode_pictures(image[None], torch.Generator().manual_seed(number))[0]
    text = (
        pipeline.tokens(one.caption) if wish.text_encoders else pipeline.encode_caption(one.caption)
    )
    fields = {"latent": latent, **text}
    if pipeline.kind == "StableDiffusionXLPipeline":
        fields["sizes"] = torch.tensor(sizes_of(whole.shape[1], whole.shape[2], width, height))
    bad = [name for name, value in fields.items() if not bool(value.isfinite().all())]
    if bad:
        raise DataError(
            f"{one.path}: its {bad[0]} is not finite in {latent.dtype}; its encoder overflows"
        )
    return {name: value.detach().cpu().contiguous() for name, value in fields.items()}


def mask_of(one: Captioned, wish: Wish, shape: Sequence[int]) -> Tensor:
    """Return a picture's mask (1, h, w) in [0, 1] in the latent's size, each the mean of its pixels; ones without."""
    if one.mask is None:
        return torch.ones(1, *shape[1:])
    width, height = size_for(one, wish)
    try:
        mask = decode_bytes(one.mask, 1, (height, width), MOST_PIXELS)
    except BadImageError as error:
        raise DataError(str(error)) from error
    return torch.nn.functional.adaptive_avg_pool2d(mask.float() / 255, (shape[1], shape[2]))


def size_for(one: Captioned, wish: Wish) -> tuple[int, int]:
    """Return the width and height that a picture is brought to. Raises DataError for one that cannot be read."""
    if wish.buckets is None:
        return wish.width, wish.height
    try:
        width, height = upright_size(one.path)
    except BadImageError as error:
        raise DataError(str(error)) from error
    return nearest_size(width / height, wish.width, wish.height, wish.buckets)


def nearest_size(proportion: float, width: int, height: int, step: int) -> tuple[int, int]:
    """Return the size whose proportion (width / height) is nearest, of those with at most width x height pixels.

    Sides are multiples of `step`, from half to twice the side of a square of as many pixels.
    """
    area = width * height
    least, most = (
        math.ceil(area**0.5 / 2 / step) * step,
        max(int(2 * area**0.5) // step * step, step),
    )
    wide = [
        (side, min(area // side // step * step, most))
        for side in range(max(least, step), most + step, step)
    ]
    sizes = [(a, b) for a, b in wide if b >= max(least, step)]
    if not sizes:
        raise ConfigError(
            f"--buckets: no size of multiples of {step} has at most {width}x{height} pixels"
        )
    return min(
        sizes, key=lambda one: (abs(math.log(one[0] / one[1] / proportion)), -one[0] * one[1])
    )


def sizes_in_words(pictures: Sequence[Captioned], wish: Wish) -> str:
    """Return how many pictures have which size."""
    counts = Counter(size_for(one, wish) for one in pictures)
    return ", ".join(
        f"{count} of {width}x{height}" for (width, height), count in sorted(counts.items())
    )


def sizes_of(rows: int, columns: int, width: int, height: int) -> list[float]:
    """Return SDXL's conditions: the original's height and width, the cut's top and left corner, the target's size.

    The corner is in pixels of the picture resized to cover the target.
    """
    scale = max(width / columns, height / rows)
    top, left = (rows * scale - height) / 2, (columns * scale - width) / 2
    return [
        float(rows),
        float(columns),
        float(round(top)),
        float(round(left)),
        float(height),
        float(width),
    ]


def configuration(wish: Wish, pipeline: Pipeline, output: Path) -> str:
    """Return a configuration that trains a LoRA on the files."""
    model: dict[str, Any] = {
        "name": "diffusers",
        "folder": str(pipeline.folder),
        "weights": str(pipeline.weights()),
    }
    if wish.text_encoders:
        model |= {"text_encoders": True, "weights": str(pipeline.folder)}
    data: dict[str, Any] = {
        "model": model,
        "dataset": {"name": "latents", "root": str(output)},
        "task": {
            "name": "diffusion",
            **pipeline.objective(),
            "condition_dropout": 0.0,
            "sampler": "euler",
            "decoder": str(pipeline.folder / "vae"),
        },
        "precision": "bf16",
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "train": {"steps": 1000, "batch_size": 1, "ema": None},
        "memory": {"lora": {"rank": 16, "targets": ["attention"], "full": []}},
    }
    head = (
        f"# A LoRA of {pipeline.kind} on {wish.pictures}. Smaller: memory.low_bit_base: nf4 (or fp8),\n"
        "# recompute: all, stream_weights: 0.5; `mpt plan` says what fits. Then `mpt convert RUN --to diffusers`.\n"
    )
    return head + write_text(data)
