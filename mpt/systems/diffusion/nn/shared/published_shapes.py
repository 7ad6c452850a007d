"""The shapes of published networks, by which they are planned, or trained from scratch, without their files.

Only the differences from the defaults of diffusers' classes is here. Source: the `config.json` of each published
folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLIP_LARGE: Mapping[str, Any] = {
    "architectures": ["CLIPTextModel"],
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
}
CLIP_BIG: Mapping[str, Any] = {
    "architectures": ["CLIPTextModelWithProjection"],
    "vocab_size": 49408,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "projection_dim": 1280,
}
TEXT_SHAPES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "sd15": {"text_encoder": CLIP_LARGE},
    "sdxl": {"text_encoder": CLIP_LARGE, "text_encoder_2": CLIP_BIG},
    "sd3_medium": {
        "text_encoder": {**CLIP_LARGE, "architectures": CLIP_BIG["architectures"]},
        "text_encoder_2": CLIP_BIG,
    },
    "flux_dev": {"text_encoder": CLIP_LARGE},
}
"""Network -> its text encoders that can be trained."""
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "sd15": {"_class_name": "UNet2DConditionModel", "sample_size": 64, "cross_attention_dim": 768},
    "sdxl": {
        "_class_name": "UNet2DConditionModel",
        "sample_size": 128,
        "cross_attention_dim": 2048,
        "attention_head_dim": [5, 10, 20],
        "block_out_channels": [320, 640, 1280],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 2, 10],
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    "sd3_medium": {
        "_class_name": "SD3Transformer2DModel",
        "sample_size": 128,
        "num_layers": 24,
        "num_attention_heads": 24,
        "caption_projection_dim": 1536,
        "pos_embed_max_size": 192,
    },
    "flux_dev": {"_class_name": "FluxTransformer2DModel", "guidance_embeds": True},
    "dit_xl_2": {
        "_class_name": "DiTTransformer2DModel",
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "num_layers": 28,
        "sample_size": 32,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 8,
        "num_embeds_ada_norm": 1000,
    },
}
