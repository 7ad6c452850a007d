import math
from typing import Any

import pytest
import torch
from torch import nn

from mpt.precision.shared.scaler import LossScaler

pytestmark = pytest.mark.tier("fast")


def linear_with_gradient(value: float, dtype: torch.dtype = torch.float32) -> nn.Linear:
    module = nn.Linear(2, 1, bias=False).to(dtype)
    module.weight.grad = torch.full_like(module.weight, value)
    return module


def test_scale_follows_torch_grad_scaler_step_by_step() -> None:
    ours = LossScaler(2.0**16, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    overflows = [
        False,
        False,
        True,
        False,
        False,
        False,
        False,
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    for overflow in overflows:
        module = linear_with_gradient(math.inf if overflow else 512.0)
        twin = linear_with_gradient(math.inf if overflow else 512.0)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
        theirs.scale(torch.zeros(()))
        theirs.unscale_(optimizer)
        found = ours.unscale(module.parameters())
        assert found == overflow
        if not overflow:
            assert torch.equal(module.weight.grad, twin.weight.grad)
        theirs.step(optimizer)
        theirs.update()
        ours.update(found)
        assert ours.scale == theirs.get_scale()


def test_scale_stops_at_its_floor_where_torch_reaches_zero() -> None:
    ours = LossScaler(min_scale=2.0)
    theirs = torch.amp.GradScaler("cpu")
    for _ in range(170):
        ours.update(True)
        module = linear_with_gradient(math.inf)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        theirs.scale(torch.zeros(()))
        theirs.step(optimizer)
        theirs.update()
    assert ours.scale == 2.0
    assert ours.overflows_at_floor == 170 - 15
    assert theirs.get_scale() == 0.0


def test_scale_stops_at_its_ceiling() -> None:
    scaler = LossScaler(2.0**23, growth_interval=1, max_scale=2.0**24)
    for _ in range(5):
        scaler.update(False)
    assert scaler.scale == 2.0**24


def test_static_scale_never_moves() -> None:
    scaler = LossScaler(128.0, dynamic=False)
    scaler.update(True)
    scaler.update(False)
    assert scaler.scale == 128.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_unscaling_divides_gradients_of_every_dtype(dtype: torch.dtype) -> None:
    scaler = LossScaler(256.0)
    module = linear_with_gradient(512.0, dtype)
    assert scaler.unscale(module.parameters()) is False
    assert torch.equal(module.weight.grad, torch.full_like(module.weight, 2.0))


def test_bfloat16_gradients_do_without_the_kernel_that_cuda_has_not_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernel(gradients: list[torch.Tensor], *_: torch.Tensor) -> None:
        raise NotImplementedError("not implemented for 'BFloat16'")

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", kernel)
    scaler = LossScaler(256.0, dynamic=False)
    for value, is_bad in ((512.0, False), (math.inf, True), (math.nan, True)):
        module = linear_with_gradient(value, torch.bfloat16)
        assert scaler.unscale(module.parameters()) is is_bad
        assert is_bad or torch.equal(module.weight.grad, torch.full_like(module.weight, 2.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_unscaling_on_a_gpu_finds_what_is_not_finite_in_every_dtype(dtype: torch.dtype) -> None:
    scaler = LossScaler(256.0)
    for value, is_bad in ((512.0, False), (math.inf, True)):
        module = linear_with_gradient(value, dtype).cuda()
        module.weight.grad = torch.full_like(module.weight, value)
        assert scaler.unscale(module.parameters()) is is_bad
        assert is_bad or torch.equal(module.weight.grad, torch.full_like(module.weight, 2.0))


def test_state_returns_half_grown_counters() -> None:
    scaler = LossScaler(growth_interval=5)
    scaler.update(True)
    scaler.update(False)
    scaler.update(False)
    twin = LossScaler(growth_interval=5)
    twin.load_state_dict(scaler.state_dict())
    for _ in range(3):
        scaler.update(False)
        twin.update(False)
    assert twin.scale == scaler.scale == 2.0**16


def test_scaled_loss_is_float32_since_the_first_scale_is_beyond_float16() -> None:
    loss = LossScaler().multiply(torch.tensor(2.0, dtype=torch.float16))
    assert loss.dtype == torch.float32
    assert float(loss) == 2.0**17


def restored(before: LossScaler, **now: Any) -> LossScaler:
    scaler = LossScaler(**now)
    scaler.load_state_dict(before.state_dict())
    return scaler


def grown(scaler: LossScaler, clean: int = 10) -> LossScaler:
    for _ in range(clean):
        scaler.update(False)
    return scaler


def test_settings_changed_at_a_resume_hold_from_there_on() -> None:
    # doubled twice; three clean steps since
    before = grown(LossScaler(256.0, growth_interval=4), 11)
    assert before.scale == 1024.0
    assert restored(before, scale=256.0, growth_interval=4).scale == 1024.0
    assert restored(before, scale=256.0, max_scale=512.0).scale == 512.0
    assert restored(before, scale=256.0, min_scale=4096.0).scale == 4096.0
    assert restored(before, scale=64.0).scale == 64.0  # another init_scale was asked for
    assert restored(before, scale=128.0, dynamic=False).scale == 128.0
    shorter = grown(restored(before, scale=256.0, growth_interval=2), 1)
    assert shorter.scale == 2048.0


def test_a_scale_that_was_constant_becomes_dynamic_at_its_own_start() -> None:
    scaler = restored(LossScaler(128.0, dynamic=False), scale=256.0)
    assert scaler.scale == 256.0
    assert scaler.dynamic
    scaler.update(True)
    assert scaler.scale == 128.0


def test_a_state_of_an_older_version_is_read() -> None:
    scaler = LossScaler()
    scaler.load_state_dict({"scale": 1024.0, "clean_steps": 7, "overflows_at_floor": 0})
    assert (scaler.scale, scaler.clean_steps) == (1024.0, 7)
