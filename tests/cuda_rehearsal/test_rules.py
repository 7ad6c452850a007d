"""The pretend device refuses what CUDA's kernels refuse, and notes what is slow or does not repeat."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from tests.cuda_rehearsal.torch_cuda import installed

functional = nn.functional


def on_card(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, device="cuda", dtype=dtype)


REFUSED_IN_INTEGERS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "addmm_cuda": lambda dtype: on_card(2, 2, dtype=dtype) @ on_card(2, 2, dtype=dtype),
    "baddbmm_cuda": lambda dtype: torch.bmm(
        on_card(1, 2, 2, dtype=dtype), on_card(1, 2, 2, dtype=dtype)
    ),
    "addmv_impl_cuda": lambda dtype: on_card(2, 2, dtype=dtype) @ on_card(2, dtype=dtype),
    "dot": lambda dtype: torch.dot(on_card(2, dtype=dtype), on_card(2, dtype=dtype)),
    "convolution_cuda": lambda dtype: functional.conv2d(
        on_card(1, 1, 4, 4, dtype=dtype), on_card(1, 1, 3, 3, dtype=dtype)
    ),
    "avg_pool2d_out_cuda_frame": lambda dtype: functional.avg_pool2d(
        on_card(1, 1, 4, 4, dtype=dtype), 2
    ),
    "max_pool2d_with_indices_out_cuda_frame": lambda dtype: functional.max_pool2d(
        on_card(1, 1, 4, 4, dtype=dtype), 2
    ),
}


@pytest.mark.parametrize("words", REFUSED_IN_INTEGERS)
def test_what_has_no_kernel_for_integers_is_refused(words: str) -> None:
    run = REFUSED_IN_INTEGERS[words]
    with pytest.raises(NotImplementedError, match=f"\"{words}\" not implemented for 'Long'"):
        run(torch.int64)
    assert run(torch.float32).is_cuda


def test_bytes_are_not_resized_bilinearly() -> None:
    image = on_card(1, 3, 4, 4, dtype=torch.uint8)
    assert functional.interpolate(image, scale_factor=2.0).dtype == torch.uint8  # nearest
    with pytest.raises(NotImplementedError, match="not implemented for 'Byte'"):
        functional.interpolate(image, scale_factor=2.0, mode="bilinear")
    with pytest.raises(NotImplementedError, match="'CUDA' backend"):
        torch.histogram(on_card(4), 2)


def test_gradient_scaling_takes_no_number_of_the_host() -> None:
    found, inverse = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    unscale = torch._amp_foreach_non_finite_check_and_unscale_
    unscale([on_card(2)], found, inverse)
    with pytest.raises(RuntimeError, match=r"inv_scale must be a CUDA tensor"):
        unscale([on_card(2)], found, torch.tensor(1.0))
    with pytest.raises(RuntimeError, match=r"found_inf must be a CUDA tensor|two devices"):
        unscale([on_card(2)], torch.tensor(0.0), inverse)
    with pytest.raises(RuntimeError, match=r"inv_scale must be a float tensor"):
        unscale([on_card(2)], found, inverse.half())
    with pytest.raises(RuntimeError, match=r"growth_tracker must be a CUDA tensor|two devices"):
        torch._amp_update_scale_(inverse, torch.tensor(0, dtype=torch.int32), found, 2.0, 0.5, 2000)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_operators_that_add_in_any_order_are_refused_under_deterministic_algorithms() -> None:
    image = on_card(1, 1, 4, 4).requires_grad_()
    grid = torch.zeros(1, 2, 2, 2, device="cuda")

    def sample() -> None:
        functional.grid_sample(image, grid, align_corners=False).sum().backward()

    calls: tuple[Callable[[], object], ...] = (
        *(sample, lambda: functional.pad(image, (1, 1, 1, 1), mode="reflect").sum().backward()),
        *(
            lambda: on_card(4).cumsum(0),
            lambda: on_card(4).histc(2),
            lambda: on_card(2, 4).median(1),
        ),
        lambda: torch.bincount(on_card(4, dtype=torch.int64), weights=on_card(4)),
    )
    for call in calls:
        with installed().notes.listen("order") as found:
            call()
        assert len(found) == 1
        with (
            deterministic(),
            pytest.raises(RuntimeError, match="does not have a deterministic implementation"),
        ):
            call()
    with deterministic():
        on_card(4, dtype=torch.int64).cumsum(0)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        on_card(2, 2) @ on_card(2, 2)
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]
        with pytest.raises(RuntimeError, match="CUBLAS_WORKSPACE_CONFIG"):
            on_card(2, 2) @ on_card(2, 2)


def test_linear_algebra_and_some_losses_make_the_host_wait() -> None:
    square = torch.eye(3, device="cuda") * 2
    chances, labels = on_card(5, 1, 3).log_softmax(-1), on_card(1, 2, dtype=torch.int64)
    with installed().notes.listen() as waits:
        torch.linalg.inv(square)
        torch.linalg.svd(square)
        torch.linalg.eigh(square)
        square.histc(4)
        torch.multinomial(on_card(4), 1)
        functional.ctc_loss(chances, labels, (5,), (2,))
    assert len({wait.line for wait in waits}) == 6, [str(wait) for wait in waits]
    with installed().notes.listen() as waits:
        torch.linalg.inv_ex(square)
        square.histc(4, 0.0, 3.0)
        torch.multinomial(on_card(4), 2, replacement=True)
    assert not waits


def test_float64_is_noted_and_one_number_of_it_is_not() -> None:
    with installed().notes.listen("float64") as found:
        on_card(4).mul(torch.tensor(2.0, dtype=torch.float64))
        on_card(4).double().mul(2)
    (note,) = found
    assert note.what == "aten::mul.Tensor"


def test_products_are_noted_by_what_they_round_to() -> None:
    image, weight = on_card(1, 1, 4, 4), on_card(1, 1, 3, 3)
    for allowed, expected in ((True, "tf32"), (False, "float32")):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
        with installed().notes.listen("float32", "tf32") as found:
            functional.conv2d(image, weight)
            on_card(2, 2) @ on_card(2, 2)
            on_card(2, 2).half() @ on_card(2, 2).half()
        assert [note.kind for note in found] == [expected] * 2


@pytest.mark.cards("rtx2060")
def test_a_card_without_tensorfloat_does_not_round_to_it() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    with installed().notes.listen("float32", "tf32") as found:
        on_card(2, 2) @ on_card(2, 2)
    assert [note.kind for note in found] == ["float32"]


def test_a_convolution_of_two_layouts_is_noted() -> None:
    image, weight = on_card(1, 3, 4, 4), on_card(2, 3, 3, 3)
    last = torch.channels_last
    with installed().notes.listen("layout") as found:
        functional.conv2d(image, weight)
        functional.conv2d(image.to(memory_format=last), weight.to(memory_format=last))
    assert not found
    with installed().notes.listen("layout") as found:
        functional.conv2d(image, weight.to(memory_format=last))
    assert [note.what for note in found] == ["an image that is not channels last"]
