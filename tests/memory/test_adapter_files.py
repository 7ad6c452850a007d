"""Adapters in files of PEFT, diffusers and kohya: the libraries compute with them what mpt computes."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from mpt import vision_ops
from mpt.errors import CheckpointError, ConfigError
from mpt.memory.adapters.layers import AdaptedConv2d, fold_all
from mpt.memory.adapters.names import flat, places
from mpt.memory.adapters.reading import load_adapters, read_adapters
from mpt.memory.adapters.writing import FORMATS, write
from mpt.memory.lora import Lora, Settings
from mpt.seams import Precision, Task

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4, "targets": ["attention"]},
    "rank stabilised": {"rank": 4, "alpha": 3, "rank_stabilised": True, "targets": ["linear"]},
    "patterns": {
        "rank": 4,
        "ranks": {"*.attn1.*": 2},
        "alphas": {"*.to_v": 5},
        "targets": ["attention"],
    },
    "convolutions": {"rank": 2, "targets": ["attention", "convolutions"]},
    "dora": {"rank": 4, "dora": True, "targets": ["attention"]},
}


class Plain(Task):
    def __init__(self, **networks: nn.Module) -> None:
        self.modules = self.trainable = networks


def diffusers() -> Any:
    """Return the library, with its deprecations silent."""
    vision_ops.import_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("peft", reason="peft is not installed")
        return pytest.importorskip("diffusers", reason="diffusers is not installed")


def unet() -> Any:
    torch.manual_seed(0)
    return (
        diffusers()
        .UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=12,
            attention_head_dim=4,
            norm_num_groups=4,
        )
        .eval()
    )


def transformer() -> Any:
    torch.manual_seed(0)
    return (
        diffusers()
        .FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=12,
            pooled_projection_dim=12,
            axes_dims_rope=[4, 4, 8],
        )
        .eval()
    )


@torch.no_grad()
def answer(model: Any) -> Tensor:
    torch.manual_seed(1)
    if "Flux" in type(model).__name__:
        ids = torch.zeros(4, 3)
        made = model(
            torch.randn(1, 4, 4),
            encoder_hidden_states=torch.randn(1, 4, 12),
            pooled_projections=torch.randn(1, 12),
            timestep=torch.tensor([0.5]),
            img_ids=ids,
            txt_ids=ids,
        )
    else:
        made = model(torch.randn(2, 4, 8, 8), 3, torch.randn(2, 5, 12))
    return made.sample  # type: ignore[no-any-return]


def adapted(model: Any, **settings: Any) -> Plain:
    """Return a task whose network has adapters that change what it computes."""
    task = Plain(net=model)
    Lora(Settings(full=[], **settings)).apply(task, Precision())
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.3)
            if name.endswith("lora_magnitude"):
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape))
    return task


def written(task: Plain, wanted: str, folder: Path) -> Path:
    path = folder / ("peft" if wanted == "peft" else "lora.safetensors")
    write(wanted, list(places(task.modules)), path, {})
    return path


def loaded_by_library(model: Any, wanted: str, path: Path) -> Any:
    """Return the plain model with the file's adapters, put there by PEFT or diffusers."""
    if wanted == "peft":
        import peft

        return peft.PeftModel.from_pretrained(model, str(path)).eval()
    library = diffusers()
    name = "unet" if "UNet" in type(model).__name__ else "transformer"
    pipeline = {"unet": library.StableDiffusionPipeline, "transformer": library.FluxPipeline}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pipeline.lora_state_dict(str(path), unet_config=model.config, return_alphas=True)
        state, alphas = found[0], found[1]
        if name == "unet":
            pipeline.load_lora_into_unet(state, alphas, model)
        else:
            pipeline.load_lora_into_transformer(state, alphas, model)
    return model


@pytest.mark.parametrize("wanted", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_library_computes_what_the_run_does(kind: str, wanted: str, tmp_path: Path) -> None:
    if kind == "dora" and wanted == "kohya":
        pytest.skip("diffusers leaves dora_scale out of kohya's files")
    model, plain = unet(), unet()
    before = answer(plain)
    task = adapted(model, **KINDS[kind])
    expected = answer(model)
    assert float((expected - before).abs().max()) > 0.01
    path = written(task, wanted, tmp_path)
    found = loaded_by_library(plain, wanted, path)
    torch.testing.assert_close(answer(found), expected, rtol=1e-4, atol=1e-5)
    again = adapted(unet(), **KINDS[kind])
    with torch.no_grad():
        for parameter in (p for n, p in again.modules["net"].named_parameters() if "lora_b" in n):
            parameter.zero_()
    assert "adapters from" in load_adapters(again.modules, read_adapters(path))
    torch.testing.assert_close(answer(again.modules["net"]), expected, rtol=1e-4, atol=1e-5)
    fold_all(task.modules)
    merged = unet()
    merged.load_state_dict(model.state_dict())
    torch.testing.assert_close(answer(merged), expected, rtol=1e-4, atol=1e-5)


def test_a_transformer_of_flux_goes_to_diffusers_and_back(tmp_path: Path) -> None:
    model = transformer()
    task = adapted(model, rank=4, targets=["attention"])
    path = written(task, "diffusers", tmp_path)
    found = loaded_by_library(transformer(), "diffusers", path)
    torch.testing.assert_close(answer(found), answer(model), rtol=1e-4, atol=1e-5)
    other = adapted(
        diffusers().DiTTransformer2DModel(2, 8, num_layers=1, sample_size=4, norm_num_groups=1),
        rank=2,
    )
    with pytest.raises(ConfigError, match=r"DiTTransformer2DModel, for which kohya has no names"):
        written(other, "kohya", tmp_path)


def test_a_file_that_peft_wrote_is_read(tmp_path: Path) -> None:
    diffusers()
    import peft

    model = unet()
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["to_q", "to_v"],
        rank_pattern={"attn2.to_q": 2},
    )
    theirs = peft.get_peft_model(model, config).eval()
    torch.manual_seed(3)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(str(tmp_path))
    ours = unet()
    task = Plain(net=ours)
    settings = {"rank": 4, "ranks": {"*.attn2.to_q": 2}, "targets": ["*.to_q", "*.to_v"]}
    Lora(Settings(full=[], **settings)).apply(task, Precision())
    load_adapters(task.modules, read_adapters(tmp_path))
    torch.testing.assert_close(answer(ours), answer(theirs), rtol=1e-4, atol=1e-5)


class Net(nn.Module):
    """A network of no library."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = (
            nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"),
            nn.Linear(6, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.conv(x).mean((2, 3)))
        return y


def small(tmp_path: Path, wanted: str = "peft", **settings: Any) -> tuple[Plain, Path]:
    torch.manual_seed(0)
    task = adapted(Net(), **{"rank": 2, "targets": ["linear", "convolutions"], **settings})
    return task, written(task, wanted, tmp_path)


def test_a_convolution_with_its_own_padding_is_adapted_and_folded() -> None:
    torch.manual_seed(0)
    task = adapted(Net(), rank=2, dora=True, targets=["convolutions"])
    net = task.modules["net"]
    assert type(net.conv) is AdaptedConv2d
    assert type(net.linear) is nn.Linear
    image = torch.rand(2, 3, 5, 5)
    before = net(image)
    fold_all(task.modules)
    torch.testing.assert_close(net(image), before)


def test_others_may_read_a_file_as_far_as_the_umask_lets_them(tmp_path: Path) -> None:
    _, folder = small(tmp_path)
    (tmp_path / "plain").touch()
    usual = (tmp_path / "plain").stat().st_mode
    assert (folder / "adapter_model.safetensors").stat().st_mode == usual


def test_several_networks_are_no_peft_folder(tmp_path: Path) -> None:
    task = Plain(one=Net(), two=Net())
    Lora(Settings(rank=2, full=[], targets=["linear"])).apply(task, Precision())
    with pytest.raises(ConfigError, match="one, two have some; use --to diffusers or --to kohya"):
        written(task, "peft", tmp_path)


def test_what_does_not_fit_is_refused_in_one_line_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    task, path = small(tmp_path)
    with pytest.raises(ConfigError, match="net is a Net, no model of diffusers; use --to peft"):
        written(task, "diffusers", tmp_path)
    other = adapted(Net(), rank=3, targets=["linear", "convolutions"])
    with pytest.raises(
        CheckpointError, match=r"has rank 2, and memory.lora gives it 3; set memory.lora.rank=2"
    ):
        load_adapters(other.modules, read_adapters(path))
    few = adapted(Net(), rank=2, targets=["linear"])
    with pytest.raises(
        CheckpointError, match=r"1 of the 2 adapters .* base_model.model.conv; memory.lora.targets"
    ):
        load_adapters(few.modules, read_adapters(path))
    with pytest.raises(CheckpointError, match="it is of another model"):
        load_adapters(
            {"net": adapted(nn.Sequential(nn.Linear(2, 2)), rank=2).modules["net"]},
            read_adapters(path),
        )
    dora = adapted(Net(), rank=2, dora=True, targets=["linear", "convolutions"])
    with pytest.raises(CheckpointError, match="is not DoRA: leave dora out"):
        load_adapters(dora.modules, read_adapters(path))
    with pytest.raises(CheckpointError, match="there is no file"):
        read_adapters(tmp_path / "nothing.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="is not a safetensors file, or damaged"):
        read_adapters(tmp_path / "torn.safetensors")
    both = {"lora_unet_linear": (4, 6), "lora_te_text_model_q": (4, 4)}
    tensors = {f"{name}.lora_down.weight": torch.zeros(2, sizes[1]) for name, sizes in both.items()}
    tensors |= {f"{name}.lora_up.weight": torch.zeros(sizes[0], 2) for name, sizes in both.items()}
    safetensors.torch.save_file(tensors, str(tmp_path / "both.safetensors"))
    with pytest.raises(
        CheckpointError, match=r"lora_te_text_model_q; text encoders are not trained here"
    ):
        load_adapters(few.modules, read_adapters(tmp_path / "both.safetensors"))
    half = {"a.lora_down.weight": torch.zeros(2, 3)}
    safetensors.torch.save_file(half, str(tmp_path / "half.safetensors"))
    with pytest.raises(CheckpointError, match="has only half of the adapter a"):
        read_adapters(tmp_path / "half.safetensors")
    settings = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**settings, "peft_type": "LOHA"}))
    with pytest.raises(CheckpointError, match="adapters of the kind LOHA"):
        read_adapters(path)


def test_dora_begins_as_the_plain_network_and_trains_its_magnitude() -> None:
    torch.manual_seed(0)
    plain = Net()
    net = copy.deepcopy(plain)
    Lora(Settings(rank=2, dora=True, full=[], targets=["linear", "convolutions"])).apply(
        Plain(net=net), Precision()
    )
    image = torch.rand(2, 3, 5, 5)
    torch.testing.assert_close(net(image), plain(image))
    net(image).square().sum().backward()
    assert net.linear.lora_magnitude.grad is not None
    assert net.linear.weight.grad is None


def test_two_text_encoders_are_told_apart_whatever_their_library_calls_its_layers() -> None:
    keys = {
        "text_encoder.text_model.encoder.q": "te1_encoder_q",
        "text_encoder.encoder.q": "te1_encoder_q",
        "lora_te_text_model_encoder_q": "te1_encoder_q",
        "lora_te1_text_model_encoder_q": "te1_encoder_q",
        "text_encoder_2.text_model.encoder.q": "te2_encoder_q",
        "lora_te2_text_model_encoder_q": "te2_encoder_q",
        "lora_te2_text_projection": "te2_text_projection",
        "lora_unet_text_model_q": "text_model_q",
    }
    assert {key: flat(key) for key in keys} == keys
