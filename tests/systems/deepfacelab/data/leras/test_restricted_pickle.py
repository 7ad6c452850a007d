"""`pickle` appears here to write what a hostile author would write, and to check that honest files load elsewhere."""

import builtins
import enum
import io
import os
import pickle
import pickletools
import resource
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from mpt.errors import CheckpointError, DataError
from mpt.systems.deepfacelab.data.leras.leras_pickle import write_arrays, write_plain
from mpt.systems.deepfacelab.data.leras.restricted_pickle import read_arrays, read_pickle
from tests.deadlines import deadline

ARRAYS = {
    "down1/downs_0/conv1/weight:0": np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4),
    "iters:0": np.asarray(7, dtype=np.int64),
    "half": np.ones(3, np.float16),
    "empty": np.zeros((0, 3), np.float32),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
}


def assert_same(found, expected):
    assert list(found) == list(expected)
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array)
        assert found[key].dtype == array.dtype
        assert found[key].shape == array.shape


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_that_numpy_pickled_are_read(protocol):
    assert_same(read_pickle(pickle.dumps(ARRAYS, protocol), "file"), ARRAYS)


def test_what_is_written_is_protocol_4_that_python_and_we_read_with_the_old_module_names(tmp_path):
    path = tmp_path / "MODEL_encoder.npy"
    with path.open("wb") as file:
        write_arrays(file, ARRAYS)
    assert_same(read_arrays_of_any_dtype(path), ARRAYS)
    assert_same(pickle.loads(path.read_bytes()), ARRAYS)
    opcodes = list(pickletools.genops(path.read_bytes()))
    assert (opcodes[0][0].name, opcodes[0][1]) == ("PROTO", 4)
    names = {argument for opcode, argument, _ in opcodes if opcode.name == "GLOBAL"}
    assert names == {"numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"}


def test_plain_data_are_written_so_that_python_and_we_read_them():
    data = {
        "iter": 7,
        "rate": 0.5,
        "name": "größe",
        "on": True,
        "none": None,
        "nested": {"list": [1, -(2**40), "x"]},
    }
    assert pickle.loads(write_plain(data)) == read_pickle(write_plain(data), "file") == data


def old_names(data):
    """A pickle of today's NumPy with the module names of NumPy 1."""
    data = data.replace(b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray")
    return data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("names", [old_names, bytes])
def test_scalars_that_numpy_pickled_are_read_with_their_types(protocol, names):
    scalars = {
        "resolution": np.int64(64),
        "power": np.float64(0.5),
        "on": np.bool_(True),
        "iters:0": np.int32(7),
    }
    found = read_pickle(names(pickle.dumps(scalars, protocol)), "file")
    assert found == scalars
    assert [type(value) for value in found.values()] == [type(value) for value in scalars.values()]
    assert pickle.loads(write_plain(found)) == scalars


def test_a_scalar_among_weights_is_an_array(tmp_path):
    (tmp_path / "opt.npy").write_bytes(old_names(pickle.dumps({"iters:0": np.int64(7)}, 4)))
    assert read_arrays(tmp_path / "opt.npy")["iters:0"] == 7


def test_options_that_deepfacelab_wrote_are_read():
    path = Path(__file__).parents[2] / "fixtures" / "SAEHD_default_options.dat"
    options = read_pickle(path.read_bytes(), str(path))
    assert (options["resolution"], options["archi"], options["adabelief"]) == (64, "df-ud", True)


class Colour(enum.IntEnum):
    RED = 3


def test_enumerations_are_numbers_where_they_are_granted_and_refused_elsewhere():
    data = pickle.dumps({"kind": Colour.RED}, 4)
    assert read_pickle(data, "file", integers=[(__name__, "Colour")]) == {"kind": 3}
    with pytest.raises(CheckpointError, match="only arrays may be named"):
        read_pickle(data, "file")
    text_member = b"\x80\x04c" + f"{__name__}\nColour\n".encode() + text(b"RED") + b"\x85R."
    with pytest.raises(CheckpointError, match="named by one number"):
        read_pickle(text_member, "file", integers=[(__name__, "Colour")])


def test_what_is_written_comes_back_with_its_types():
    data = {
        "t": (1, "x"),
        "b": b"bytes",
        "n": 2**70,
        "s": np.float32(0.5),
        "a": [np.zeros((2, 0)), np.eye(2)],
    }
    for found in (pickle.loads(write_plain(data)), read_pickle(write_plain(data), "file")):
        assert (found["t"], found["b"], found["n"], found["s"]) == (
            (1, "x"),
            b"bytes",
            2**70,
            np.float32(0.5),
        )
        assert type(found["s"]) is np.float32
        assert [array.shape for array in found["a"]] == [(2, 0), (2, 2)]


def test_big_endian_arrays_keep_their_values():
    swapped = np.arange(3, dtype=">f4")
    found = read_pickle(pickle.dumps({"a": swapped}, 4), "file")["a"]
    np.testing.assert_array_equal(found, [0, 1, 2])


def read_arrays_of_any_dtype(path):
    return read_pickle(path.read_bytes(), str(path))


def test_metadata_of_plain_data_are_read_at_every_protocol_deepfacelab_has_used():
    metadata = {
        "face_type": "full_face",
        "landmarks": np.random.default_rng(0).random((68, 2)).tolist(),
        "source_rect": [1, -2, 300000, 4],
        "nothing": None,
        "flag": True,
        "mask": b"\xff\xd8",
        "matrix": np.eye(2, 3),
        "large": 2**40,
        "polygons": {"polys": [{"pts": [[1.0, 2.0]], "type": 1}]},
    }
    for protocol in (2, 3, 4):
        found = read_pickle(pickle.dumps(metadata, protocol), "face")
        np.testing.assert_array_equal(found.pop("matrix"), np.eye(2, 3))
        assert found == {key: value for key, value in metadata.items() if key != "matrix"}


class Calls:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def array_pickle(shape, data, dtype=b"f4"):
    """A pickle of one array whose shape and bytes need not agree."""
    body = b"\x80\x04cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01("
    body += b"".join(b"\x8a\x08" + struct.pack("<q", side) for side in shape)
    body += (
        b"tcnumpy\ndtype\nX"
        + struct.pack("<I", len(dtype))
        + dtype
        + b"\x89\x88\x87R(K\x03X\x01\x00\x00\x00<NNN"
    )
    return (
        body
        + b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89B"
        + struct.pack("<I", len(data))
        + data
        + b"tb."
    )


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value


EMPTY_ARRAY = (
    b"\x80\x04cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R."
)
HOSTILE = {
    "os.system": pickle.dumps(Calls(os.system, "echo owned > owned"), 4),
    "builtins.eval": pickle.dumps(Calls(eval, "open('owned', 'w')"), 4),
    "exec at protocol 0": pickle.dumps(Calls(exec, "open('owned', 'w')"), 0),
    "eval through numpy.f2py": b"\x80\x04cnumpy.f2py.capi_maps\neval\n"
    + text(b"open('owned','w')")
    + b"\x85R.",
    "numpy load": b"\x80\x04cnumpy\nload\n" + text(b"x") + b"\x85R.",
    "a prefix of an allowed name": b"\x80\x04cnumpy.core.multiarray\n_reconstruct.__globals__\n)R.",
    "a dotted name on the stack": b"\x80\x04"
    + text(b"numpy")
    + text(b"ndarray.__class__")
    + b"\x93.",
    "module and name run together": b"\x80\x04cnumpy ndarray\nx\n.",
    "a name that is no text": b"\x80\x04K\x01" + text(b"dtype") + b"\x93.",
    "getattr": b"\x80\x04c__builtin__\ngetattr\n.",
    "extension registry": b"\x80\x04\x82\x01.",
    "persistent id": b"\x80\x04" + text(b"x") + b"Q.",
    "persistent id as text": b"Px\n.",
    "INST": b"(i__builtin__\neval\n.",
    "OBJ": b"\x80\x04(cnumpy\nndarray\no.",
    "NEWOBJ of an allowed class": b"\x80\x04cnumpy\nndarray\n)\x81.",
    "calling ndarray": b"\x80\x04cnumpy\nndarray\nJ\x00\x00\x00\x40\x85\x85R.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "a name as data": b"\x80\x04]cnumpy\ndtype\na.",
    "a name as the result": b"\x80\x04cnumpy\ndtype\n.",
    "reconstruct with a huge shape": EMPTY_ARRAY.replace(b"K\x00", b"J\x00\x00\x00\x40"),
    "a gigabyte in ninety bytes": array_pickle([2**28], b""),
    "a shape larger than its bytes": array_pickle([2, 3], b"\0" * 20),
    "a shape smaller than its bytes": array_pickle([2, 2], b"\0" * 20),
    "a negative shape": array_pickle([-1, -1], b"\0" * 4),
    "an overflowing shape": array_pickle([2**39, 2**39, 2**39], b""),
    "a scalar of objects": b"\x80\x04cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\n"
    + text(b"O8")
    + b"\x89\x88\x87RC\x01x\x86R.",
    "a scalar with too few bytes": b"\x80\x04cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\n"
    + text(b"f8")
    + b"\x89\x88\x87RC\x01x\x86R.",
    "a scalar of a dtype that is none": b"\x80\x04cnumpy.core.multiarray\nscalar\n"
    + text(b"f8")
    + b"C\x01x\x86R.",
    "object dtype": array_pickle([1], b"\0" * 8, b"O8"),
    "structured dtype": array_pickle([1], b"\0" * 8, b"V8"),
    "text dtype": array_pickle([1], b"\0" * 8, b"U2"),
    "an array with no content": EMPTY_ARRAY,
    "building a dict": b"\x80\x04}}b.",
    "building twice": array_pickle([1], b"\0" * 4)[:-1] + b")b.",
    "a list that holds itself": b"\x80\x04]\x94h\x00a.",
    "sharing that doubles at every line": b"\x80\x04]\x94"
    + b"".join(b"](h%ch%ce\x94" % (i, i) for i in range(40))
    + b".",
    "tuples of tuples shared": b"\x80\x04)\x94"
    + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(40))
    + b".",
    "nesting too deep": b"\x80\x04" + b"]" * 2000 + b"a" * 1999 + b".",
    "an unhashable key": b"\x80\x04}]K\x01s.",
    "a key without a value": b"\x80\x04}(K\x01u.",
    "an absent memo": b"\x80\x04h\x05.",
    "text longer than the file": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.",
    "bytes longer than the file": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"x.",
    "a number of five thousand digits": b"I" + b"9" * 5000 + b"\n.",
    "a long that is no allowed opcode": b"\x80\x04\x8b" + struct.pack("<i", 4) + b"\0" * 4 + b".",
    "cut off": pickle.dumps(ARRAYS, 4)[:-20],
    "no end": b"\x80\x04N",
    "two values": b"\x80\x04NN.",
    "an empty stack": b"\x80\x04.",
    "popping nothing": b"\x80\x040.",
    "a mark alone": b"\x80\x04(.",
    "nothing": b"",
    "no pickle": b"\xff\xd8\xff\xe0 not a pickle at all",
    "encode as another codec": b"\x80\x02c_codecs\nencode\n"
    + text(b"x")
    + text(b"zip")
    + b"\x86R.",
    "encode text beyond latin1": b"\x80\x02c_codecs\nencode\n"
    + text("\u2603".encode())
    + text(b"latin1")
    + b"\x86R.",
    "a text encoded again and again": b"\x80\x02c_codecs\nencode\nq\x00"
    + text(b"x" * 1_000_000)
    + b"q\x01"
    + text(b"latin1")
    + b"q\x02("
    + b"h\x00h\x01h\x02\x86R" * 100_000
    + b"t.",
    "a long text printed in a refusal": b"\x80\x04cnumpy\ndtype\n"
    + text(b"x" * 1_000_000)
    + b"\x94("
    + b"h\x00" * 100_000
    + b"t\x94R.",
    "a long tuple used again and again": b"\x80\x04("
    + b"K\x01" * 100_000
    + b"t\x94"
    + b"h\x000" * 100_000
    + b".",
    "a frozen set": pickle.dumps(frozenset({1}), 4),
    "a class by reference": pickle.dumps(io.BytesIO, 4),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_and_damaged_pickles_are_refused_in_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "eval", lambda *_: pytest.fail("eval was reached"))
    with pytest.raises(CheckpointError, match=r"^weights\.npy: ") as caught:
        read_pickle(HOSTILE[name], "weights.npy")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert list(tmp_path.iterdir()) == []


def test_hostile_pickles_take_little_time_and_memory():
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    started = time.process_time()
    try:
        for data in HOSTILE.values():
            with pytest.raises(CheckpointError):
                read_pickle(data, "weights.npy")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert time.process_time() - started < 20  # measured: 0.3 s


def test_a_sparse_file_beyond_the_memory_is_refused_and_so_is_a_pipe(tmp_path):
    with (tmp_path / "sparse.npy").open("wb") as file:
        file.truncate(1 << 42)
    os.mkfifo(tmp_path / "pipe.npy")
    for name, reason in [("sparse.npy", "larger than the"), ("pipe.npy", "not a regular file")]:
        with (
            deadline(5),
            pytest.raises(CheckpointError, match=rf"{name}: cannot be read \({reason}"),
        ):
            read_arrays(tmp_path / name)


def test_the_caller_chooses_the_error():
    with pytest.raises(DataError, match=r"face\.jpg: refused at byte"):
        read_pickle(HOSTILE["os.system"], "face.jpg", DataError)


@pytest.mark.parametrize(
    "content", [["a list"], {"x": 1.0}, {1: np.ones(2)}, {"b": np.ones(2, bool)}]
)
def test_weights_must_be_a_dict_of_numeric_arrays(content, tmp_path):
    path = tmp_path / "MODEL_inter.npy"
    path.write_bytes(pickle.dumps(content, 4))
    with pytest.raises(CheckpointError, match=r"MODEL_inter\.npy"):
        read_arrays(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.npy: cannot be read"):
        read_arrays(tmp_path / "gone.npy")


def test_random_damage_never_does_more_than_refuse_or_load_data():
    numbers = np.random.default_rng(0)
    honest = bytearray(
        pickle.dumps({"a": np.arange(4.0, dtype=np.float32), "b": [1, "two", None]}, 4)
    )
    for _ in range(2000):
        damaged = bytearray(honest)
        for position in numbers.integers(len(damaged), size=numbers.integers(1, 4)):
            damaged[position] = numbers.integers(256)
        try:
            found = read_pickle(bytes(damaged), "file")
        except CheckpointError:
            continue
        assert isinstance(
            found, dict | list | tuple | str | bytes | int | float | np.ndarray | None
        )
