#!/usr/bin/env python
"""Steps that know nothing of mpt, planned: live bytes of a plan on a CPU against the same step on real CPU tensors.

    python scripts/plans/own_step_table.py [--only timm] -o docs/benchmarks/own_steps.md

The models are unmodified ones of timm, torchvision, transformers, diffusers, segmentation-models-pytorch and
Ultralytics, with random weights; those whose package is not installed are left out, and listed. Each is planned in a
process of its own, since the fake device stays registered. Sections of the page that follow the table are kept.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.command_line import described
from scripts.plans.live_bytes import live_bytes
from scripts.provenance import made

Step = Callable[[], Any]


def train_step(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
) -> Step:
    """Return a plain step: zero_grad, forward and loss, backward, clipping, the optimizer's step."""
    model.train()
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return value.item()

    return step


def classifier(model: nn.Module, size: int, classes: int) -> Step:
    """Return the step of a classifier of pictures."""

    def loss() -> torch.Tensor:
        return functional.cross_entropy(
            model(torch.randn(2, 3, size, size)), torch.randint(0, classes, (2,))
        )

    return train_step(model, loss)


def timm_resnet() -> Step:
    """timm's resnet18."""
    import timm

    return classifier(timm.create_model("resnet18", num_classes=10), 64, 10)


def timm_vit() -> Step:
    """timm's vit_tiny_patch16_224."""
    import timm

    return classifier(timm.create_model("vit_tiny_patch16_224", num_classes=10), 224, 10)


def timm_convnext() -> Step:
    """timm's convnext_atto."""
    import timm

    return classifier(timm.create_model("convnext_atto", num_classes=10), 64, 10)


def timm_efficientnet() -> Step:
    """timm's efficientnet_b0."""
    import timm

    return classifier(timm.create_model("efficientnet_b0", num_classes=10), 64, 10)


def torchvision_mobilenet() -> Step:
    """torchvision's mobilenet_v3_small."""
    from mpt.vision_ops import import_torchvision

    return classifier(import_torchvision("models").mobilenet_v3_small(num_classes=10), 64, 10)


def torchvision_swin() -> Step:
    """torchvision's swin_t."""
    from mpt.vision_ops import import_torchvision

    return classifier(import_torchvision("models").swin_t(num_classes=10), 64, 10)


def transformers_gpt2() -> Step:
    """transformers' GPT2LMHeadModel."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500))
    ids = torch.randint(0, 500, (2, 64))
    return train_step(model, lambda: model(input_ids=ids, labels=ids).loss)


def transformers_llama() -> Step:
    """transformers' LlamaForCausalLM."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=500, **sizes))
    ids = torch.randint(0, 500, (2, 64))
    return train_step(model, lambda: model(input_ids=ids, labels=ids).loss)


def transformers_bert() -> Step:
    """transformers' BertForSequenceClassification."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = BertForSequenceClassification(BertConfig(vocab_size=500, **sizes))
    ids, labels = torch.randint(0, 500, (2, 32)), torch.tensor([0, 1])
    return train_step(model, lambda: model(input_ids=ids, labels=labels).loss)


def diffusers_unet() -> Step:
    """diffusers' UNet2DModel with DDPM's loss."""
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
                        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                        up_block_types=("AttnUpBlock2D", "UpBlock2D"))  # fmt: skip
    schedule = DDPMScheduler()

    def loss() -> torch.Tensor:
        images, noise = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)
        times = torch.randint(0, 1000, (2,))
        return functional.mse_loss(
            model(schedule.add_noise(images, noise, times), times).sample, noise
        )

    return train_step(model, loss)


def segmentation_unet() -> Step:
    """segmentation-models-pytorch's Unet on a resnet18."""
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet18", encoder_weights=None, classes=4)
    return train_step(
        model,
        lambda: functional.cross_entropy(
            model(torch.randn(2, 3, 64, 64)), torch.randint(0, 4, (2, 64, 64))
        ),
    )


def ultralytics_yolov8() -> Step:
    """Ultralytics' yolov8n with its own loss."""
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel("yolov8n.yaml", verbose=False)
    model.args = get_cfg()
    batch = {
        "img": torch.rand(2, 3, 64, 64),
        "batch_idx": torch.tensor([0.0, 0.0, 1.0]),
        "cls": torch.tensor([[1.0], [2.0], [3.0]]),
        "bboxes": torch.rand(3, 4) * 0.3 + 0.3,
    }
    return train_step(model, lambda: model(batch)[0].sum())


PACKAGES = {
    "timm": "timm",
    "torchvision": "torchvision",
    "transformers": "transformers",
    "diffusers": "diffusers",
    "segmentation": "segmentation_models_pytorch",
    "ultralytics": "ultralytics",
}
STEPS = {
    function.__name__: function
    for function in (timm_resnet, timm_vit, timm_convnext, timm_efficientnet, torchvision_mobilenet, torchvision_swin,
                     transformers_gpt2, transformers_llama, transformers_bert, diffusers_unet, segmentation_unet,
                     ultralytics_yolov8)
}  # fmt: skip


def measure(name: str) -> dict[str, Any]:
    """Return the planned and the measured peak of one step, or why it could not be planned."""
    try:
        [(planned, measured)] = live_bytes(
            ({"where": str(Path(__file__).resolve()), "function": name}, {}), timeout=600
        )
        return {"measured": measured, "planned": planned}
    except RuntimeError as error:
        return {"problem": str(error)[-200:]}


def write_page(rows: dict[str, dict[str, Any]], left_out: list[str]) -> str:
    """Return the page."""
    lines = [
        "# Steps that know nothing of mpt",
        "",
        f"Written by `python scripts/plans/own_step_table.py`, {made()}, torch {torch.__version__}, on a CPU "
        f"({platform.machine()}). Live bytes at the peak of two training steps of unmodified models with random "
        "weights: planned on fake tensors, and measured on real ones.",
        "",
        "| step | planned, bytes | measured, bytes | |",
        "|---|---:|---:|---|",
    ]
    for name, row in rows.items():
        words = STEPS[name].__doc__ or name
        if "problem" in row:
            lines.append(f"| {words.rstrip('.')} | | | {row['problem']} |")
        else:
            equal = (
                "equal"
                if row["planned"] == row["measured"]
                else f"{row['planned'] / row['measured'] - 1:+.2%}"
            )
            lines.append(
                f"| {words.rstrip('.')} | {row['planned']:,} | {row['measured']:,} | {equal} |"
            )
    if left_out:
        lines += ["", f"Not installed here: {', '.join(left_out)}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure each step and write the page."""
    parser = described(__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    there = {prefix for prefix, package in PACKAGES.items() if importlib.util.find_spec(package)}
    rows = {}
    for name in (name for name in STEPS if asked.only in name and name.partition("_")[0] in there):
        rows[name] = measure(name)
        print(name, rows[name], file=sys.stderr)
    page = write_page(
        rows, [package for prefix, package in PACKAGES.items() if prefix not in there]
    )
    if asked.output:
        before = asked.output.read_text("utf-8") if asked.output.exists() else ""
        _, heading, others = before.partition("\n## ")
        asked.output.write_text(page + heading + others, "utf-8")
    else:
        print(page)


if __name__ == "__main__":
    main()
