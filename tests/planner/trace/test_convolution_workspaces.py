"""Workspaces that cuDNN asks for: sizes of an H100's allocator, and what a plan makes of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpt.planner.facts.gpus import find_gpu
from mpt.planner.plans.plan import workspace_bytes
from mpt.planner.trace.convolution_workspaces import workspaces
from mpt.planner.trace.trace import Storage, Trace, with_workspaces
from mpt.planner.trace.unseen import unseen_on

pytestmark = pytest.mark.tier("fast")
MIB = 2**20


def of(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def asked(
    source: Tensor, weight: Tensor, *, stride: int = 1, groups: int = 1, backward: bool = True
) -> list[int]:
    side, window = source.shape[-1], weight.shape[-1]
    sides = [(side + 2 * (window // 2) - window) // stride + 1] * 2
    output = of(len(source), len(weight), *sides, dtype=source.dtype)
    rest = ([stride] * 2, [window // 2] * 2, [1, 1], False, [0, 0], groups)
    if not backward:
        return list(workspaces("aten::convolution", (source, weight, None, *rest), output, 132))
    args = (output, source, weight, [0], *rest, [True, True, False])
    return list(workspaces("aten::convolution_backward", args, None, 132))


def test_each_product_of_a_contiguous_convolution_copies_its_three_tensors() -> None:
    source, weight = of(16, 512, 38, 38), of(512, 512, 3, 3)
    copies = 2 * (2 * 16 * 512 * 38 * 38 + 512 * 512 * 9)
    assert asked(source, weight, backward=False) == [copies]
    assert asked(source, weight) == [copies, copies]


def test_the_weights_gradient_is_divided_among_the_multiprocessors() -> None:
    source, weight = of(128, 128, 28, 28, dtype=torch.bfloat16), of(128, 128, 3, 3)
    of_input, of_weight = asked(source, weight)
    assert of_weight - of_input == 14 * 128 * 1152 * 4


def test_channels_of_a_group_are_made_up_to_32_in_half() -> None:
    source, weight = of(64, 384, 28, 28), of(384, 48, 3, 3)
    [found] = asked(source, weight, groups=8, backward=False)
    assert found == 2 * 2 * 64 * 384 * 28 * 28 * 64 // 48 + 2 * 384 * 48 * 9


@pytest.mark.parametrize(
    ("source", "weight", "groups"),
    [
        (of(8, 64, 32, 32), of(128, 64, 1, 1), 1),
        (of(8, 64, 32, 32), of(64, 1, 3, 3), 64),
        (of(8, 64, 32, 32).to(memory_format=torch.channels_last), of(64, 64, 3, 3), 1),
        (of(8, 3, 32, 32, dtype=torch.float32), of(24, 3, 3, 3, dtype=torch.float32), 1),
    ],
)
def test_others_ask_for_nothing_forward(source: Tensor, weight: Tensor, groups: int) -> None:
    assert asked(source, weight, groups=groups, backward=False) == []


def test_a_strided_window_of_1x1_copies() -> None:
    source, weight = of(8, 64, 32, 32), of(128, 64, 1, 1)
    assert asked(source, weight, stride=2, backward=False) == [
        2 * (8 * 64 * 1024 + 8 * 128 * 256 + 64 * 128)
    ]


def asked_on(card: str, source: Tensor, weight: Tensor, stride: int = 1) -> list[int]:
    output = of(len(source), len(weight), *[side // stride for side in source.shape[-2:]])
    rest = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], 1)
    args = (output.to(source.dtype), source, weight, [0], *rest, [True, True, False])
    return list(unseen_on(find_gpu(card)).workspaces("aten::convolution_backward", args, None))


def test_float32_without_tf32_is_transformed_by_winograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 x 64 tiles of 4 x 4, 36 numbers for each and channel: a U-Net on an H100 peaked by 6,913 MiB."""
    wide, kernel = (
        of(64, 128, 256, 256, dtype=torch.float32),
        of(64, 128, 3, 3, dtype=torch.float32),
    )
    transformed = 4 * 36 * (64 * 64 * 64 * (128 + 64) + 128 * 64)
    assert transformed // MIB == 6913
    assert asked_on("v100", wide, kernel) == [transformed, transformed]
    assert asked_on("gtx 1080", wide, kernel) == [transformed, transformed]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    in_tf32 = asked_on("h100", wide, kernel)
    assert max(in_tf32) < transformed // 2
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert asked_on("h100", wide, kernel) == [transformed, transformed]
    assert asked_on("h100", wide.half(), kernel.half())[0] == sum(
        one.nbytes for one in (of(64, 64, 256, 256), wide.half(), kernel.half())
    )


def test_winograd_takes_tiles_that_stand_out_and_dense_windows_of_3x3_alone() -> None:
    image = of(2, 16, 7, 9, dtype=torch.float32)

    def in_full(window: int = 3, stride: int = 1, dilation: int = 1, groups: int = 1) -> list[int]:
        weight = of(8, 16 // groups, window, window, dtype=torch.float32)
        sides = [-(-side // stride) for side in image.shape[2:]]
        rest = ([stride] * 2, [1, 1], [dilation] * 2, False, [0, 0], groups)
        output = of(2, 8, *sides, dtype=torch.float32)
        args = (image, weight, None, *rest)
        return list(workspaces("aten::convolution", args, output, 132, in_tf32=False))

    tiles = 2 * 2 * 3
    assert in_full() == [36 * 4 * (tiles * (16 + 8) + 16 * 8)]
    assert in_full(window=1) == in_full(stride=2) == in_full(dilation=2) == in_full(groups=8) == []


def test_a_workspace_adds_what_no_free_block_holds() -> None:
    storages = [Storage(size * MIB, "activations", "", "") for size in (40, 30)]
    trace = Trace(storages, [0, ~0, 1, ~1], workspaces=[(2, 30 * MIB), (3, 50 * MIB)])
    assert workspace_bytes(trace, 40 * MIB) == 50 * MIB
    assert with_workspaces(trace).events == [0, ~0, 2, ~2, 1, 3, ~3, ~1]
    assert workspace_bytes(Trace(storages, [0, ~0, 1, ~1]), 40 * MIB) == 0
