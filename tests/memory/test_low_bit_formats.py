"""Packed weights: NF4 is bitsandbytes' bit for bit, every format holds its shapes and rounds to its own levels."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mpt.memory.low_bit.formats import FORMATS, NF4_LEVELS, packed_bytes

pytestmark = pytest.mark.tier("fast")
SHAPES = [(7, 128), (33, 50), (5, 13), (1, 1)]
"""Whole blocks, a last block that is shorter, an odd number of values, a single one."""


def values(rows: int, columns: int) -> Tensor:
    torch.manual_seed(rows * columns)
    weight = torch.randn(rows, columns)
    weight.view(-1)[: min(64, weight.numel() - 1)] = 0  # a block of zeros
    weight[-1, -1] = 5.0
    return weight


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Let bitsandbytes compute what it would compile, which takes a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def reference() -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return importlib.import_module("bitsandbytes.functional")


def test_the_levels_are_those_of_bitsandbytes() -> None:
    assert torch.equal(torch.tensor(NF4_LEVELS), reference().get_4bit_type("nf4", "cpu"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_packs_and_unpacks_as_bitsandbytes_does(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    functional, weight = reference(), values(*shape).to(dtype)
    theirs, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=False
    )
    ours = FORMATS["nf4"].pack(weight)
    assert torch.equal(ours[0], theirs.view(-1))
    assert torch.equal(ours[1].view(torch.float32), state.absmax)
    for out in (torch.float32, torch.bfloat16, torch.float16):
        state.dtype = out
        unpacked = FORMATS["nf4"].unpack(ours, *shape, out)
        assert torch.equal(unpacked, functional.dequantize_4bit(theirs, state).view(shape))


def test_nf4_is_what_bitsandbytes_wrote_where_it_is_not_installed() -> None:
    """The bytes are those of `quantize_4bit` of bitsandbytes 0.50.2 on a CPU, for numbers that need no generator."""
    weight = ((torch.arange(5 * 70) * 37 % 101).float() / 50 - 1).view(5, 70)
    codes, scales, _ = FORMATS["nf4"].pack(weight)
    assert hashlib.sha256(codes.numpy().tobytes()).hexdigest()[:16] == "45eff703c29004ec"
    assert hashlib.sha256(scales.numpy().tobytes()).hexdigest()[:16] == "f46913286d895f62"


def test_a_value_between_two_levels_goes_where_bitsandbytes_takes_it() -> None:
    table = torch.tensor(NF4_LEVELS)
    weight = torch.cat([table, (table[:-1] + table[1:]) / 2, torch.zeros(33)])[None]
    theirs, _ = reference().quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=False
    )
    assert torch.equal(FORMATS["nf4"].pack(weight)[0], theirs.view(-1))


def test_int8_packs_as_bitsandbytes_does() -> None:
    reference()
    weight = torch.randn(9, 40)
    theirs, largest, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight)
    codes, scales = FORMATS["int8"].pack(weight)
    torch.testing.assert_close(scales.view(torch.float32) * 127, largest, rtol=1e-6, atol=0)
    # it multiplies by 127 / largest
    assert int((codes.view(torch.int8).int() - theirs.int()).abs().max()) <= 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_weight_has_the_shapes_that_a_plan_counts(
    name: str, shape: tuple[int, int]
) -> None:
    packed = FORMATS[name].pack(values(*shape))
    assert [(tuple(one.shape), one.dtype) for one in packed] == FORMATS[name].shapes(*shape)
    assert sum(one.nbytes for one in packed) == packed_bytes(name, *shape)


@pytest.mark.parametrize(("name", "step"), [("fp8", 2**-4), ("int8", 0.5 / 127), ("nf4", 0.16)])
def test_unpacked_values_are_as_near_as_the_format_allows(name: str, step: float) -> None:
    weight = values(16, 128)
    unpacked = FORMATS[name].unpack(FORMATS[name].pack(weight), 16, 128, torch.float32)
    largest = weight.abs().amax(1, keepdim=True)
    allowed = weight.abs() * step + largest * 2**-10 if name == "fp8" else largest * step * 1.001
    assert bool(((unpacked - weight).abs() <= allowed).all())
    again = FORMATS[name].unpack(FORMATS[name].pack(unpacked), 16, 128, torch.float32)
    torch.testing.assert_close(again, unpacked, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", FORMATS)
def test_half_is_the_float32_product_rounded_once(name: str) -> None:
    packed = FORMATS[name].pack(values(8, 128))
    whole = FORMATS[name].unpack(packed, 8, 128, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(FORMATS[name].unpack(packed, 8, 128, dtype), whole.to(dtype))


def test_chunks_of_nf4_join(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = values(16, 100)
    packed = FORMATS["nf4"].pack(weight)
    whole = FORMATS["nf4"].unpack(packed, 16, 100, torch.float32)
    monkeypatch.setattr("mpt.memory.low_bit.formats.CHUNK", 64)
    assert torch.equal(FORMATS["nf4"].unpack(packed, 16, 100, torch.float32), whole)
