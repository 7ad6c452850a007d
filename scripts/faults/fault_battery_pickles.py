"""Generated programs of pickle operations in the place of a legacy .pt file's pickles, for `fault_battery.py`.

Bytes that are flipped rarely give a program that runs far. These are made by the grammar of the operations: a stack of
kinds is kept beside the program, so that most of it runs, and what is dangerous comes often: values that are remembered
and used again and again, names of programs and calls of them, objects that are their own parts, claims of huge sizes.

A file is refused, or its tensors are read, within bounds of time and memory, and nothing of it is executed.
"""

from __future__ import annotations

import io
import pickle
import random
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpt.errors import CheckpointError
from mpt.weights.weights_file import load_weights_file
from scripts.faults.fault_battery_process import call
from scripts.faults.fault_battery_runs import Battery, Verdict, failure_of

PER_CASE = 100
"""Programs that one case tries."""
MOST_OPERATIONS = 3000
SLOWEST_SECONDS, LARGEST_BYTES = 5.0, 300 << 20
"""Bounds for reading one file of some ten thousand bytes."""
FORBIDDEN = (
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "exec",
)
"""What Python reports when something of a file is looked up or executed."""
NAMES = (
    *(
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_parameter",
        "torch._tensor _rebuild_from_type_v2",
    ),
    *(
        "torch FloatStorage",
        "torch.storage UntypedStorage",
        "torch float32",
        "collections OrderedDict",
    ),
    *(
        "os system",
        "builtins exec",
        "builtins eval",
        "builtins getattr",
        "posix system",
        "subprocess Popen",
    ),
    *("torch.nn.modules.linear Linear", "torch.hub load", "numpy.core.multiarray _reconstruct"),
    *(
        "copyreg _reconstructor",
        "mpt_battery_canary run",
        "functools partial",
        "operator attrgetter",
        "__main__ X",
    ),
    *(" ", "a.b.c d.e.f"),
)
COMMAND = "touch executed-by-a-weights-file"


class Program:
    """A program that is being written, with the kinds on its stack: value, list, dict, mark."""

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator
        self.code = bytearray(b"\x80\x02")
        self.stack: list[str] = []
        self.remembered = 0
        self.moves = [move for move in MOVES if generator.random() < 0.7] or list(MOVES)
        """Some programs lack what would have them refused early."""

    def emit(self, code: bytes, *pushed: str) -> None:
        """Add operations and what they push."""
        self.code += code
        self.stack += pushed

    def above_mark(self) -> int:
        """Return how many values lie above the last mark; -1 without one."""
        for count, kind in enumerate(reversed(self.stack)):
            if kind == "mark":
                return count
        return -1

    def drop(self, count: int) -> None:
        """Take values from the stack of kinds."""
        del self.stack[len(self.stack) - count :]

    def step(self) -> None:
        """Add an operation that the stack allows, or now and then one that it does not."""
        move = self.generator.choice(self.moves)
        if self.generator.random() < 0.001:
            self.emit(bytes([self.generator.randrange(256)]))
        else:
            move(self)

    def finish(self) -> bytes:
        """Put what is left into one value, and end."""
        while "mark" in self.stack:
            self.drop(self.above_mark() + 1)
            self.emit(b"t", "value")
        while len(self.stack) > 1:
            self.drop(2)
            self.emit(b"\x86", "value")
        return bytes(self.code) + (b"" if self.stack else b"N") + b"."


def push_plain(program: Program) -> None:
    """Push a number, text or constant, some of them large or with wrong claims of their size."""
    generator = program.generator
    text = generator.choice(
        ["storage", "0", "cpu", "module", "k" * generator.randrange(2000), COMMAND]
    ).encode()
    number = generator.choice([0, 1, -1, 2**31 - 1, generator.randrange(2**16)])
    long = generator.randbytes(generator.randrange(1, 200))
    codes = (
        b"N",
        b"\x88",
        b"J" + struct.pack("<i", number),
        b"G" + struct.pack(">d", generator.choice([0.5, float("nan"), float("inf")])),
        b"X" + struct.pack("<I", len(text)) + text,
        b"X" + struct.pack("<I", len(text)) + text,
        b"\x8a" + bytes([len(long)]) + long,
        b"\x8d" + struct.pack("<Q", generator.choice([3, 2**40, 2**63])) + b"abc",
        b"\x8b" + struct.pack("<i", generator.choice([2, 2**31 - 1, -1])) + b"ab",
    )
    program.emit(generator.choice(codes[:7] if generator.random() < 0.997 else codes), "value")


def push_container(program: Program) -> None:
    """Push an empty container, or begin one."""
    code, kind = program.generator.choice(
        [(b"]", "list"), (b"}", "dict"), (b")", "value"), (b"(", "mark")]
    )
    program.emit(code, kind)


def push_name(program: Program) -> None:
    """Push a name."""
    module, _, attribute = program.generator.choice(NAMES).partition(" ")
    program.emit(b"c" + f"{module}\n{attribute}\n".encode(), "value")


def remember(program: Program) -> None:
    """Remember the top."""
    if program.stack and program.stack[-1] != "mark":
        place = program.generator.choice([program.remembered, program.remembered, 255, 2**31])
        program.emit(b"q" + bytes([place]) if place < 256 else b"r" + struct.pack("<I", place))
        program.remembered = min(program.remembered + (place == program.remembered), 250)


def use_again(program: Program) -> None:
    """Push what was remembered, several times: this is how small files unfold to large values."""
    if program.remembered:
        place = program.generator.randrange(program.remembered)
        for _ in range(program.generator.choice([1, 2, 8])):
            program.emit(b"h" + bytes([place]), "value")


def close(program: Program) -> None:
    """Make a container of what lies above the last mark, or put it into the one below."""
    count = program.above_mark()
    if count < 0:
        return
    below = program.stack[-count - 2] if len(program.stack) > count + 1 else ""
    program.drop(count + 1)
    if below == "list":
        program.emit(b"e")
    elif below == "dict" and count % 2 == 0:
        program.emit(b"u")
    else:
        program.emit(program.generator.choice([b"t", b"l", b"1", b"d" if count % 2 == 0 else b"t"]))
        if program.code[-1:] != b"1":
            program.stack.append(
                {b"l": "list", b"d": "dict"}.get(bytes(program.code[-1:]), "value")
            )


def combine(program: Program) -> None:
    """Make a tuple of the topmost values, append one, or set an item."""
    count = program.above_mark() if "mark" in program.stack else len(program.stack)
    wanted = program.generator.randrange(1, 4)
    if count > wanted and program.stack[-2] == "list" and wanted == 1:
        program.drop(1)
        program.emit(b"a")
    elif count > wanted and wanted == 2 and program.stack[-3] == "dict":
        program.drop(2)
        program.emit(b"s")
    elif count >= wanted:
        program.drop(wanted)
        program.emit(bytes([0x84 + wanted]), "value")


def call_something(program: Program) -> None:
    """Call what lies below the top, build it, or take a storage by it."""
    count = program.above_mark() if "mark" in program.stack else len(program.stack)
    if count < 2:
        return
    code = program.generator.choice([b"R", b"R", b"\x81", b"b", b"Q", b"\x92"])
    taken = {b"Q": 1, b"\x92": 3}.get(code, 2)
    if count >= taken:
        program.drop(taken)
        program.emit(code, "value")


def run_a_command(program: Program) -> None:
    """Do what a hostile file does: call a name with a command."""
    push_name(program)
    text = COMMAND.encode()
    program.emit(b"X" + struct.pack("<I", len(text)) + text + b"\x85R")


def describe_tensor(program: Program) -> None:
    """Describe a tensor with a storage and sizes of which some are impossible."""
    generator = program.generator
    sizes = [
        generator.choice([1, 2, 2] if generator.random() < 0.9 else [0, 3, 2**20, 2**62, -1])
        for _ in range(2)
    ]
    numbers = b"".join(b"\x8a\x08" + struct.pack("<q", size) for size in sizes)
    count = b"J" + struct.pack(
        "<i", 4 if generator.random() < 0.95 else generator.choice([2**31 - 1, -1])
    )
    storage = (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
        + count
        + b"NtQ"
    )
    strides = b"t(K\x02K\x01t\x89}tR"
    program.emit(
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00(" + numbers + strides, "value"
    )


MOVES: tuple[Callable[[Program], None], ...] = (
    *(
        push_plain,
        push_plain,
        push_plain,
        push_container,
        push_container,
        push_container,
        push_name,
    ),
    *(remember, remember, use_again, use_again, close, close, combine, combine, call_something),
    *(run_a_command, describe_tensor),
)


def program_of(generator: random.Random) -> bytes:
    """Return a program."""
    program = Program(generator)
    for _ in range(int(MOST_OPERATIONS ** generator.random())):
        program.step()
    return program.finish()


def file_of(generator: random.Random) -> bytes:
    """Return a .pt file one of whose pickles is a program: of the legacy format four times of five, else a zip."""
    program = program_of(generator)
    if generator.random() < 0.2:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("w/data.pkl", program)
            archive.writestr("w/data/0", bytes(16))
            archive.writestr("w/version", "3\n")
        return stream.getvalue()
    stream = io.BytesIO()
    torch.save({"weight": torch.arange(4.0)}, stream, _use_new_zipfile_serialization=False)
    stream.seek(0)
    pickles = []
    for _ in range(3):
        begin = stream.tell()
        pickle.load(stream)  # magic number, protocol and system: plain data of our own
        pickles.append(stream.getvalue()[begin : stream.tell()])
    place = generator.choice([3, 3, 3, 3, 3, 0, 2, 4])
    parts = [*pickles, program, pickle.dumps(["0"], 2)]
    parts[place] = program
    return b"".join(parts) + struct.pack("<q", 4) + bytes(16)


def read_programs(folder: Path, seed: int) -> None:
    """Read files of generated programs. Raises AssertionError for one that was executed or took too much."""
    generator = random.Random(seed)
    path, seen = folder / "w.pt", []
    torch.save({"weight": torch.zeros(4)}, path, _use_new_zipfile_serialization=False)
    load_weights_file(path)  # imports what reading needs, before imports are counted as executed
    sys.addaudithook(lambda event, arguments: seen.append(event) if event in FORBIDDEN else None)
    for number in range(PER_CASE):
        content = file_of(generator)
        path.write_bytes(content)
        seen.clear()
        started, before = time.process_time(), peak_bytes()
        refused = ""
        try:
            held = max(
                (one.untyped_storage().nbytes() for one in load_weights_file(path).values()),
                default=0,
            )
        except CheckpointError as error:
            held, refused = 0, str(error)
        seconds, grown = time.process_time() - started, peak_bytes() - before
        which = f"program {number} of seed {seed} ({len(content)} bytes)"
        assert held <= len(content), f"{which}: a tensor of {held} bytes"
        assert str(path) in refused or not refused, f"{which}: {refused}"
        assert not seen, f"{which}: {seen}"
        assert seconds < SLOWEST_SECONDS, f"{which}: {seconds:.0f} s"
        assert grown < LARGEST_BYTES, f"{which}: {grown} bytes"


def peak_bytes() -> int:
    """Return the most memory that this process has held."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def generated_pickles(battery: Battery, place: Path, seed: int) -> Verdict:
    """Read many files of generated programs in a process of their own."""
    ended = call(lambda: read_programs(place, seed), place / "read.log")
    if ended.hung:
        return "hang", ended.text[-300:]
    if ended.code:
        failed = "silent" if "AssertionError" in ended.text else "traceback"
        return failed, ended.text[-1500:]
    return failure_of(ended, (0,))


def pickle_cases(battery: Battery) -> list[tuple[object, ...]]:
    """6,000 programs."""
    return [(generated_pickles, seed) for seed in range(60)]
