"""Local folders in diffusers' layout: which family they are of, and their encoders of pictures and captions.

Text goes through the pipeline's own `encode_prompt`, so that training sees the embeddings of sampling. Nothing is
downloaded, and the denoising network is not read unless pictures are to be made.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpt.errors import ConfigError
from mpt.systems.diffusion.nn.shared.library import import_package, read_mapping
from mpt.systems.diffusion.nn.shared.text_encoders import FILES, network_file

READ_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Family:
    """A kind of pipeline."""

    network: str
    """Folder of the denoising network."""
    encoders: tuple[str, ...]
    """Folders without which nothing can be encoded."""
    multiple: int
    """Sides of latents are multiples of this."""
    prompts: int
    """How many texts `encode_prompt` takes first."""
    tokenizers: tuple[str, ...]
    """Of the CLIP text encoders, which can be trained."""
    has_t5: bool = False


BOTH = ("tokenizer", "tokenizer_2")
FAMILIES = {
    "StableDiffusionPipeline": Family("unet", ("vae", "text_encoder", "tokenizer"), 1, 1, BOTH[:1]),
    "StableDiffusionXLPipeline": Family(
        "unet", ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"), 1, 2, BOTH
    ),
    "StableDiffusion3Pipeline": Family(
        "transformer",
        ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        2,
        3,
        BOTH,
        True,
    ),
    "FluxPipeline": Family(
        "transformer",
        ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        2,
        2,
        BOTH[:1],
        True,
    ),
}


@dataclass(frozen=True)
class Pipeline:
    """A folder, opened."""

    folder: Path
    kind: str
    parts: Any
    """diffusers' pipeline, without its denoising network if pictures are encoded alone."""

    @property
    def family(self) -> Family:
        """The facts about its kind."""
        return FAMILIES[self.kind]

    @property
    def side(self) -> int:
        """Sides of pictures are multiples of that many pixels."""
        halvings = len(self.parts.vae.config.block_out_channels) - 1
        return self.family.multiple << halvings

    @torch.no_grad()
    def encode_pictures(self, image_bchw: Tensor, generator: torch.Generator) -> Tensor:
        """Return latents of uint8 pictures as the network sees them, (b, c, h, w)."""
        vae = self.parts.vae
        pixels = image_bchw.to(vae.device, vae.dtype) / 127.5 - 1
        spread = vae.encode(pixels).latent_dist
        noise = torch.randn(spread.mean.shape, generator=generator).to(vae.device, vae.dtype)
        latent = spread.mean + spread.std * noise
        shift = getattr(vae.config, "shift_factor", None) or 0.0
        found: Tensor = (latent - shift) * vae.config.scaling_factor
        return found

    @torch.no_grad()
    def encode_caption(self, caption: str) -> dict[str, Tensor]:
        """Return a caption's embeddings: `text` (tokens, features) and, but for SD 1 and 2, `pooled` (features)."""
        device, texts = self.parts.vae.device, [caption] * self.family.prompts
        if self.kind == "StableDiffusionPipeline":
            found = self.parts.encode_prompt(caption, device, 1, False)
            return {"text": found[0][0]}
        if self.kind == "FluxPipeline":
            text, pooled, _ = self.parts.encode_prompt(*texts, device=device)
        else:
            text, _, pooled, _ = self.parts.encode_prompt(
                *texts, device=device, do_classifier_free_guidance=False
            )
        return {"text": text[0], "pooled": pooled[0]}

    def tokens(self, caption: str) -> dict[str, Tensor]:
        """Return a caption's tokens, as the pipeline gives them to CLIP's encoders, and the text if T5 makes it too."""
        found = {"text": self.encode_caption(caption)["text"]} if self.family.has_t5 else {}
        for name in self.family.tokenizers:
            reader = getattr(self.parts, name)
            length = reader.model_max_length
            made = reader(
                caption,
                padding="max_length",
                max_length=length,
                truncation=True,
                return_tensors="pt",
            )
            found[name.replace("tokenizer", "tokens")] = made.input_ids[0]
        return found

    def weights(self) -> Path:
        """Return the file of the denoising network's weights. Raises ConfigError if there is none."""
        folder = self.folder / self.family.network
        found = network_file(folder)
        if found is None:
            raise ConfigError(f"PIPELINE: {folder} has no {FILES[0]}")
        return found

    def objective(self) -> dict[str, Any]:
        """Return the task's settings by which this network was trained, from its scheduler's."""
        path = self.folder / "scheduler" / "scheduler_config.json"
        settings = read_mapping(path, "PIPELINE")
        if str(settings.get("_class_name", "")).startswith("FlowMatch"):
            return {"objective": "flow", "shift": float(settings.get("shift", 1.0))}
        kinds = {"epsilon": "epsilon", "v_prediction": "v"}
        kind = kinds.get(settings.get("prediction_type", "epsilon"))
        if kind is None:
            raise ConfigError(
                f"PIPELINE: {path} has prediction_type {settings['prediction_type']!r}, not known here"
            )
        return {
            "objective": kind,
            "noise_steps": int(settings.get("num_train_timesteps", 1000)),
            "beta_schedule": settings.get("beta_schedule", "scaled_linear"),
            "beta_start": float(settings.get("beta_start", 0.00085)),
            "beta_end": float(settings.get("beta_end", 0.012)),
        }


def open_pipeline(folder: Path, device: torch.device, whole: bool = False) -> Pipeline:
    """Open a folder's encoders, or the `whole` of it.

    Raises ConfigError for a folder of another layout or family, and missing encoders.
    """
    folder = folder.expanduser()
    kind = str(read_mapping(folder / "model_index.json", "PIPELINE").get("_class_name"))
    family = FAMILIES.get(kind)
    if family is None:
        raise ConfigError(f"PIPELINE: {folder} is a {kind}; known here are {', '.join(FAMILIES)}")
    missing = [name for name in family.encoders if not (folder / name).is_dir()]
    if missing:
        raise ConfigError(
            f"PIPELINE: {folder} lacks {', '.join(missing)}, without which nothing can be encoded"
        )
    import_package("transformers", "mpt diffusion prepare")
    library = import_package("diffusers", "mpt diffusion prepare")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    without: dict[str, Any] = {} if whole else {family.network: None}
    if kind == "StableDiffusionPipeline":
        without |= {
            "safety_checker": None,
            "feature_extractor": None,
            "requires_safety_checker": False,
        }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = getattr(library, kind).from_pretrained(
                str(folder), local_files_only=True, torch_dtype=dtype, **without
            )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"PIPELINE: diffusers cannot open {folder}: {str(error).splitlines()[0]}"
        ) from error
    return Pipeline(folder, kind, parts.to(device))


def hash_of(files: Mapping[str, Path], settings: Mapping[str, Any]) -> str:
    """Return the SHA-256 of some settings and of files' contents, by their names."""
    found = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode())
    for name, path in sorted(files.items()):
        found.update(f"\n{name}\n".encode())
        with path.open("rb") as file:
            while piece := file.read(READ_AT_ONCE):
                found.update(piece)
    return found.hexdigest()


def encoder_files(folder: Path, kind: str) -> dict[str, Path]:
    """Return the files that encoding depends on, by their paths in the folder."""
    names = [name for name in FAMILIES[kind].encoders if (folder / name).is_dir()]
    names += [name for name in ("text_encoder_3", "tokenizer_3") if (folder / name).is_dir()]
    found = (
        path for name in names for path in sorted((folder / name).rglob("*")) if path.is_file()
    )
    return {str(path.relative_to(folder)): path for path in found}
