"""A generator to draw pictures with: of a run, or of an NVIDIA network pickle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mpt.config.checking.precision_names import FLOAT32
from mpt.engine.building.devices import choose_device
from mpt.engine.state.moving_averages import evaluated_module
from mpt.errors import CheckpointError, ConfigError
from mpt.inference.half import rebuild
from mpt.inference.trained import open_trained
from mpt.systems.stylegan2.nn.published import stylegan3
from mpt.systems.stylegan2.nn.published.stylegan3 import AliasFreeGenerator
from mpt.systems.stylegan2.nn.stylegan2 import Generator, Settings, truncated
from mpt.systems.stylegan2.nn.weights.names import settings_of, to_ours
from mpt.systems.stylegan2.nn.weights.network_pickle import (
    NetworkPickle,
    is_network_pickle,
    modules_of,
    read_network_pickle,
)

NOISE_MODES = ("const", "random", "none")


@dataclass(frozen=True)
class Look:
    """How styles become pictures."""

    truncation: float = 1.0
    """How far styles go from the mean: 1 leaves them as they are."""
    cutoff: int | None = None
    """Layers that are truncated; all if None."""
    noise: str = "const"
    """The network's fixed noise, fresh noise for each picture, or none."""


class Painter:
    """A generator with its mean style; images are NHWC in 8 bits, as the original rounds them."""

    def __init__(self, network: Generator | AliasFreeGenerator, device: torch.device) -> None:
        self.network, self.device = network.to(device).eval().requires_grad_(False), device
        self.latent_size, self.classes = network.latent_size, network.classes
        of_layers = network.synthesis if isinstance(network, Generator) else network
        self.style_count: int = of_layers.style_count
        average = network.mapping.average
        self.mean = average.float() if average is not None else network.mean_style()  # type: ignore[operator]

    @torch.no_grad()
    def styles(self, seeds: Sequence[int], label: int | None) -> Tensor:
        """Return the styles (seeds, layers, d) of latents that NumPy draws from each seed, as the original does."""
        drawn = [np.random.RandomState(seed).randn(1, self.latent_size) for seed in seeds]
        latent = torch.from_numpy(np.concatenate(drawn)).float().to(self.device)
        labels = None
        if self.classes:
            if label is None or not 0 <= label < self.classes:
                raise ConfigError(
                    f"--class: this network has {self.classes} classes; give one of 0 to {self.classes - 1}"
                )
            labels = torch.full((len(seeds),), label, device=self.device)
        style: Tensor = self.network.mapping(latent, labels)
        return style.unsqueeze(1).repeat(1, self.style_count, 1)

    @torch.no_grad()
    def images(self, style_bld: Tensor, look: Look, batch_size: int = 8) -> Tensor:
        """Return images (b, c, h, w), about -1 to 1, in float32 on the CPU."""
        if look.truncation != 1:
            style_bld = truncated(style_bld, self.mean, look.truncation, look.cutoff)
        made = [
            self.network.synthesis(part, self.noise(len(part), look.noise))
            for part in torch.split(style_bld, batch_size)
        ]
        return torch.cat([one.float().cpu() for one in made])

    def noise(self, count: int, mode: str) -> Tensor | None:
        """Return the noise of some pictures; None for networks without any."""
        if mode == "none" or not isinstance(self.network, Generator):
            return None
        synthesis = self.network.synthesis
        if mode == "random":
            return torch.randn(count, synthesis.noise_size, device=self.device)
        if synthesis.fixed_noise is not None:
            return synthesis.fixed_noise.expand(count, -1)
        fixed = torch.randn(synthesis.noise_size, generator=torch.Generator().manual_seed(0))
        return fixed.to(self.device).expand(count, -1)


def as_bytes(image_bchw: Tensor) -> Tensor:
    """Return images (b, c, h, w) in -1 to 1 as 8 bits, cut and not rounded, as the original writes them."""
    return (image_bchw * 127.5 + 128).clamp(0, 255).to(torch.uint8)


def open_painter(wanted: str, runs: Path, device_name: str, half: bool = False) -> Painter:
    """Open a network pickle or a run. Raises CheckpointError for others, ConfigError for half if there is none."""
    path, device = Path(wanted), choose_device(device_name)
    if path.is_file() and is_network_pickle(path):
        network = published_generator(read_network_pickle(path))
    else:
        trained = open_trained(wanted, runs, device_name)
        task = rebuild(trained, FLOAT32).task
        found = evaluated_module(task, "gen") if "gen" in task.modules else None
        if not isinstance(found, Generator):
            raise CheckpointError(
                f"{wanted}: its model is {trained.config.model.name}; mpt infer draws its samples"
            )
        network = found
    if half and (not isinstance(network, Generator) or not network.set_half(torch.float16)):
        raise ConfigError("--half: this network has no resolutions that run in half; leave it out")
    return Painter(network, device)


def published_generator(pickle: NetworkPickle) -> Generator | AliasFreeGenerator:
    """Return the generator that a file's author uses (G_ema). Raises CheckpointError if it cannot be built."""
    network, where = pickle.networks["G_ema"], str(pickle.path)
    tensors = {
        name.removeprefix("G_ema."): value for name, value in pickle.tensors(("G_ema",)).items()
    }
    try:
        states = {
            name: module.state
            for name, module in modules_of(network)
            if isinstance(module.state, dict)
        }
        if "synthesis.input" in states:
            made: Generator | AliasFreeGenerator
            made = AliasFreeGenerator(network.arguments, states, tensors)
            ours = stylegan3.to_ours(tensors, made.names)
        else:
            settings = settings_of(network.arguments, None, where)
            settings.pop("name")
            checked = Settings.model_validate(settings)
            made = Generator(checked)
            given = {f"G_ema.{name}": value for name, value in tensors.items()}
            ours = {
                name.removeprefix("gen_ema."): one
                for name, one in to_ours(checked.resolutions(), given).items()
            }
        own = made.state_dict()
        unlike = [
            name
            for name, value in own.items()
            if name not in ours or ours[name].shape != value.shape
        ]
        if unlike:
            raise ValueError(f"its tensor {unlike[0]} is missing or of another shape")
        made.load_state_dict({name: ours[name] for name in own})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{where}: its generator cannot be built: {reason}") from error
    return made
