"""Latents to pictures, by a local autoencoder of diffusers that is in memory while it decodes only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpt.errors import ConfigError
from mpt.systems.diffusion.nn.shared.library import import_package


class Decoder:
    """An AutoencoderKL's folder. It is read when it is first needed, and stays on the CPU between uses."""

    def __init__(self, folder: str, field: str, device: torch.device) -> None:
        self.folder, self.device = Path(folder).expanduser(), device
        self._network: Any = None
        if field != "latent":
            raise ConfigError("task.decoder: the data are pictures, not latents; leave it out")
        if not (self.folder / "config.json").is_file():
            raise ConfigError(
                f"task.decoder: {self.folder} has no config.json; expected is an AutoencoderKL's folder"
            )

    def images(self, latent_bchw: Tensor) -> Tensor:
        """Return images (b, 3, h, w) in [0, 1], one by one, of latents as the network sees them."""
        if self._network is None:
            self._network = self._read().eval()
        config, network = self._network.config, self._network.to(self.device)
        shift = getattr(config, "shift_factor", None) or 0.0
        latent = latent_bchw.float() / config.scaling_factor + shift
        with torch.no_grad():
            made = torch.cat([network.decode(one[None], return_dict=False)[0] for one in latent])
        self._network = network.to("cpu")
        return ((made.float() + 1) / 2).clamp(0, 1)

    def _read(self) -> Any:
        """Return the autoencoder; in a plan, whose tensors have no values, without the file's weights."""
        kind = import_package("diffusers", "task.decoder").AutoencoderKL
        try:
            if torch._guards.detect_fake_mode() is not None:
                return kind.from_config(kind.load_config(str(self.folder)))
            return kind.from_pretrained(str(self.folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"task.decoder: {self.folder} cannot be read: {error}") from error
