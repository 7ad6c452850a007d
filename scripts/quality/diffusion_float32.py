#!/usr/bin/env python
"""Which parts of image models need float32: errors of answers, gradients and samples in bfloat16 but for one part.

    python scripts/quality/diffusion_float32.py -o docs/benchmarks/diffusion_float32.md

Each network is a small one of its family with random weights. It computes in bfloat16 throughout, weights included, but
for one part whose inputs and weights are float32; its answer and its weights' gradients are compared with those in
float32. Levels reach the networks as whole numbers, as in training, but for the row that rounds them. Samples are of
Euler's method, and the network is in bfloat16 there.
"""

from __future__ import annotations

import copy
import functools
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from mpt.systems.diffusion.losses.shared.objectives import Ddpm, Flow, Objective
from mpt.systems.diffusion.nn.shared.embedding import to_ticks
from mpt.systems.diffusion.nn.shared.library import import_package
from mpt.systems.diffusion.nn.shared.library_networks import LibraryDenoiser, wrap
from mpt.systems.diffusion.nn.shared.published_shapes import SHAPES
from mpt.systems.diffusion.tasks.shared import sampling
from scripts.command_line import described
from scripts.provenance import made

DRAWS, SIDE, TOKENS, WIDTH = 2, 16, 16, 64
UNET = {"sample_size": SIDE, "cross_attention_dim": WIDTH, "norm_num_groups": 16}
TRANSFORMER = {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "joint_attention_dim": WIDTH,
    "pooled_projection_dim": WIDTH,
}
SMALL: dict[str, dict[str, Any]] = {
    "sd15": UNET | {"block_out_channels": [64, 64, 128, 128]},
    "sdxl": UNET
    | {
        "block_out_channels": [64, 64, 128],
        "attention_head_dim": [2, 2, 4],
        "transformer_layers_per_block": [1, 1, 2],
        "addition_time_embed_dim": 32,
        "projection_class_embeddings_input_dim": WIDTH + 6 * 32,
    },
    "sd3_medium": TRANSFORMER
    | {"sample_size": SIDE, "num_layers": 4, "caption_projection_dim": 128},
    "flux_dev": TRANSFORMER
    | {"num_layers": 2, "num_single_layers": 4, "axes_dims_rope": [8, 12, 12]},
}
"""Published shape -> what makes it small."""
STEPS = 20


@dataclass(frozen=True)
class Part:
    """A part of a network that is computed otherwise than the rest, in bfloat16."""

    label: str
    chooses: Callable[[str, nn.Module], bool] = lambda name, module: False
    """Which layers are in float32, by name and kind."""
    attention: torch.dtype | None = None
    """In which precision attention is written out: scores, softmax and sum. None is torch's own function."""
    rounds_levels: bool = False
    keeps_levels: bool = False
    """Whether levels stay in float32 within Flux too, which diffusers casts to the pictures' precision."""


def is_norm(name: str, module: nn.Module) -> bool:
    """Return whether a layer is a norm."""
    return type(module).__name__ in ("GroupNorm", "LayerNorm", "RMSNorm")


def is_time(name: str, module: nn.Module) -> bool:
    """Return whether a layer embeds time, sizes or pooled text."""
    words = ("time_embedding", "time_text_embed", "add_embedding")
    return isinstance(module, nn.Linear) and any(word in name for word in words)


def is_modulation(name: str, module: nn.Module) -> bool:
    """Return whether a layer makes scales and shifts of the embedded time."""
    return isinstance(module, nn.Linear) and (".norm" in name or name.endswith("time_emb_proj"))


def is_outer(name: str, module: nn.Module) -> bool:
    """Return whether a layer is the first or the last one of the pictures."""
    ends = ("conv_in", "conv_out", "proj_out", "x_embedder", "pos_embed.proj")
    return name.endswith(ends) and "blocks" not in name


PARTS = (
    Part("nothing"),
    Part("norms", is_norm),
    Part("embeddings of time, sizes and pooled text", is_time),
    Part("modulations by the embedded time", is_modulation),
    Part("first and last layer", is_outer),
    Part("attention, its softmax included", attention=torch.float32),
    Part("nothing, and the softmax in bfloat16 too", attention=torch.bfloat16),
    Part("nothing, and levels rounded to bfloat16", rounds_levels=True),
    Part("levels within the network (Flux casts them)", keeps_levels=True),
)


class Attention(TorchFunctionMode):
    """Write attention out in a precision; torch's own function keeps its softmax in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = [
            one.to(self.dtype)
            for one in (*args, *(kwargs[n] for n in ("query", "key", "value") if n in kwargs))
        ]
        query, key, value = given[:3]
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        return (scores.softmax(-1) @ value).to((args or tuple(kwargs.values()))[0].dtype)


@functools.cache
def original(shape: str) -> LibraryDenoiser:
    """Return a small network of a family, with random weights."""
    torch.manual_seed(0)
    config = dict(SHAPES[shape]) | SMALL[shape]
    net = wrap(
        getattr(import_package("diffusers", "scripts"), config.pop("_class_name"))(**config), 0
    ).eval()
    with torch.no_grad():
        for one in net.parameters():  # last layers of some begin at zero
            if not bool(one.any()):
                one.normal_(std=0.02)
    return net


def build(shape: str) -> LibraryDenoiser:
    """Return a copy of it."""
    return copy.deepcopy(original(shape))


def inputs(net: LibraryDenoiser) -> Iterator[tuple[Tensor, ...]]:
    """Yield noisy latents, levels and conditions."""
    numbers = torch.Generator().manual_seed(1)
    for _ in range(DRAWS):
        fields = {
            "text": torch.randn(2, TOKENS, WIDTH, generator=numbers),
            "pooled": torch.randn(2, WIDTH, generator=numbers),
            "sizes": torch.tensor([[1024.0, 768, 0, 0, 1024, 1024]] * 2),
        }
        level = 1000 * torch.rand(2, generator=numbers)
        noisy = torch.randn(2, net.channels, SIDE, SIDE, generator=numbers)
        yield (noisy, level, *(fields[name] for name in net.conditions))


def keep_in_float32(net: nn.Module, part: Part) -> int:
    """Let layers compute in float32 and answer in bfloat16; return how many there are."""
    chosen = [module for name, module in net.named_modules() if part.chooses(name, module)]
    for module in chosen:
        module.float()
        module.register_forward_pre_hook(lambda _, given: tuple(one.float() for one in given))
        module.register_forward_hook(lambda _, given, made: made.bfloat16())
    return len(chosen)


def ask(net: LibraryDenoiser, given: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Return the network's answer, its floating inputs cast but for levels and sizes."""
    noisy, level, *conditions = given
    cast = [
        one if name == "sizes" else one.to(dtype)
        for name, one in zip(net.conditions, conditions, strict=True)
    ]
    answer: Tensor = net(noisy.to(dtype), to_ticks(level), *cast)
    return answer.float()


def compute(net: LibraryDenoiser, given: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """Return the answer and the gradients of its mean square."""
    net.zero_grad()
    answer = ask(net, given, dtype)
    answer.square().mean().backward()
    gradients = [one.grad.float().flatten() for one in net.parameters() if one.grad is not None]
    return [answer.detach(), torch.cat(gradients)]


@functools.cache
def exact_answers(shape: str) -> list[list[Tensor]]:
    """Return answers and gradients in float32."""
    net = build(shape)
    return [compute(net, given, torch.float32) for given in inputs(net)]


def distance(rough: list[Tensor], exact: list[Tensor]) -> float:
    """Return the relative L2 distance over all tensors."""
    apart = sum(
        float((one - other).square().sum()) for one, other in zip(rough, exact, strict=True)
    )
    return float((apart / sum(float(one.square().sum()) for one in exact)) ** 0.5)


def errors(shape: str, part: Part) -> tuple[float, float, int]:
    """Return the relative errors of answers and gradients, and the number of layers in float32."""
    net = build(shape).bfloat16()
    count = keep_in_float32(net, part)
    found = []
    for noisy, level, *rest in inputs(net):
        given = (noisy, level.bfloat16().float() if part.rounds_levels else level, *rest)
        if part.keeps_levels and hasattr(net.inner, "time_text_embed"):
            net.inner.time_text_embed.register_forward_pre_hook(
                lambda _, old, exact=level: (exact, *old[1:])
            )
        if part.attention is None:
            found.append(compute(net, given, torch.bfloat16))
        else:
            with Attention(part.attention):
                found.append(compute(net, given, torch.bfloat16))
    answer, gradient = (
        distance([one[n] for one in found], [one[n] for one in exact_answers(shape)])
        for n in range(2)
    )
    return answer, gradient, count


@functools.cache
@torch.no_grad()
def sample(shape: str, network: torch.dtype, sampler: torch.dtype) -> Tensor:
    """Return samples of Euler's method, with the network and the sampler's own arithmetic in a precision each."""
    net = build(shape).to(network)
    noise, _, *conditions = next(inputs(net))

    def answer(seen: Tensor, level_b: Tensor) -> Tensor:
        return ask(net, (seen, level_b.float(), *conditions), network).to(sampler)

    made = list(
        sampling.integrate(answer, objective_of(shape, sampler), noise.to(sampler), STEPS, False)
    )[-1][0]
    assert made.dtype == sampler
    return made.float()


def objective_of(shape: str, dtype: torch.dtype) -> Objective:
    """Return a family's objective with its factors or levels in a precision."""
    if "unet" not in str(SHAPES[shape]["_class_name"]).casefold():
        flow = Flow("uniform", 0.0, 1.0, 1.0)
        flow.sampling_levels = lambda *given: Flow.sampling_levels(flow, *given).to(dtype)  # type: ignore[method-assign]
        return flow
    chain = Ddpm("epsilon", 1000, "scaled_linear", 0.00085, 0.012, None, torch.device("cpu"))
    chain.alpha, chain.sigma = chain.alpha.to(dtype), chain.sigma.to(dtype)
    return chain


def main() -> None:
    """Measure, and write the page."""
    parser = described(__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    start, lines, samples = time.monotonic(), [], []
    for part in PARTS:
        found = [errors(shape, part) for shape in SMALL]
        cells = " | ".join(f"{answer:.4f} | {gradient:.4f}" for answer, gradient, _ in found)
        lines.append(
            f"| {part.label} | {' / '.join(str(count) for *_, count in found)} | {cells} |"
        )
        print(lines[-1], flush=True)
    full, half = torch.float32, torch.bfloat16
    for network, sampler, label in (
        (half, full, "network"),
        (full, half, "sampler"),
        (half, half, "both"),
    ):
        figures = [
            distance([sample(shape, network, sampler)], [sample(shape, full, full)])
            for shape in SMALL
        ]
        samples.append(f"| {label} | {' | '.join(f'{one:.4f}' for one in figures)} |")
        print(samples[-1], flush=True)
    output.write_text(page(lines, samples, time.monotonic() - start), "utf-8")


def page(lines: list[str], samples: list[str], seconds: float) -> str:
    """Return the page."""
    heads = " | ".join(f"{shape}: answer | gradient" for shape in SMALL)
    return "\n".join(
        [
            "# Parts of image models in float32",
            "",
            f"Written by `python scripts/quality/diffusion_float32.py -o docs/benchmarks/diffusion_float32.md`, "
            f"{made()}, torch {torch.__version__}, device CPU ({platform.machine()}, one "
            f"thread), {seconds:.0f} s. Small networks of each family with random weights, all in bfloat16 but for the "
            f"part of a row. Relative L2 distance from float32, {DRAWS} batches of 2, fixed seeds.",
            "",
            f"| In float32 | Layers | {heads} |",
            "|---|---|" + "---:|" * (2 * len(SMALL)),
            *lines,
            "",
            f"Samples of {STEPS} steps of Euler's method (DDIM for sd15 and sdxl, a flow for the others), distance "
            "from those in float32:",
            "",
            f"| In bfloat16 | {' | '.join(SMALL)} |",
            "|---|" + "---:|" * len(SMALL),
            *samples,
            "",
        ]
    )


if __name__ == "__main__":
    main()
