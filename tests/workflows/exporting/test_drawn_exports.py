"""A model, a precision mode and a memory trick are drawn; the run is trained, and its exports infer as it does.

The weights are trained ones: averages, statistics of BatchNorm and adapters have left their start.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.api import train
from mpt.commands import convert
from mpt.commands.convert import Command as ConvertArguments
from mpt.config.checking.precision_names import FLOAT32
from mpt.config.load import load_config
from mpt.errors import ConfigError
from mpt.inference.exported import open_exported
from mpt.inference.half import rebuild
from mpt.inference.inputs import infer_one, needs_inputs
from mpt.inference.trained import Trained, open_trained
from mpt.seams import Inference
from mpt.workflows.exporting.export import drawn_batch

SMALL = {"image_size": 16, "features": 8, "latent_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "small_cnn": {"image_size": 16, "features": 8},
    "dcgan": SMALL,
    "acgan": {"image_size": 16},
    "vae": {"image_size": 8, "latent_size": 8},
    "bigan": {"image_size": 16},
    "stylegan2": {
        "image_size": 16,
        "latent_size": 8,
        "style_size": 8,
        "mapping_layers": 2,
        "channel_base": 128,
        "channel_max": 8,
        "published": True,
    },
}
MODES: tuple[dict[str, Any], ...] = (
    {"mode": "fp32"},
    {"mode": "amp", "dtype": "float16"},
    {"mode": "O2"},
    {"mode": "O3"},
    {"mode": "bf16-sr"},
    {"mode": "bf16-24bit"},
)
ADAPTERS = {"rank": 2, "full": [], "targets": ["*", "convolutions"]}
TRICKS: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "all"},
    {"micro_batch": 2},
    {"lora": ADAPTERS},
    {"lora": {**ADAPTERS, "dora": True}},
    {"lora": ADAPTERS, "low_bit_base": {"format": "nf4", "keep": []}},
    {"prune": 0.5},
)
EXPORTS: dict[str, dict[str, Any]] = {
    "whole.safetensors": {},
    "whole.onnx": {"gate": "900%", "samples": 4},
    "half.safetensors": {"half": True, "dtype": "bfloat16"},
    "half.onnx": {"half": True, "gate": "900%", "samples": 4},
}
ROUNDING = {"whole": 1e-4, "half": 0.2}
"""Of values of about 1: kernels of ONNX Runtime, and weights of eight bits through a dozen layers."""


def drawn(seed: int) -> dict[str, Any]:
    """Return a configuration."""
    draw = random.Random(seed)
    name = draw.choice(list(MODELS))
    return {
        "model": {"name": name, **MODELS[name]},
        "dataset": {"name": "shapes", "size": 16} if name == "stylegan2" else {"name": "digits"},
        "precision": draw.choice(MODES),
        "memory": draw.choice(TRICKS),
        "optimizer": {"name": "adam", "eps": 1e-4},
        "train": {"batch_size": 4, "steps": 3, "evaluate_every": 0, "ema": 0.5},
        "name": "drawn",
        "seed": seed,
    }


def values(trained: Trained) -> list[torch.Tensor]:
    """Return what a run or an export infers."""
    batch = drawn_batch(trained.run) if needs_inputs(trained.run.task) else None
    made: Inference = infer_one(trained, (batch, 2))
    return [one.float() for one in (made.outputs, made.scores, made.tiles) if one is not None]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_exports_of_drawn_trainings_infer_as_their_runs(tmp_path: Path, seed: int) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="ONNX files are written and run with it")
    try:
        run = train(load_config(drawn(seed)), runs=tmp_path).path
    except ConfigError as error:
        pytest.skip(f"refused: {error}")
    plain = ("task.truncation=1",) if hasattr(settings_of(run), "truncation") else ()
    trained = open_trained(str(run), tmp_path, "cpu", plain)
    trained.run = rebuild(trained, FLOAT32)
    expected = values(trained)
    assert expected
    for name, options in EXPORTS.items():
        file = tmp_path / name
        to = file.suffix.removeprefix(".")
        convert.run(ConvertArguments(run=str(run), output=str(file), to=to, **options))
        if not file.exists():  # a graph for each of several networks, which infer together alone
            assert list(tmp_path.glob(f"{file.stem}-*.onnx")), name
            continue
        found = values(open_exported(file, "cpu", plain, ()))
        for one, other in zip(found, expected, strict=True):
            apart = float((one - other).abs().mean() / other.abs().mean().clamp_min(1e-3))
            assert apart <= ROUNDING[file.stem], name


def settings_of(run: Path) -> Any:
    """Return the settings of a run's task."""
    return load_config(run / "config.yaml").task.settings
