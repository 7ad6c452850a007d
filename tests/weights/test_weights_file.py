"""Weights of others are read without running anything of theirs."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import random
import re
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mpt.errors import CheckpointError
from mpt.weights import torch_pickle, weights_file
from mpt.weights.weights_file import load_weights_file, read_weights_file
from tests.deadlines import deadline

pytestmark = pytest.mark.tier("fast")


def network() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    return model.to(memory_format=torch.channels_last)


def write_zip(
    path: Path,
    pickled: bytes,
    storages: dict[str, bytes] | None = None,
    method: int = zipfile.ZIP_STORED,
) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for key, content in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", content)


class Touch:
    """Unpickled by Python, this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_state_dict_comes_back_bit_for_bit(tmp_path, dtype: torch.dtype) -> None:
    state = network().to(dtype).state_dict()
    torch.save(state, tmp_path / "w.pt")
    found = load_weights_file(tmp_path / "w.pt")
    assert list(found) == list(state)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)
        assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride())


def test_the_usual_wrappers_parameters_and_odd_views_are_understood(tmp_path) -> None:
    base = torch.arange(24.0)
    weights = {
        "a": nn.Parameter(base[4:10].view(2, 3).t()),
        "b": base,
        "c": torch.ones((), dtype=torch.bool),
    }
    torch.save(
        {"epoch": 3, "lr": [1e-3, None], "state_dict": collections.OrderedDict(weights)},
        tmp_path / "w.pth",
    )
    found = load_weights_file(tmp_path / "w.pth")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_safetensors_are_read(tmp_path) -> None:
    save_file({"a": torch.arange(3)}, tmp_path / "w.safetensors")
    assert torch.equal(load_weights_file(tmp_path / "w.safetensors")["a"], torch.arange(3))


def test_a_malicious_pickle_is_refused_and_nothing_runs(tmp_path) -> None:
    canary = tmp_path / "canary"
    torch.save({"a": Touch(canary)}, tmp_path / "zip.pt")
    torch.save({"a": Touch(canary)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(Touch(canary)))
    (tmp_path / "named.safetensors").write_bytes(pickle.dumps(Touch(canary)))
    for protocol in range(6):
        write_zip(tmp_path / f"protocol{protocol}.pt", pickle.dumps({"a": Touch(canary)}, protocol))
    files = list(tmp_path.iterdir())
    for path in files:
        with pytest.raises(CheckpointError, match=path.name) as caught:
            load_weights_file(path)
        assert caught.value.exit_code == 4
    assert len(files) == 10
    assert not canary.exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"c__builtin__\nbytearray\n(I1073741824\ntR.",
        b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00@\x85R.",
        b"\x80\x02ctorch\nTensor\nJ\x00\x00\x00@\x85R.",
        b"\x80\x02cnumpy.f2py.crackfortran\nmyeval\nX\x01\x00\x00\x001\x85R.",
        b"\x80\x02ctorch.FloatStorage\n__class__\n.",
        b"\x80\x02ctorch\nFloatStorage\nK\x09\x85R.",
        b"\x80\x02ccollections\nOrderedDict\n]]K\x01K\x02\x86aa\x85R.",
        b"\x80\x02}" + b")" + b"q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"h\x00K\x01s.",
        b"\x80\x02}K\x01.",
        b"\x80\x02.",
        b"\x80\x02}",
        b"\x80\x02N}b.",
        b"",
        b"\xff" * 50,
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    ],
)
def test_pickles_that_no_state_dict_needs_are_refused_at_once(tmp_path, pickled: bytes) -> None:
    write_zip(tmp_path / "w.pt", pickled)
    with pytest.raises(CheckpointError):
        load_weights_file(tmp_path / "w.pt")


def tensor_pickle(
    count: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
) -> bytes:
    """Return the pickle of one float tensor, with whatever it claims."""

    class Storage:
        pass

    class Tensor:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, shape, stride, False, None)

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return (
                ("storage", torch.FloatStorage, "0", "cpu", count)
                if isinstance(value, Storage)
                else None
            )

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump({"a": Tensor()})
    return buffer.getvalue()


def test_a_tensor_must_lie_within_its_storage(tmp_path) -> None:
    path = tmp_path / "w.pt"
    write_zip(path, tensor_pickle(4, (2, 2), (2, 1)), {"0": bytes(16)})
    assert load_weights_file(path)["a"].shape == (2, 2)
    lies = [
        tensor_pickle(2**40, (2, 2), (2, 1)),
        tensor_pickle(5, (2, 2), (2, 1)),
        tensor_pickle(4, (2, 2), (2, 1), offset=1),
        tensor_pickle(4, (2, 2), (2**40, 1)),
        tensor_pickle(4, (2**30,), (0,)),
        tensor_pickle(4, (2, 2), (-1, 1)),
        tensor_pickle(4, (2, -2), (1, 1)),
        tensor_pickle(4, (2, 2), (1,)),
        tensor_pickle(4, (2, 2), (2, 1), offset=-1),
    ]
    for pickled in lies:
        write_zip(path, pickled, {"0": bytes(16)})
        with pytest.raises(CheckpointError):
            load_weights_file(path)


def test_a_deflate_bomb_is_refused_before_it_is_unpacked(tmp_path) -> None:
    path = tmp_path / "w.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", tensor_pickle(2**27, (2**27,), (1,)))
        with archive.open("archive/data/0", "w", force_zip64=True) as member:
            for _ in range(64):
                member.write(bytes(2**20))
    assert path.stat().st_size < 2**20
    with pytest.raises(CheckpointError, match="compressed members"):
        load_weights_file(path)


@pytest.mark.parametrize(
    ("mark", "kind"), [("constants.pkl", "TorchScript"), ("archive_format", "torch.export")]
)
def test_a_program_that_torch_saved_is_refused_by_its_kind(tmp_path, mark: str, kind: str) -> None:
    path = tmp_path / "program.pt"
    # the code in it is compressed
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("program/code/net.py", "x" * 100)
        archive.writestr(f"program/{mark}", "")
    with pytest.raises(CheckpointError, match=f"it is a {kind} program, and weights are wanted"):
        load_weights_file(path)


def test_a_damaged_file_is_refused_or_its_damage_is_outside_the_weights(tmp_path) -> None:
    path = tmp_path / "w.pt"
    state = {"a": torch.randn(200), "b": torch.arange(30)}
    torch.save(state, path)
    content = path.read_bytes()
    generator = random.Random(0)
    refused = 0
    for _ in range(150):
        flipped = bytearray(content)
        flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
        try:
            found = load_weights_file(path)
        except CheckpointError:
            refused += 1
            continue
        # Padding and directory entries are not covered by the zip's checksums.
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert refused > 50


def test_a_link_or_a_folder_is_no_weights_file(tmp_path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "w.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    for path in (tmp_path, tmp_path / "absent.pt", tmp_path / "empty.pt"):
        with pytest.raises(CheckpointError):
            load_weights_file(path)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_beside_the_weights_are_left_alone_and_never_made(
    tmp_path, zipped: bool, protocol: int
) -> None:
    state = network().state_dict()
    beside = {
        "args": argparse.Namespace(lr=[1e-3], out=Path("x")),
        "numbers": {1: collections.Counter("ab")},
    }
    optimizer = torch.optim.AdamW(network().parameters()).state_dict()
    path = tmp_path / "w.pt"
    content = {"epoch": 3, "model": state, "optimizer": optimizer, **beside}
    torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    found = read_weights_file(path)
    assert found.wrapper == "model"
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_network_that_was_saved_whole_gives_its_weights_without_its_class(
    tmp_path, zipped: bool
) -> None:
    model = nn.ModuleDict({"a": network(), "b": nn.MultiheadAttention(4, 2)})
    torch.save(
        {"ema": None, "model": model}, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped
    )
    found = load_weights_file(tmp_path / "w.pt")
    state = model.state_dict()
    assert set(found) == set(state)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_network_that_contains_itself_is_refused(tmp_path) -> None:
    model = nn.Module()
    model._modules["x"] = model
    torch.save(model, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="deeper or of more modules than any is"):
        load_weights_file(tmp_path / "w.pt")


def test_dtypes_without_a_storage_class_of_their_own_are_read(tmp_path) -> None:
    state = {"a": torch.randn(8).to(torch.float8_e4m3fn), "b": torch.full((4,), 7).to(torch.uint16)}
    torch.save(state, tmp_path / "w.pt")
    found = load_weights_file(tmp_path / "w.pt")
    assert found["a"].dtype == torch.float8_e4m3fn
    assert torch.equal(found["a"].float(), state["a"].float())
    assert found["b"].tolist() == [7, 7, 7, 7]


def test_only_the_storages_of_the_weights_are_read(tmp_path, monkeypatch) -> None:
    torch.save(
        {"state_dict": {"a": torch.ones(3)}, "optimizer": torch.zeros(1000)}, tmp_path / "w.pt"
    )
    read = []
    honest = weights_file.as_numbers

    def note(data: bytes, storage: Any) -> torch.Tensor:
        read.append(len(data))
        return honest(data, storage)

    monkeypatch.setattr(weights_file, "as_numbers", note)
    load_weights_file(tmp_path / "w.pt")
    assert read == [12]


@pytest.mark.tier("full")
def test_every_flipped_bit_of_a_weight_is_noticed_by_the_zips_checksum(tmp_path) -> None:
    path = tmp_path / "w.pt"
    weights = torch.arange(64.0)
    torch.save({"a": weights}, path)
    content = path.read_bytes()
    start = content.index(weights.numpy().tobytes())
    for position in range(start, start + 256, 7):
        flipped = bytearray(content)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="CRC"):
            load_weights_file(path)


def test_a_zip_that_hides_behind_a_legacy_file_is_not_what_is_read(tmp_path) -> None:
    """Torch reads the front, Python's zipfile the end: a file must not be one thing when checked, another when used."""
    canary = tmp_path / "canary"
    torch.save({"a": Touch(canary)}, tmp_path / "front.pt", _use_new_zipfile_serialization=False)
    torch.save({"a": torch.ones(2)}, tmp_path / "end.pt")
    path = tmp_path / "both.pt"
    path.write_bytes((tmp_path / "front.pt").read_bytes() + (tmp_path / "end.pt").read_bytes())
    with pytest.raises(CheckpointError, match="unpickled, it would run"):
        load_weights_file(path)
    assert not canary.exists()


@pytest.mark.parametrize(
    "name",
    [
        "os system",
        "posix system",
        "builtins eval",
        "__builtin__ __import__",
        "subprocess Popen",
        "sys exit",
    ],
)
def test_a_program_beside_good_weights_refuses_the_file_by_its_name(tmp_path, name: str) -> None:
    pickled = tensor_pickle(4, (2, 2), (2, 1))
    hidden = pickled[:-2] + b"X\x01\x00\x00\x00xc" + name.replace(" ", "\n").encode() + b"\n)Rs."
    write_zip(tmp_path / "w.pt", hidden, {"0": bytes(16)})
    with pytest.raises(
        CheckpointError, match=re.escape(f"it would run '{name.replace(' ', '.')}'")
    ):
        load_weights_file(tmp_path / "w.pt")


def legacy(pickled: bytes, storages: bytes = b"") -> bytes:
    """Return a file of the format before PyTorch 1.6."""
    system = {
        "protocol_version": 1001,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    head = b"".join(pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, system))
    return head + pickled + pickle.dumps(["0"] if storages else [], 2) + storages


def test_a_legacy_file_must_have_the_storages_that_it_claims(tmp_path) -> None:
    path = tmp_path / "w.pt"
    good = (4).to_bytes(8, "little") + bytes(16)
    path.write_bytes(legacy(tensor_pickle(4, (2, 2), (2, 1)), good))
    assert load_weights_file(path)["a"].shape == (2, 2)
    for claimed, storages in [
        (4, good[:-1]),
        (4, good + b"x"),
        (5, good),
        (2**40, good),
        (4, bytes(8)),
        (4, b""),
    ]:
        path.write_bytes(legacy(tensor_pickle(claimed, (2, 2), (2, 1)), storages))
        with pytest.raises(CheckpointError):
            load_weights_file(path)


HOSTILE = {
    "a list that doubles": b"\x80\x02]q\x00" + b"(h\x00h\x00e" * 50_000 + b".",
    "tuples of tuples": b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * 50_000 + b".",
    "a long integer": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "a text of 2^62 letters": b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"a.",
    "a frame of 2^62 bytes": b"\x80\x04\x95" + (2**62).to_bytes(8, "little") + b"N.",
    "a bytearray": b"\x80\x05\x96" + (2**33).to_bytes(8, "little") + b"a.",
    "memo beyond memory": b"\x80\x02Nr\xff\xff\xff\xff.",
    "numbers of four million digits": b"\x80\x02I" + b"9" * 4_000_000 + b"\n.",
    "a deep nest": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "decimal longs": b"\x80\x02L" + b"9" * 4_000_000 + b"L\n.",
    "too many operations": b"\x80\x02" + b"N" * 700_000 + b".",
}


@pytest.mark.tier("full")
@pytest.mark.parametrize("kind", ["zip", "legacy"])
@pytest.mark.parametrize("pickled", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_pickles_are_refused_in_bounded_time_and_memory(
    tmp_path, monkeypatch, pickled: bytes, kind: str
) -> None:
    monkeypatch.setattr(torch_pickle, "MOST_WORK", 600_000)  # 3 million take 3 s
    path = tmp_path / "w.pt"
    if kind == "zip":
        write_zip(path, pickled)
    else:
        path.write_bytes(legacy(pickled))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    started = time.process_time()
    try:
        with pytest.raises(CheckpointError):
            load_weights_file(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert time.process_time() - started < 20


def legacy_with_keys(pickled: bytes, keys: bytes) -> bytes:
    """Return a legacy file whose last pickle, the list of storages, is written by hand."""
    return legacy(b"")[: -len(pickle.dumps([], 2))] + pickled + keys


def network_pickle(children: int, parameters: int) -> bytes:
    """Return the pickle of a network that is its own child so many times, with so many names of one weight.

    Everything in it is shared, so it is short: its size grows by ten bytes for each name.
    """
    weight = tensor_pickle(1, (1,), (1,))[2:-1]  # a dict of one tensor "a", on the stack
    names = b"".join(b"X\x06\x00\x00\x00%06dh\xfa" % number for number in range(children))
    weights = b"".join(b"X\x06\x00\x00\x00%06dh\xfb" % number for number in range(parameters))
    body = b"\x80\x02ctorch.nn\nModule\n)\x81q\xfa}(X\x08\x00\x00\x00_modules}(" + names + b"u"
    only = weight.replace(b"X\x01\x00\x00\x00a", b"").replace(b"}", b"", 1)  # the tensor alone
    cut = only.rindex(b"R") + 1
    return (
        body
        + b"X\x0b\x00\x00\x00_parameters}(X\x01\x00\x00\x00w"
        + only[only.index(b"c") : cut]
        + (b"q\xfb" + weights + b"uub.")
    )


DOUBLING = b"\x80\x02]q\x00" + b"".join(
    b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(60)
)
LONG = b"X\x40\x42\x0f\x00" + b"x" * 1_000_000
ONE_STORAGE, NO_STORAGE = b"\x80\x02]X\x01\x00\x00\x000a.", b"\x80\x02]."
ONE_NUMBER = (1).to_bytes(8, "little") + bytes(4)
ENDLESS = {
    "keys that double": legacy_with_keys(b"\x80\x02}.", DOUBLING + b"]h\x3ca."),
    "keys that are numbers": legacy_with_keys(tensor_pickle(4, (4,), (1,)), b"\x80\x02]K\x00a.")
    + bytes(24),
    "a network that is its own child": legacy_with_keys(network_pickle(300_000, 1), ONE_STORAGE)
    + ONE_NUMBER,
    "one weight under many names": legacy_with_keys(network_pickle(40, 150_000), ONE_STORAGE)
    + ONE_NUMBER,
    "long names": legacy_with_keys(
        b"\x80\x02" + LONG + b"q\x01h\x01\x93q\x0200(" + b"h\x01h\x01\x93" * 20_000 + b"t.",
        NO_STORAGE,
    ),
    "two long keys that are equal": legacy_with_keys(
        b"\x80\x02" + LONG + b"q\x01" + LONG + b"q\x0200}(" + b"h\x01Nh\x02N" * 300_000 + b"u.",
        NO_STORAGE,
    ),
}


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", ENDLESS)
def test_a_legacy_file_that_unfolds_is_refused_in_bounded_time_and_memory(
    tmp_path, name: str
) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(ENDLESS[name])
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    started = time.process_time()
    try:
        with deadline(60), pytest.raises(CheckpointError) as caught:
            load_weights_file(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert len(str(caught.value)) < 400 + len(str(path))
    assert re.search(
        "its storages are not|deeper or of more modules|a name that is none|neither short",
        str(caught.value),
    )
    assert time.process_time() - started < 20  # measured: 3 s for 300,000 names
