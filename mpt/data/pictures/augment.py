"""Random changes to training images: torchvision.transforms.v2 by name, seeded per sample.

Each sample's draws come from (seed, epoch, index), so neither the number of workers, nor the batch a sample falls into,
nor a resume changes them. torchvision's transforms draw from torch's global CPU generator; it is seeded
for the sample and put back afterwards, so that dropout and latents do not notice. Not `torch.manual_seed`, which would
reseed the GPU's generators as well.

Images are float32 (c, h, w) in [0, 1], before and after. A result in another size or with other channels is
brought back to the data set's layout. Which names are allowed is `mpt.config.options.AUGMENTATIONS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mpt.config.options import AUGMENTATIONS
from mpt.data.pictures.decoding import Box
from mpt.data.pictures.fitting import fit_images
from mpt.data.pictures.seeds import mix
from mpt.errors import ConfigError
from mpt.vision_ops import import_torchvision

Entry = str | dict[str, dict[str, Any]]


class Augmentation:
    """A list of transforms for images of one size. `crops_from_original` asks for the image before it is resized."""

    def __init__(self, entries: Sequence[Entry], image_size: int, channels: int, seed: int) -> None:
        self.image_size, self.channels, self.seed = image_size, channels, seed
        self.transforms = [build_transform(entry, image_size) for entry in entries]
        first = entries[0] if entries else ""
        self.crops_from_original = "RandomResizedCrop" in first
        self.try_out()

    def try_out(self) -> None:
        """Run every transform once, so that an impossible one (a crop larger than the image) is refused at the
        start.
        """
        image = torch.zeros(self.channels, self.image_size, self.image_size)
        with preserved_generator():
            for transform in self.transforms:
                try:
                    image = transform(image)
                except (TypeError, ValueError, RuntimeError) as error:
                    name = type(transform).__name__
                    raise ConfigError(
                        f"dataset.augment: {name} fails on images of {self.channels} x {self.image_size} x "
                        f"{self.image_size}: {error}"
                    ) from error

    def apply(self, image_chw: Tensor, epoch: int, index: int) -> Tensor:
        """Return one image changed as (seed, epoch, index) say. Call inside `preserved_generator()`."""
        self.begin(epoch, index)
        for transform in self.transforms:
            image_chw = transform(image_chw)
        return fit_images(image_chw[None], self.image_size, self.channels)[0]

    def begin(self, epoch: int, index: int) -> None:
        """Seed torch's global CPU generator for the draws for one image."""
        torch.default_generator.manual_seed(mix(self.seed, epoch, index))

    def choose_cut(self, width: int, height: int) -> Box:
        """Draw the part of a picture that RandomResizedCrop, the first transform, cuts. Call after `begin`."""
        first: Any = self.transforms[0]
        drawn = first.make_params([torch.empty((1, height, width), device="meta")])
        return (
            drawn["left"],
            drawn["top"],
            drawn["left"] + drawn["width"],
            drawn["top"] + drawn["height"],
        )

    def apply_to_cut(self, cut_chw: Tensor, as_bytes: bool) -> Tensor:
        """Return the image that `apply` makes of the picture which uint8 `cut_chw` was cut from, drawing on.

        RandomResizedCrop resizes floats, and the result is that of the whole picture as floats to the bit; or
        `as_bytes`, which rounds to levels.
        """
        whole = {"top": 0, "left": 0, "height": cut_chw.shape[-2], "width": cut_chw.shape[-1]}
        first: Any = self.transforms[0]
        image = first.transform(cut_chw if as_bytes else as_floats(cut_chw), whole)
        image = as_floats(image) if as_bytes else image
        for transform in self.transforms[1:]:
            image = transform(image)
        return fit_images(image[None], self.image_size, self.channels)[0]

    def apply_all(self, image_bchw: Tensor, epoch: int, indices: Sequence[int]) -> Tensor:
        """Return a batch of images, each changed by its own draws; torch's generator is left as it was."""
        with preserved_generator():
            return torch.stack(
                [
                    self.apply(image, epoch, index)
                    for image, index in zip(image_bchw, indices, strict=True)
                ]
            )


def as_floats(image: Tensor) -> Tensor:
    """Return uint8 pixels as float32 from 0 to 1, contiguous."""
    return image.contiguous().float().div_(255)


@contextmanager
def preserved_generator() -> Iterator[None]:
    """Put torch's global CPU generator back as it was on leaving, however the block ends."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def build_transform(entry: Entry, image_size: int) -> Callable[[Tensor], Tensor]:
    """Return one transform from its YAML form. A `size` that it needs and was not given is the image size."""
    name, arguments = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
    if name not in AUGMENTATIONS:
        raise ConfigError(
            f"dataset.augment: no augmentation {name!r}; allowed: {', '.join(AUGMENTATIONS)}"
        )
    kind = getattr(import_torchvision("transforms.v2"), name)
    parameters = inspect.signature(kind).parameters
    unknown = sorted(set(arguments) - set(parameters))
    if unknown:
        raise ConfigError(
            f"dataset.augment: {name} has no argument {unknown[0]!r}; it has {', '.join(parameters)}"
        )
    arguments = dict(arguments)
    if "size" in parameters:
        arguments.setdefault("size", image_size)
    missing = sorted(
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
        and key not in arguments
    )
    if missing:
        raise ConfigError(
            f"dataset.augment: {name} needs {missing[0]!r}: write {{{name}: {{{missing[0]}: ...}}}}"
        )
    try:
        if isinstance(arguments.get("interpolation"), str):
            arguments["interpolation"] = import_torchvision("transforms").InterpolationMode(
                arguments["interpolation"]
            )
        transform: Callable[[Tensor], Tensor] = kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"dataset.augment: {name} refuses its arguments {arguments}: {error}"
        ) from error
    return transform
