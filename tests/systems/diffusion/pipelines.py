"""Local pipelines of each family with random weights, a few thousand each, made from configurations."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.systems.diffusion.library import diffusers

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = 12


def clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    vocabulary = {
        letter + end: number
        for number, (end, letter) in enumerate((e, c) for e in ("", "</w>") for c in LETTERS)
    }
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[special] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=TOKENS)


def clip_encoder(width: int, projection: bool = False) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=54,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        projection_dim=width,
        bos_token_id=52,
        eos_token_id=53,
        pad_token_id=53,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config).eval()


def t5() -> tuple[Any, Any]:
    from transformers import T5Config, T5EncoderModel, T5TokenizerFast

    vocabulary = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -2.0),
        *((letter, -3.0) for letter in LETTERS),
    ]
    tokenizer = T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=TOKENS)
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return tokenizer, T5EncoderModel(config).eval()


def vae(channels: int, shift: float | None) -> Any:
    return diffusers().AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        latent_channels=channels,
        norm_num_groups=4,
        scaling_factor=0.5,
        shift_factor=shift,
        sample_size=16,
    )


def unet(width: int, added: int | None) -> Any:
    more: dict[str, Any] = {}
    if added is not None:
        more = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": added + 6 * 8,
        }
    return diffusers().UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=width,
        attention_head_dim=4,
        norm_num_groups=4,
        **more,
    )


def make_pipeline(kind: str, folder: Path) -> Path:
    """Write a pipeline's folder; return it."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = MAKERS[kind](diffusers())
        pipeline.save_pretrained(str(folder), safe_serialization=True)
    return folder


def stable_diffusion(library: Any) -> Any:
    scheduler = library.DDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012
    )
    return library.StableDiffusionPipeline(
        vae(4, None), clip_encoder(16), clip_tokenizer(), unet(16, None), scheduler, None, None,
        requires_safety_checker=False,
    )  # fmt: skip


def stable_diffusion_xl(library: Any) -> Any:
    scheduler = library.EulerDiscreteScheduler(
        beta_schedule="scaled_linear", prediction_type="v_prediction"
    )
    return library.StableDiffusionXLPipeline(
        vae(4, None),
        clip_encoder(8),
        clip_encoder(16, True),
        clip_tokenizer(),
        clip_tokenizer(),
        unet(24, 16),
        scheduler,
    )


def stable_diffusion_3(library: Any) -> Any:
    tokenizer, encoder = t5()
    network = library.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=12,
        out_channels=4,
    )
    scheduler = library.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return library.StableDiffusion3Pipeline(
        network, scheduler, vae(4, 0.1), clip_encoder(4, True), clip_tokenizer(), clip_encoder(8, True),
        clip_tokenizer(), encoder, tokenizer,
    )  # fmt: skip


def flux(library: Any) -> Any:
    tokenizer, encoder = t5()
    network = library.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=[4, 4, 8],
    )
    scheduler = library.FlowMatchEulerDiscreteScheduler()
    return library.FluxPipeline(
        scheduler, vae(4, 0.1), clip_encoder(16), clip_tokenizer(), encoder, tokenizer, network
    )


MAKERS = {
    "StableDiffusionPipeline": stable_diffusion,
    "StableDiffusionXLPipeline": stable_diffusion_xl,
    "StableDiffusion3Pipeline": stable_diffusion_3,
    "FluxPipeline": flux,
}


def make_pictures(folder: Path, count: int = 6) -> Path:
    """Write coloured pictures with captions; return their folder."""
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (40 + 4 * number, 32), (40 * number, 255 - 40 * number, 90)).save(
            folder / f"{number}.png"
        )
        (folder / f"{number}.txt").write_text(f"a picture of {LETTERS[number] * 3}\n")
    return folder
