import math

import pytest
import torch
from torch import nn

from mpt.precision.scaler import LossScaler


def linear_with_gradient(value: float, dtype: torch.dtype = torch.float32) -> nn.Linear:
    module = nn.Linear(2, 1, bias=False).to(dtype)
    module.weight.grad = torch.full_like(module.weight, value)
    return module


def test_scale_follows_torch_grad_scaler_step_by_step() -> None:
    ours = LossScaler(2.0**16, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    overflows = [False, False, True, False, False, False, False, True, True, False, False, False, False]
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


def test_bfloat16_gradients_do_without_the_kernel_that_cuda_has_not_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
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
