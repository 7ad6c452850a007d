"""Layers of published checkpoints that a library holds under other names, or as several: Flux, SD3 and SDXL.

kohya's programs name adapters after the checkpoint's layers, and so do loaders of such checkpoints: the projections of
attention are one there, `double_blocks.0.img_attn.qkv`. Adapters of several layers become one of the sum of their ranks
whose B has a block for each; one of a joined layer is divided by B's rows. Both compute the same.

Source of the names: the checkpoints of Flux.1, Stable Diffusion 3 and XL, as diffusers reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpt.nn.shared.mixin import own_class

JOINED = ("FluxTransformer2DModel", "SD3Transformer2DModel")
"""Models of which kohya's programs write the checkpoint's names; of UNets the library's are written."""


@dataclass(frozen=True)
class Original:
    """A layer of a published checkpoint."""

    name: str
    """With underscores, as kohya writes it."""
    parts: tuple[str, ...]
    """The library's layers, whose outputs follow each other in the checkpoint's."""
    is_swapped: bool = False
    """Whether the checkpoint's two halves of the outputs are the other way round: shift and scale of the last norm."""


def originals(model: nn.Module) -> tuple[Original, ...]:
    """Return the checkpoint's layers of a library's model; none for a model whose names are the library's."""
    makers = {
        "FluxTransformer2DModel": flux,
        "SD3Transformer2DModel": stable_diffusion_3,
        "UNet2DConditionModel": stable_diffusion_xl,
    }
    maker = makers.get(own_class(model).__name__)
    return () if maker is None else tuple(maker(model))


def flux(model: Any) -> Iterator[Original]:
    """Yield the layers of Flux.1."""
    streams = (
        ("img", "to_{}", "to_out.0", "ff", "norm1"),
        ("txt", "add_{}_proj", "to_add_out", "ff_context", "norm1_context"),
    )
    for n in range(len(model.transformer_blocks)):
        for stream, projection, output, forward, norm in streams:
            ours, theirs = f"transformer_blocks.{n}", f"double_blocks_{n}_{stream}"
            projections = tuple(f"{ours}.attn.{projection.format(letter)}" for letter in "qkv")
            yield Original(f"{theirs}_attn_qkv", projections)
            yield Original(f"{theirs}_attn_proj", (f"{ours}.attn.{output}",))
            yield Original(f"{theirs}_mlp_0", (f"{ours}.{forward}.net.0.proj",))
            yield Original(f"{theirs}_mlp_2", (f"{ours}.{forward}.net.2",))
            yield Original(f"{theirs}_mod_lin", (f"{ours}.{norm}.linear",))
    for n in range(len(model.single_transformer_blocks)):
        ours, theirs = f"single_transformer_blocks.{n}", f"single_blocks_{n}"
        projections = tuple(f"{ours}.attn.to_{letter}" for letter in "qkv")
        yield Original(f"{theirs}_linear1", (*projections, f"{ours}.proj_mlp"))
        yield Original(f"{theirs}_linear2", (f"{ours}.proj_out",))
        yield Original(f"{theirs}_modulation_lin", (f"{ours}.norm.linear",))
    embedders = (
        ("time_in", "timestep_embedder"),
        ("guidance_in", "guidance_embedder"),
        ("vector_in", "text_embedder"),
    )
    for theirs, ours in embedders:
        yield Original(f"{theirs}_in_layer", (f"time_text_embed.{ours}.linear_1",))
        yield Original(f"{theirs}_out_layer", (f"time_text_embed.{ours}.linear_2",))
    yield Original("img_in", ("x_embedder",))
    yield Original("txt_in", ("context_embedder",))
    yield from last_layers()


def stable_diffusion_3(model: Any) -> Iterator[Original]:
    """Yield the layers of Stable Diffusion 3 and 3.5."""
    last = len(model.transformer_blocks) - 1
    streams = (
        ("x_block", "attn", "attn.to_{}", "attn.to_out.0"),
        ("x_block", "attn2", "attn2.to_{}", "attn2.to_out.0"),
        ("context_block", "attn", "attn.add_{}_proj", "attn.to_add_out"),
    )
    for n in range(last + 1):
        ours, theirs = f"transformer_blocks.{n}", f"joint_blocks_{n}"
        for stream, attention, projection, output in streams:
            projections = tuple(f"{ours}.{projection.format(letter)}" for letter in "qkv")
            yield Original(f"{theirs}_{stream}_{attention}_qkv", projections)
            yield Original(f"{theirs}_{stream}_{attention}_proj", (f"{ours}.{output}",))
        for stream, forward, norm in (
            ("x_block", "ff", "norm1"),
            ("context_block", "ff_context", "norm1_context"),
        ):
            yield Original(f"{theirs}_{stream}_mlp_fc1", (f"{ours}.{forward}.net.0.proj",))
            yield Original(f"{theirs}_{stream}_mlp_fc2", (f"{ours}.{forward}.net.2",))
            is_swapped = n == last and stream == "context_block"
            yield Original(
                f"{theirs}_{stream}_adaLN_modulation_1", (f"{ours}.{norm}.linear",), is_swapped
            )
    for theirs, ours in (("t_embedder", "timestep_embedder"), ("y_embedder", "text_embedder")):
        yield Original(f"{theirs}_mlp_0", (f"time_text_embed.{ours}.linear_1",))
        yield Original(f"{theirs}_mlp_2", (f"time_text_embed.{ours}.linear_2",))
    yield Original("x_embedder_proj", ("pos_embed.proj",))
    yield Original("context_embedder", ("context_embedder",))
    yield from last_layers()


def last_layers() -> Iterator[Original]:
    """Yield the last layers of both transformers."""
    yield Original("final_layer_adaLN_modulation_1", ("norm_out.linear",), is_swapped=True)
    yield Original("final_layer_linear", ("proj_out",))


RESNET = {
    "in_layers_2": "conv1",
    "emb_layers_1": "time_emb_proj",
    "out_layers_3": "conv2",
    "skip_connection": "conv_shortcut",
}


def stable_diffusion_xl(model: Any) -> Iterator[Original]:
    """Yield the layers of a UNet by the names of its checkpoint, which kohya's programs use for SDXL alone."""
    for ours, theirs in unet_blocks(model):
        if ".resnets." in ours:
            yield from (
                Original(f"{theirs}_{there}", (f"{ours}.{here}",)) for there, here in RESNET.items()
            )
        elif ".attentions." in ours:
            layers = (name for name, _ in model.get_submodule(ours).named_modules() if name)
            yield from (
                Original(f"{theirs}_{name.replace('.', '_')}", (f"{ours}.{name}",))
                for name in layers
            )
        else:
            yield Original(
                f"{theirs}_{'op' if '.downsamplers.' in ours else 'conv'}", (f"{ours}.conv",)
            )
    for theirs, ours in (("time_embed", "time_embedding"), ("label_emb_0", "add_embedding")):
        yield Original(f"{theirs}_0", (f"{ours}.linear_1",))
        yield Original(f"{theirs}_2", (f"{ours}.linear_2",))
    yield Original("input_blocks_0_0", ("conv_in",))
    yield Original("out_2", ("conv_out",))


def unet_blocks(model: Any) -> Iterator[tuple[str, str]]:
    """Yield a UNet's blocks by the library's and the checkpoint's names."""
    number = 0  # of the input block; the first is conv_in
    for n, block in enumerate(model.down_blocks):
        for k in range(len(block.resnets)):
            number += 1
            yield f"down_blocks.{n}.resnets.{k}", f"input_blocks_{number}_0"
            yield from attention(block, f"down_blocks.{n}", k, f"input_blocks_{number}_1")
        if block.downsamplers is not None:
            number += 1
            yield f"down_blocks.{n}.downsamplers.0", f"input_blocks_{number}_0"
    yield from (
        ("mid_block.resnets.0", "middle_block_0"),
        ("mid_block.resnets.1", "middle_block_2"),
    )
    yield from attention(model.mid_block, "mid_block", 0, "middle_block_1")
    number = -1
    for n, block in enumerate(model.up_blocks):
        for k in range(len(block.resnets)):
            number += 1
            yield f"up_blocks.{n}.resnets.{k}", f"output_blocks_{number}_0"
            yield from attention(block, f"up_blocks.{n}", k, f"output_blocks_{number}_1")
        if block.upsamplers is not None:
            place = 2 if getattr(block, "attentions", None) else 1
            yield f"up_blocks.{n}.upsamplers.0", f"output_blocks_{number}_{place}"


def attention(block: Any, ours: str, place: int, theirs: str) -> Iterator[tuple[str, str]]:
    """Yield a block's attention, if it has one there."""
    if getattr(block, "attentions", None):
        yield f"{ours}.attentions.{place}", theirs


def join(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return A (sum of ranks, in) and B (sum of outputs, sum of ranks) of layers with the same input."""
    if len(parts) == 1:
        return parts[0]
    wide = torch.zeros(
        sum(b.shape[0] for _, b in parts),
        sum(b.shape[1] for _, b in parts),
        dtype=parts[0][1].dtype,
    )
    row = column = 0
    for _, b in parts:
        wide[row : row + b.shape[0], column : column + b.shape[1]] = b
        row, column = row + b.shape[0], column + b.shape[1]
    return torch.cat([a for a, _ in parts if len(a)]), wide


def split(
    a: Tensor, b: Tensor, sizes: Sequence[int], ranks: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Divide an adapter by its outputs: `sizes` of each part; `ranks` of the parts, if it was joined of such.

    An adapter that is no block for each part has the same A for all.
    """
    parts = torch.split_with_sizes(b, list(sizes))
    for widths in (list(ranks), [len(a) // len(sizes)] * len(sizes)):
        if sum(widths) != len(a):
            continue
        columns = [torch.split_with_sizes(rows, widths, dim=1) for rows in parts]
        others = (one for n, row in enumerate(columns) for m, one in enumerate(row) if n != m)
        if not any(bool(one.any()) for one in others):
            return [
                (narrow, columns[n][n])
                for n, narrow in enumerate(torch.split_with_sizes(a, widths))
            ]
    return [(a, rows) for rows in parts]


def swap(rows: Tensor) -> Tensor:
    """Return a tensor with the halves of its dimension 0 exchanged."""
    first, second = rows.chunk(2)
    return torch.cat([second, first])
