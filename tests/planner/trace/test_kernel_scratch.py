"""Scratch of single kernels: sizes that an H100's allocator was asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpt.planner.trace.kernel_scratch import scratch_bytes

pytestmark = pytest.mark.tier("fast")
HALF, WHOLE = torch.float16, torch.float32


def of(*shape: int, dtype: torch.dtype = HALF, last: bool = False) -> Tensor:
    made = torch.empty(shape, dtype=dtype, device="meta")
    return made.to(memory_format=torch.channels_last) if last else made


def attention(kind: str, query: Tensor, key: Tensor | None = None) -> int:
    key = query if key is None else key
    args = (query, query, key, key, None, query)
    return scratch_bytes(f"aten::_scaled_dot_product_{kind}_attention_backward", args, None)


@pytest.mark.parametrize(
    ("kind", "query", "bytes_of_it"),
    [
        ("efficient", of(64, 16, 49, 32), 200_704 + 16_793_600),  # MaxViT
        ("efficient", of(64, 12, 197, 64), 605_184 + 50_380_800),  # BEiT
        ("efficient", of(4, 12, 1024, 64, dtype=WHOLE), 2 * 196_608 + 12_582_912 + 12_595_200),
        ("cudnn", of(64, 6, 197, 64), 19_365_888 + 302_592),  # DeiT
    ],
)
def test_attention_adds_up_the_gradient_of_its_queries_in_float32(
    kind: str, query: Tensor, bytes_of_it: int
) -> None:
    assert attention(kind, query) == bytes_of_it


def test_cudnns_attention_has_gradients_of_each_head_where_heads_share_keys() -> None:
    found = attention("cudnn", of(4, 16, 1024, 64), of(4, 4, 1024, 64))
    assert found == 33_816_576  # Mistral


def test_the_backward_pass_of_a_softmax_holds_a_product() -> None:
    plain, turned = of(4, 8, 16, 16), of(4, 8, 16, 16).transpose(2, 3)
    softmax = "aten::_softmax_backward_data"
    assert scratch_bytes(softmax, (plain, plain, -1), plain) == 16_384
    assert scratch_bytes(softmax, (turned, plain, -1), plain) == 2 * 16_384
    assert scratch_bytes("aten::_log_softmax_backward_data", (plain, plain, -1), plain) == 0


def test_kernels_that_read_contiguous_tensors_copy_others() -> None:
    turned = of(4, 8, 16, 16).transpose(2, 3)
    for name in ("_softmax", "_log_softmax", "native_layer_norm"):
        assert scratch_bytes(f"aten::{name}", (turned, -1, False), turned) == 16_384
        assert scratch_bytes(f"aten::{name}", (of(4, 8), -1, False), turned) == 0
    assert scratch_bytes("aten::native_layer_norm_backward", (turned, turned), None) == 32_768
    assert scratch_bytes("aten::roll", (turned, [1, 1, 1], [0, 1, 2]), turned) == 3 * 16_384


def test_pooling_reads_in_the_layout_of_its_input() -> None:
    plain, last = of(2, 8, 4, 4), of(2, 8, 4, 4, last=True)
    pooled = "aten::max_pool2d_with_indices_backward"
    assert [scratch_bytes(pooled, pair, None) for pair in ((last, last), (plain, plain))] == [0, 0]
    assert scratch_bytes(pooled, (plain, last), None) == 512
    assert scratch_bytes(pooled, (last, plain), None) == 512


def test_a_convolution_copies_what_lies_in_another_layout() -> None:
    weight, plain, last = of(8, 8, 3, 3), of(2, 8, 4, 4), of(2, 8, 4, 4, last=True)
    sliced = of(2, 16, 4, 4)[:, ::2]
    forward, backward = "aten::convolution", "aten::convolution_backward"
    assert scratch_bytes(forward, (plain, weight), plain) == 0
    assert scratch_bytes(forward, (sliced, weight), plain) == 512
    assert scratch_bytes(forward, (last, weight), last) == 1152
    assert scratch_bytes(backward, (last, plain, weight), None) == 512
    assert scratch_bytes(backward, (plain, last, weight), None) == 512 + 1152


@pytest.mark.parametrize(
    ("indices", "rows", "width", "bytes_of_it"),
    [
        (4096, 32000, 1024, 18_803_925),  # Mistral
        (8192, 50265, 768, 28_365_221),  # RoBERTa
        (4096, 2050, 768, 7_856_389),  # OPT's places
        (8192, 2, 768, 493_437),  # RoBERTa's kinds of tokens
        (1024, 1024, 768, 1),
    ],
)
def test_the_gradient_of_a_table_adds_rows_up(
    indices: int, rows: int, width: int, bytes_of_it: int
) -> None:
    args = (of(indices, width), of(indices, dtype=torch.int64), rows, -1, False)
    found = scratch_bytes("aten::embedding_dense_backward", args, None)
    assert found == pytest.approx(bytes_of_it, rel=0.01) or abs(found - bytes_of_it) < 2**18


def test_a_product_of_many_rows_has_the_weight_of_bitsandbytes_unpacked() -> None:
    def scratch(count: int, scales: int) -> int:
        rows, packed = of(2, count, 256), of(8192, 1, dtype=torch.uint8)
        args = (rows, packed, [64, 256], of(scales, dtype=WHOLE), 64, "nf4")
        return scratch_bytes("bitsandbytes::gemm_4bit", args, of(2, count, 64))

    assert scratch(8, 256) == 0  # 16 rows: the packed weight is multiplied
    assert scratch(512, 256) == 32_768
    assert scratch(512, 1) == 32_768 + 2_048  # 256 scales in one byte each


def test_a_fourier_transform_along_two_dimensions_has_a_workspace() -> None:
    data = of(2, 64, 32, dtype=torch.complex64)
    assert scratch_bytes("aten::_fft_c2c", (data, [1, 2], 0, True), data) == 32_768
    assert scratch_bytes("aten::_fft_c2c", (data, [2], 0, True), data) == 0
