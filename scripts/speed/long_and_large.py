"""What long runs, large states and many files cost: `python scripts/speed/long_and_large.py`.

Each row is one command of `mpt` in a process of its own, once on something small and once on something a hundred or
more times as large. Processor time is that of the process and its children; memory is the most that the process held.
What a training needs anyway (imports, one step) is in both. `--scale 0.01` makes everything large that much smaller.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpt.config.load import load_config
from mpt.run.checkpoints.checkpoint import load, save
from mpt.run.checkpoints.manifest import MANIFEST, TENSORS, hash_manifest
from mpt.run.records.layout import RunDirectory, create_run

ROOT = Path(__file__).resolve().parents[2]
CONFIG: dict[str, Any] = {
    "name": "demo",
    "model": {"name": "small_cnn", "image_size": 8, "features": 4},
    "dataset": {"name": "digits"},
    "precision": {"mode": "fp32"},
    "train": {
        "steps": 2,
        "batch_size": 2,
        "threads": 1,
        "device": "cpu",
        "plan_memory": False,
        "log_every": 1,
    },
}
LINKS = 20_000
"""Hard links to one file; file systems allow some 65,000."""
PEAK = "MPT_PEAK_FILE"
PROGRAM = f"""
import atexit, os, runpy, sys
def note():
    with open("/proc/self/status") as lines, open(os.environ["{PEAK}"], "w") as file:
        file.write(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
atexit.register(note)
runpy.run_module("mpt", run_name="__main__", alter_sys=True)
"""
"""Runs `mpt` and notes the most memory that it held; `wait4` would tell this program's own where that is more."""
PIECE = 64 << 20
"""Bytes hashed at once."""
LARGE_STATE_BYTES = 10 << 30


@dataclass(frozen=True)
class Cost:
    """What a command took: its exit code, processor seconds, and the most bytes of memory."""

    code: int
    seconds: float
    peak_bytes: int
    text: str


@dataclass(frozen=True)
class Row:
    """A command on something small and on something large."""

    name: str
    small: int
    large: int
    prepare: Callable[[Path, int], list[str]]
    """Make that much in an empty folder, and return the command."""
    code: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=[row.name.split(",")[0] for row in ROWS], help="these rows"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of what is large")
    parser.add_argument("--output", type=Path, help="file for the table")
    options = parser.parse_args()
    lines = [
        f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, one thread",
        "",
        "| what | small | large | processor time | memory |",
        "|---|---:|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory(prefix="mpt-large-") as folder:
        for row in ROWS:
            if options.only is None or row.name.split(",")[0] in options.only:
                scaled = replace(row, large=max(row.small, int(row.large * options.scale)))
                lines.append(measure(scaled, Path(folder)))
                print(lines[-1], file=sys.stderr, flush=True)
        if options.only is None:
            lines += ["", growth(Path(folder), max(200, int(20_000 * options.scale)))]
            print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n", "utf-8")


def measure(row: Row, folder: Path) -> str:
    """Return a row's line."""
    costs = []
    for size in (row.small, row.large):
        place = folder / "place"
        place.mkdir()
        cost = run(row.prepare(place, size))
        assert cost.code == row.code, f"{row.name}, {size}: exit {cost.code}\n{cost.text}"
        costs.append(cost)
        shutil.rmtree(place)
    small, large = costs
    mebibytes = f"{small.peak_bytes >> 20:,} to {large.peak_bytes >> 20:,} MiB"
    seconds = f"{small.seconds:.1f} to {large.seconds:.1f} s"
    return f"| {row.name} | {row.small:,} | {row.large:,} | {seconds} | {mebibytes} |"


def run(words: list[str]) -> Cost:
    """Run `mpt WORDS` and return what it took."""
    with tempfile.NamedTemporaryFile("r") as peak, begun(words, peak.name) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        peak_bytes = int(peak.read() or 0) * 1024
    return Cost(process.returncode, usage.ru_utime + usage.ru_stime, peak_bytes, text)


@contextlib.contextmanager
def begun(words: list[str], peak: str = os.devnull) -> Iterator[subprocess.Popen[str]]:
    """Start `mpt WORDS`, which writes its most KiB of memory into the file `peak`; the block waits for it."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        PEAK: peak,
    }
    command = [sys.executable, "-c", PROGRAM, *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        yield process


def make_run(place: Path, step: int, lines: int, name: str = "demo") -> RunDirectory:
    """Train two steps, then let the run be at a later step, with a log of so many lines."""
    config, trained = place.parent / "first.yaml", place.parent / "trained"
    if not trained.is_dir():
        config.write_text(json.dumps(CONFIG))
        ended = run(["train", str(config), "--runs", str(trained), "--quiet", "--no-report"])
        assert ended.code == 0, ended.text
    source = RunDirectory(trained / "demo")
    (place / "runs").mkdir(exist_ok=True)
    directory = create_run(place / "runs", name)
    for file in ("env.json", "data.json"):
        shutil.copy(source.path / file, directory.path / file)
    asked = load_config({**CONFIG, "name": name, "train": {**CONFIG["train"], "steps": step}})
    directory.config_path.write_text(asked.to_yaml())
    loaded = load(source)
    loaded.state["loop"]["step"] = step
    save(directory, step, loaded.state, keep_last=1, extra_manifest=loaded.manifest["extra"])
    first = [json.loads(line) for line in source.metrics_path.read_text().splitlines()]
    line = next(line for line in first if line["kind"] == "train")
    judged = next(line for line in first if line["kind"] == "evaluate")
    with directory.metrics_path.open("w") as metrics:
        for at in range(max(1, step - lines + 1), step + 1):
            metrics.write(json.dumps({**line, "step": at}, separators=(",", ":")) + "\n")
        metrics.write(json.dumps({**judged, "step": step}) + "\n")
    summary = json.loads(source.summary_path.read_text())
    directory.summary_path.write_text(json.dumps({**summary, "steps": step, "total_steps": step}))
    return directory


def resume(directory: RunDirectory) -> list[str]:
    """Return the command that goes on for two steps."""
    step = int(json.loads(directory.summary_path.read_text())["steps"])
    words = [
        str(directory.config_path),
        f"train.steps={step + 2}",
        "train.evaluate_every=0",
        "--no-report",
        "--quiet",
    ]
    return ["train", *words, "--resume", str(directory.path)]


def report_lines(place: Path, count: int) -> list[str]:
    """A report of a run with so many lines."""
    return ["report", str(make_run(place, count, count).path)]


def resume_lines(place: Path, count: int) -> list[str]:
    """Two more steps of a run with so many lines."""
    return resume(make_run(place, count, count))


def compare_lines(place: Path, count: int) -> list[str]:
    """A comparison of two finished runs with so many lines each."""
    return ["compare", *(str(make_run(place, count, count, name).path) for name in ("one", "two"))]


def late_steps(place: Path, step: int) -> list[str]:
    """Two more steps of a run that is at this step."""
    return resume(make_run(place, step, 10))


def many_runs(place: Path, count: int) -> list[str]:
    """A new run in a folder of so many of the same name."""
    source = make_run(place, 2, 2)
    for number in range(2, count + 1):
        shutil.copytree(source.path, place / "runs" / f"demo-{number}")
    return [
        "train",
        str(place.parent / "first.yaml"),
        "--runs",
        str(place / "runs"),
        "--quiet",
        "--no-report",
    ]


def newest_of_many(place: Path, count: int) -> list[str]:
    """Two more steps of the newest of so many runs."""
    many_runs(place, count)
    words = [
        str(place.parent / "first.yaml"),
        "--runs",
        str(place / "runs"),
        "train.steps=4",
        "--quiet",
        "--no-report",
    ]
    return ["train", *words, "--resume"]


def image_files(place: Path, count: int) -> list[str]:
    """One step of two pictures of so many."""
    generator = random.Random(0)
    for part in ("train", "test"):
        for label in ("a", "b"):
            (place / "images" / part / label).mkdir(parents=True)
    for part, wanted in (("train", count), ("test", 10)):
        for index in range(wanted):
            folder = place / "images" / part / "ab"[index % 2]
            source = folder / f"{index // LINKS * LINKS + index % 2:07d}.png"
            path = folder / f"{index:07d}.png"
            if path == source:
                Image.frombytes("RGB", (8, 8), generator.randbytes(192)).save(path)
            else:
                os.link(source, path)
    dataset = {"name": "image_folder", "root": str(place / "images")}
    config = {**CONFIG, "dataset": dataset, "train": {**CONFIG["train"], "steps": 1}}
    (place / "images.yaml").write_text(json.dumps(config))
    return [
        "train",
        str(place / "images.yaml"),
        "--runs",
        str(place / "runs"),
        "--quiet",
        "--no-report",
    ]


def large_state(place: Path, size: int) -> RunDirectory:
    """Return a run whose checkpoint has so many bytes more, zeros that take no place on the disk."""
    directory = make_run(place, 2, 2)
    folder = next(directory.checkpoints.glob("step-*"))
    with (folder / TENSORS).open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        data = file.read()
        header["zeros"] = {
            "dtype": "U8",
            "shape": [size],
            "data_offsets": [len(data), len(data) + size],
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        begin = len(text).to_bytes(8, "little") + text + data
        file.seek(0)
        file.write(begin)
        file.truncate(len(begin) + size)
    digest, zeros = hashlib.sha256(begin), bytes(PIECE)
    for left in range(size, 0, -PIECE):
        digest.update(zeros[: min(left, PIECE)])
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][TENSORS] = {"sha256": digest.hexdigest(), "bytes": len(begin) + size}
    manifest.pop("sha256")
    (folder / MANIFEST).write_text(json.dumps({**manifest, "sha256": hash_manifest(manifest)}))
    return directory


def report_state(place: Path, size: int) -> list[str]:
    """A report of a run with a state of so many bytes."""
    return ["report", str(large_state(place, size).path)]


def cut_state(place: Path, size: int) -> list[str]:
    """A resume from a state of so many bytes of which one is missing."""
    directory = large_state(place, size)
    file = next(directory.checkpoints.glob("step-*")) / TENSORS
    os.truncate(file, file.stat().st_size - 1)
    return resume(directory)


def resume_state(place: Path, size: int) -> list[str]:
    """Two more steps from a state of so many bytes."""
    return resume(large_state(place, size))


def growth(folder: Path, steps: int) -> str:
    """Train so many steps and return a sentence on the memory after a tenth of them and at the end."""
    place = folder / "steps"
    place.mkdir()
    train = {
        **CONFIG["train"],
        "steps": steps,
        "log_every": max(1, steps // 200),
        "evaluate_every": 0,
    }
    (place / "config.yaml").write_text(json.dumps({**CONFIG, "train": train}))
    seen: list[tuple[int, int]] = []
    metrics = place / "runs" / "demo" / "metrics.jsonl"
    with begun(
        ["train", str(place / "config.yaml"), "--runs", str(place / "runs"), "--quiet"]
    ) as process:
        while process.poll() is None:
            time.sleep(0.2)
            with contextlib.suppress(OSError, ValueError, IndexError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                rss = int(status.split("VmRSS:")[1].split()[0]) * 1024
                seen.append((int(json.loads(metrics.read_text().splitlines()[-1])["step"]), rss))
        assert process.returncode == 0, process.stdout and process.stdout.read()
    trained = [(step, rss) for step, rss in seen if step < steps]  # the report comes after the last
    early = next(rss for step, rss in trained if step >= steps // 10)
    last, late = trained[-1]
    memory = f"{early >> 20:,} MiB after a tenth of them, {late >> 20:,} MiB at step {last:,}"
    return f"Memory of a training of {steps:,} steps: {memory}."


ROWS = (
    Row("report, lines of its log", 1000, 100_000, report_lines),
    Row("resume, lines of its log", 1000, 100_000, resume_lines),
    Row("compare, lines of each log", 1000, 100_000, compare_lines),
    Row("steps, resumed there", 2, 2**31 + 7, late_steps),
    Row("images, trained on for one step", 100, 100_000, image_files),
    Row("new run, among runs of its name", 2, 1000, many_runs),
    Row("newest run, resumed among so many", 2, 1000, newest_of_many),
    Row("report of a state, bytes", 1 << 20, LARGE_STATE_BYTES, report_state),
    Row("cut state refused, bytes", 1 << 20, LARGE_STATE_BYTES, cut_state, code=4),
    Row("resume of a state, bytes", 1 << 20, 1 << 30, resume_state),
)

if __name__ == "__main__":
    main()
