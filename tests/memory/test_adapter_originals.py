"""Adapters under the names of published checkpoints: Flux, SD3 and SDXL, as kohya's programs and ComfyUI have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mpt.errors import CheckpointError, ConfigError
from mpt.memory.adapters.names import matrices, places, rank_of
from mpt.memory.adapters.originals import originals, split
from mpt.memory.adapters.reading import load_adapters, read_adapters
from mpt.memory.lora import Lora, Settings
from mpt.seams import Precision
from tests.memory.test_adapter_files import (
    Plain,
    adapted,
    answer,
    diffusers,
    loaded_by_library,
    transformer,
    written,
)

WIDTH = 3072
"""Of Flux.1: diffusers reads kohya's keys of its single blocks with these sizes alone."""


class Attention(nn.Module):
    def __init__(self, width: int, has_text: bool) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(8, width) for _ in range(3))
        if has_text:
            self.add_q_proj, self.add_k_proj, self.add_v_proj = (
                nn.Linear(8, width) for _ in range(3)
            )
            self.to_add_out = nn.Linear(8, width)
            self.to_out = nn.ModuleList([nn.Linear(8, width)])


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.proj_mlp = Attention(WIDTH, False), nn.Linear(8, 4 * WIDTH)


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(8, True)


class FluxTransformer2DModel(nn.Module):
    """A block of each kind by the library's names, of few inputs and Flux's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([Double()])
        self.single_transformer_blocks = nn.ModuleList([Single()])
        self.norm_out = nn.ModuleDict({"linear": nn.Linear(8, 6)})


FluxTransformer2DModel.__module__ = "diffusers.stand_in"


class Checkpoint(dict[str, Tensor]):
    """A published checkpoint as ComfyUI patches it: of each layer, what an adapter of its name adds to the weight."""

    def __init__(self, file: Path, **names: Tensor) -> None:
        super().__init__({name.replace("__", "."): value for name, value in names.items()})
        self.file, self.used = load_file(file), set[str]()

    def pop(self, key: str, *default: Any) -> Tensor:
        name = "lora_unet_" + key.removesuffix(".weight").replace(".", "_")
        if key.endswith(".bias") or f"{name}.lora_up.weight" not in self.file:
            return torch.zeros(7 * WIDTH, 1)
        up, down, alpha = (
            self.file[f"{name}.{part}"] for part in ("lora_up.weight", "lora_down.weight", "alpha")
        )
        self.used.add(name)
        return alpha / len(down) * up.flatten(1) @ down.flatten(1)


def changes(task: Plain) -> dict[str, Tensor]:
    """Return what each adapter adds to its layer's weight."""
    (place,) = places(task.modules)
    return {name: layer.change().flatten(1) for name, layer in place.adapted().items()}


def sd3(dual: tuple[int, ...] = (0,)) -> Any:
    torch.manual_seed(0)
    return diffusers().SD3Transformer2DModel(
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
        dual_attention_layers=dual,
    )


def sdxl() -> Any:
    torch.manual_seed(0)
    return (
        diffusers()
        .UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8, 16, 16),
            layers_per_block=2,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=12,
            attention_head_dim=4,
            norm_num_groups=4,
            use_linear_projection=True,
        )
        .eval()
    )


def read_again(model: nn.Module, path: Path, **settings: Any) -> Plain:
    """Return a task with the file's adapters in new ones."""
    task = Plain(net=model)
    Lora(Settings(full=[], **settings)).apply(task, Precision())
    load_adapters(task.modules, read_adapters(path))
    return task


SETTINGS: dict[str, dict[str, Any]] = {
    "one rank": {"rank": 4, "targets": ["linear", "convolutions"]},
    "patterns": {"rank": 4, "ranks": {"*.to_k": 2}, "alphas": {"*_v*": 5}, "targets": ["linear"]},
    "parts": {"rank": 3, "targets": ["*.to_q", "*.to_v", "*.add_v_proj"]},
    "dora": {"rank": 2, "dora": True, "targets": ["linear"]},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_kohya_keys_of_sd3_are_those_of_its_checkpoint(kind: str, tmp_path: Path) -> None:
    diffusers()
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    task = adapted(sd3(), **SETTINGS[kind])
    path, expected = written(task, "kohya", tmp_path), changes(task)
    checkpoint = Checkpoint(
        path, joint_blocks__1=torch.zeros(0), joint_blocks__0__x_block__attn2__=torch.zeros(0)
    )
    checkpoint["context_embedder.weight"] = torch.zeros(16, 16)
    patched = convert_sd3_transformer_checkpoint_to_diffusers(checkpoint)
    assert len(checkpoint.used) == sum(key.endswith("lora_up.weight") for key in checkpoint.file)
    for name, change in expected.items():
        torch.testing.assert_close(patched[f"{name}.weight"], change, rtol=1e-5, atol=1e-6)
    again = changes(read_again(sd3(), path, **SETTINGS[kind]))
    for name, change in expected.items():
        torch.testing.assert_close(again[name], change, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", SETTINGS)
def test_kohya_keys_of_flux_are_read_by_diffusers_and_patch_its_checkpoint(
    kind: str, tmp_path: Path
) -> None:
    library = diffusers()
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    torch.manual_seed(0)
    task = adapted(FluxTransformer2DModel(), **SETTINGS[kind])
    path, expected = written(task, "kohya", tmp_path), changes(task)
    checkpoint = Checkpoint(path, double_blocks__0=torch.zeros(0), single_blocks__0=torch.zeros(0))
    patched = convert_flux_transformer_checkpoint_to_diffusers(checkpoint)
    state = library.FluxPipeline.lora_state_dict(str(path))
    for name, change in expected.items():
        torch.testing.assert_close(patched[f"{name}.weight"], change, rtol=1e-5, atol=1e-6)
        if name != "norm_out.linear":  # diffusers leaves the scale of the last layers out
            key = f"transformer.{name}"
            theirs = state[f"{key}.lora_B.weight"] @ state[f"{key}.lora_A.weight"]
            torch.testing.assert_close(theirs, change, rtol=1e-5, atol=1e-6)
    again = changes(read_again(FluxTransformer2DModel(), path, **SETTINGS[kind]))
    for name, change in expected.items():
        torch.testing.assert_close(again[name], change, rtol=1e-5, atol=1e-6)


def test_diffusers_computes_with_kohya_keys_of_flux_what_the_run_does(tmp_path: Path) -> None:
    model = transformer()
    task = adapted(model, rank=4, targets=["transformer_blocks.*", "net.transformer_blocks.*"])
    path = written(task, "kohya", tmp_path)
    found = loaded_by_library(transformer(), "kohya", path)
    torch.testing.assert_close(answer(found), answer(model), rtol=1e-4, atol=1e-5)


def test_an_adapter_of_a_joined_layer_is_divided(tmp_path: Path) -> None:
    """kohya's programs train one adapter over queries, keys and values: its A is that of each."""
    torch.manual_seed(0)
    a, b = torch.randn(4, 16), torch.randn(48, 4)
    key = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    file = {
        f"{key}.lora_down.weight": a,
        f"{key}.lora_up.weight": b,
        f"{key}.alpha": torch.tensor(2.0),
    }
    path = tmp_path / "theirs.safetensors"
    safetensors.torch.save_file(file, path)
    targets = {"targets": ["*.0.attn.to_q", "*.0.attn.to_k", "*.0.attn.to_v"]}
    task = read_again(sd3(), path, rank=4, **targets)
    made = torch.cat([changes(task)[f"transformer_blocks.0.attn.to_{letter}"] for letter in "qkv"])
    torch.testing.assert_close(made, 0.5 * b @ a)
    with pytest.raises(
        CheckpointError, match=r"has rank 4, and memory.lora gives it 8; set memory.lora.rank=4"
    ):
        read_again(sd3(), path, rank=8, **targets)
    with pytest.raises(
        CheckpointError,
        match=r"adapts transformer_blocks.0.attn.to_v too, which has no adapter here",
    ):
        read_again(sd3(), path, rank=4, targets=["*.0.attn.to_q", "*.0.attn.to_k"])
    dora = adapted(sd3(), rank=2, dora=True, targets=["*.attn.to_q"])
    with pytest.raises(ConfigError, match=r"DoRA needs an adapter on each; use --to diffusers"):
        written(dora, "kohya", tmp_path)
    safetensors.torch.save_file({**file, f"{key}.lora_up.weight": b[:40]}, path)
    with pytest.raises(CheckpointError, match="is of a layer of another size"):
        read_again(sd3(), path, rank=4, **targets)


def test_blocks_of_other_ranks_are_divided_at_their_own_places() -> None:
    a, b = torch.arange(6.0).view(3, 2), torch.block_diag(torch.ones(2, 1), torch.ones(2, 2))
    (first, _), (second, rows) = split(a, b, [2, 2], [1, 2])
    assert torch.equal(first, a[:1])
    assert torch.equal(second, a[1:])
    assert torch.equal(rows, torch.ones(2, 2))


def test_kohya_keys_of_sdxl_are_read_by_the_names_of_its_checkpoint(tmp_path: Path) -> None:
    settings = {"rank": 4, "targets": ["linear", "convolutions"]}
    model = sdxl()
    task = adapted(model, **settings)
    (place,) = places(task.modules)
    layers, tensors = place.adapted(), {}
    for original in originals(model):
        (name,) = original.parts
        if name in layers:
            a, b, _ = matrices(layers[name])
            key = f"lora_unet_{original.name}"
            tensors |= {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b}
            tensors[f"{key}.alpha"] = torch.tensor(layers[name].lora_factor * rank_of(layers[name]))
    assert len(tensors) == 3 * len(layers)
    path = tmp_path / "sdxl.safetensors"
    safetensors.torch.save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    found = loaded_by_library(sdxl(), "kohya", path)
    torch.testing.assert_close(answer(found), answer(model), rtol=1e-4, atol=1e-5)
    again = read_again(sdxl(), path, **settings)
    torch.testing.assert_close(answer(again.modules["net"]), answer(model), rtol=1e-4, atol=1e-5)
