"""The memory of a step is counted by storage, to the byte, and watching changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpt.run.process.memory_meter import Known, MemoryMeter, MemorySplit, measure_step

pytestmark = pytest.mark.tier("fast")


BATCH, WIDTH = 64, 32
SQUARE = WIDTH * WIDTH
ROWS = BATCH * WIDTH


def network(dtype: torch.dtype = torch.float32, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()]
    return nn.Sequential(*parts).to(dtype)


def known_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], Known]:
    def known() -> Known:
        states = optimizer.state.values() if optimizer else ()
        return {
            "parameters": list(model.parameters()),
            "optimizer_state": [
                value for state in states for value in state.values() if isinstance(value, Tensor)
            ],
        }

    return known


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)]
)
def test_the_parts_of_a_small_network_are_exact(dtype: torch.dtype, size: int) -> None:
    model = network(dtype)
    batch = torch.randn(BATCH, WIDTH, dtype=dtype)
    split = measure_step(lambda: model(batch).sum().backward(), known_of(model))
    assert split.parameters == 3 * SQUARE * size
    # The peak is in the last layer's backward: the batch and two tanh outputs are still saved, the third was let go;
    # the gradients of this layer's output, input and weight are there, and the loss and its gradient, one element each.
    assert split.activations == 3 * ROWS * size
    assert split.gradients == SQUARE * size
    assert split.rest == 2 * ROWS * size + 2 * size
    assert split.peak_bytes == split.parameters + split.gradients + split.activations + split.rest


def test_bfloat16_needs_half_of_what_float32_needs() -> None:
    splits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = network(dtype)
        batch = torch.randn(BATCH, WIDTH, dtype=dtype)
        splits.append(measure_step(lambda m=model, b=batch: m(b).sum().backward(), known_of(model)))
    for name in ("peak_bytes", "parameters", "activations"):
        assert getattr(splits[0], name) == 2 * getattr(splits[1], name)


def test_gradients_and_optimizer_state_made_within_the_step_are_recognised() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    batch = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(batch).sum().backward()
        optimizer.step()

    for _ in range(2):  # the first step makes the state, the second has it from the start
        split = measure_step(step, known_of(model, optimizer))
    # two moments and a step count of each
    assert split.optimizer_state == 2 * 3 * SQUARE * 4 + 3 * 4
    assert split.parameters == 3 * SQUARE * 4
    tiny_batch = torch.randn(1, WIDTH)

    def tiny_step() -> None:
        model(tiny_batch).sum().backward()
        optimizer.step()

    split = measure_step(tiny_step, known_of(model, optimizer))
    assert split.gradients == 3 * SQUARE * 4  # kept from the step before and added to


def test_gradients_that_do_not_outlive_the_step_are_gradients_nevertheless() -> None:
    model = network()
    batch = torch.randn(1, WIDTH)

    def step() -> None:
        model(batch).sum().backward()
        _ = torch.empty(100_000)  # the peak is here
        model.zero_grad(set_to_none=True)

    split = measure_step(step, known_of(model))
    assert split.gradients == 3 * SQUARE * 4
    assert split.rest == 400_000 + batch.nbytes


def test_views_and_ties_count_once() -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def step() -> None:
        parts = [weight[i] for i in range(WIDTH)]
        kept.append(torch.stack(parts).view(-1).expand(7, -1))

    kept: list[Tensor] = []
    split = measure_step(step, lambda: {"parameters": [weight, weight.view(-1), weight.t()]})
    assert split.parameters == SQUARE * 4
    assert split.peak_bytes == 2 * SQUARE * 4


def test_what_is_freed_is_not_counted_and_the_peak_is_not_the_end() -> None:
    def step() -> None:
        for _ in range(10):
            torch.zeros(1000).add_(1)
        torch.zeros(500)

    split = measure_step(step, dict)
    assert split == MemorySplit("live tensors", 4000, 0, 0, 0, 0, 4000)


def test_a_resized_storage_counts_by_its_new_size() -> None:
    def step() -> None:
        value = torch.zeros(10)
        value.resize_(1000)

    assert measure_step(step, dict).peak_bytes == 4000


def test_recomputation_lowers_the_peak() -> None:
    model = network(layers=16)
    batch = torch.randn(512, WIDTH)
    one = batch.nbytes

    def plain() -> None:
        model(batch).sum().backward()

    def recomputed() -> None:
        value = batch
        for start in range(0, 32, 8):
            value = checkpoint(model[start : start + 8], value, use_reentrant=False)
        value.sum().backward()

    full, less = measure_step(plain, known_of(model)), measure_step(recomputed, known_of(model))
    assert full.activations == 16 * one
    # Four segments' inputs and one segment of four layers, instead of sixteen layers.
    assert less.peak_bytes < full.peak_bytes - 6 * one


def test_watching_changes_no_gradient_and_no_random_number() -> None:
    gradients = []
    for watched in (False, True):
        model = nn.Sequential(
            nn.Linear(8, 8),
            nn.Dropout(0.5),
            nn.BatchNorm1d(8),
            nn.ReLU(inplace=True),
            nn.Linear(8, 1),
        )
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-1, 1)
        batch = torch.randn(16, 8)

        def step(model: nn.Module = model, batch: Tensor = batch) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch).square().mean()
            loss.backward()

        _ = measure_step(step, known_of(model)) if watched else step()
        gradients.append([*(p.grad for p in model.parameters()), *model.buffers(), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_second_order_gradients_pass_through() -> None:
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def step() -> None:
        (first,) = torch.autograd.grad(weight.pow(3).sum(), weight, create_graph=True)
        first.sum().backward()

    measure_step(step, lambda: {"parameters": [weight]})
    assert torch.equal(weight.grad, torch.tensor([12.0, 18.0]))


def test_a_failing_step_leaves_nothing_behind() -> None:
    model = network()
    with pytest.raises(ZeroDivisionError), MemoryMeter(known_of(model)):
        _ = 1 / 0
    assert not model[0].weight._post_accumulate_grad_hooks
    model(torch.randn(2, WIDTH)).sum().backward()
    with MemoryMeter(known_of(model)) as meter:
        model(torch.randn(2, WIDTH))
    assert meter.split.gradients == 3 * SQUARE * 4
    assert meter.split.to_record()["kind"] == "live tensors"
    assert "reserved_bytes" not in meter.split.to_record()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_peak_is_the_allocators() -> None:
    model = network(layers=4).cuda()
    batch = torch.randn(4096, WIDTH, device="cuda")
    split = measure_step(lambda: model(batch).sum().backward(), known_of(model), "cuda")
    assert split.kind == "CUDA allocator"
    assert split.peak_bytes == torch.cuda.max_memory_allocated()
    assert split.parameters == 4 * SQUARE * 4
    assert split.activations > 0
    parts = (
        split.parameters + split.gradients + split.optimizer_state + split.activations + split.rest
    )
    assert parts == split.peak_bytes
    assert split.reserved_bytes is not None
    assert split.reserved_bytes >= split.peak_bytes
