"""A state comes back from text and tensors as it was, to the bit and to the type."""

from __future__ import annotations

import json
import math
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from mpt.errors import PartError
from mpt.run.checkpoints.state import is_dense, pack, unpack
from mpt.run.checkpoints.tensor_file import read_tensors, write_tensors

pytestmark = pytest.mark.tier("fast")


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64, torch.bool, torch.float8_e8m0fnu,
]  # fmt: skip


def go_and_return(state: Any) -> Any:
    structure, tensors = pack(state)
    text = json.dumps(structure, allow_nan=False)
    with tempfile.TemporaryFile() as file:
        digest, size = write_tensors(file.fileno(), tensors)
        file.seek(0)
        found, read_digest = read_tensors(file)
        assert file.read() == b""
        assert file.tell() == size
    assert digest == read_digest
    return unpack(json.loads(text), found)


def bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(bits(one), bits(other))
    elif isinstance(one, dict):
        assert type(other) is dict
        assert [(type(k), k) for k in one] == [(type(k), k) for k in other]
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert type(one) is type(other)
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, float):
        assert type(other) is float
        assert (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    else:
        assert type(one) is type(other)
        assert one == other


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = math.prod(shape)
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    tensor = tensor.reshape(shape)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    return tensor


keys = st.one_of(
    st.text(max_size=5),
    st.integers(-(2**70), 2**70),
    st.booleans(),
    st.tuples(st.integers(), st.text()),
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), tensors()
)
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


@pytest.mark.tier("full")
@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=5), states, max_size=4))
def test_any_nested_state_comes_back_bit_for_bit(state: dict[str, Any]) -> None:
    assert_same(state, go_and_return(state))


def test_an_optimizer_state_keeps_its_integer_keys_and_scalar_steps() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    found = go_and_return(optimizer.state_dict())
    assert_same(optimizer.state_dict(), found)
    assert list(found["state"]) == [0]


def test_tied_tensors_are_stored_once_and_come_back_tied() -> None:
    weight = torch.randn(4, 4)
    state = {
        "encoder": weight,
        "decoder": weight,
        "detached": weight.detach(),
        "other": weight.clone(),
    }
    assert len(pack(state)[1]) == 2
    found = go_and_return(state)
    assert found["encoder"] is found["decoder"] is found["detached"]
    assert found["other"] is not found["encoder"]


def test_overlapping_views_come_back_with_equal_values() -> None:
    base = torch.arange(10.0)
    state = {"base": base, "part": base[2:5], "steps": base[::2], "grown": base[:1].expand(3)}
    assert_same(state, go_and_return(state))


def test_channels_last_strides_come_back() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert go_and_return({"image": image})["image"].stride() == image.stride()


def test_conjugate_and_negative_views_are_resolved() -> None:
    value = torch.randn(3, dtype=torch.complex64)
    state = {"value": value, "conjugate": value.conj(), "imaginary": value.conj().imag}
    assert_same(state, go_and_return(state))


def test_names_that_collide_once_joined_stay_apart() -> None:
    state = {
        "a": {"b": torch.ones(1)},
        "a.b": torch.zeros(1),
        "__metadata__": torch.ones(2),
        "": torch.ones(3),
    }
    assert_same(state, go_and_return(state))


def test_the_tensor_file_is_readable_by_safetensors(tmp_path) -> None:
    state = {
        "a": torch.randn(300_000),
        "b": torch.arange(3, dtype=torch.uint8),
        "c": torch.randn(()).bfloat16(),
    }
    path = tmp_path / "state.safetensors"
    with path.open("wb") as file:
        write_tensors(file.fileno(), state)
    assert_same(state, {name: load_file(path)[name] for name in state})


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, torch.float32, b"x", torch.empty(2, device="meta")]
)
def test_what_is_not_plain_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(PartError, match=r"state\[model\.1\]"):
        pack({"model": [0, value]})


@pytest.mark.parametrize(
    "structure",
    [
        {"eval": "1"},
        {"dict": {}, "items": []},
        {"tensor": "absent"},
        {"tensor": "a", "stride": [0, 1]},
        {"tensor": "a", "stride": [10**9, 1]},
        {"tensor": "a", "dtype": "load", "shape": [2, 2]},
        {"tensor": "a", "dtype": "float64", "shape": [10**12]},
        {"items": [[[1], 2]]},
        {"float": "1e999"},
        {"int": 7},
    ],
)
def test_a_structure_that_was_not_written_here_is_a_value_error(structure: Any) -> None:
    with pytest.raises(ValueError, match="its structure"):
        unpack(structure, {"a": torch.zeros(2, 2)})


def test_density_tells_permutations_from_overlap() -> None:
    assert is_dense((2, 3, 4), (12, 1, 3))
    assert is_dense((1, 3), (99, 1))
    assert not is_dense((2, 2), (1, 1))
    assert not is_dense((2, 2), (4, 1))


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4000000000000]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [0, 4611686018427387904, 4], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 4]}}',
        b"[" * 100_000,
    ],
)
def test_a_hostile_tensor_header_is_refused_before_anything_is_allocated(header: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(len(header).to_bytes(8, "little") + header + bytes(16))
        file.seek(0)
        with pytest.raises(ValueError):
            read_tensors(file)
