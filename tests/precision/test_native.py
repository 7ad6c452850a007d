"""The native mode: dtypes per block, no scaler, gradients made finite, and only for models that can."""

from __future__ import annotations

import pytest
import torch

from mpt.errors import ConfigError
from mpt.seams import loss_scales
from mpt.systems.stylegan2.nn.stylegan2 import SynthesisBlock
from mpt.systems.stylegan2.tasks.stylegan2 import StyleGan2
from tests.tasks.generative import build, take_step


def test_blocks_of_generator_average_and_discriminator_get_the_dtype() -> None:
    run = build("stylegan2", {"mode": "native", "dtype": "float16"})
    assert loss_scales(run.precision) == {}
    for name in ("gen", "gen_ema"):
        blocks = [m for m in run.task.modules[name].modules() if isinstance(m, SynthesisBlock)]
        assert [block.half_dtype for block in blocks] == [
            torch.float32,
            torch.float16,
            torch.float16,
        ]
    assert all(p.dtype == torch.float32 for p in run.task.modules["gen"].parameters())
    assert all(done.finite for done in take_step(run).values())


def test_gradients_that_overflowed_are_made_finite_and_the_step_is_taken() -> None:
    run = build("stylegan2", "native")
    task = run.task
    assert isinstance(task, StyleGan2)
    phase = run.phases[0]
    parameter = task.gen.synthesis.constant
    before = parameter.detach().clone()
    parameter.grad = torch.full_like(parameter, float("inf"))
    parameter.grad[0, 0, 0] = float("nan")
    stats = run.precision.step(phase, None)
    assert not stats.skipped
    assert parameter.grad[0, 0, 0] == 0
    assert parameter.grad[0, 0, 1] == 1e5
    assert torch.isfinite(parameter).all()
    assert not torch.equal(parameter, before)


def test_a_model_without_a_half_precision_of_its_own_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"native is for models with a half precision of their own.*Use amp or bf16",
    ):
        build("vanilla_gan", "native")


def test_a_loss_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss_scale"):
        build("stylegan2", {"mode": "native", "loss_scale": 128.0})
