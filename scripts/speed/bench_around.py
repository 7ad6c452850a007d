"""What lies around a training step, each against the usual way of doing it: `python scripts/speed/bench_around.py`.

Start-up, steps, checkpoints, evaluation, image files, reports. Both sides of a row do equal work and take turns, so a
busy machine slows both; a row's figure is the median over rounds of the ratio within a round, of wall time and of
processor time. Below 1 mpt is faster.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import io
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mpt
from mpt import vision_ops
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.data.loading.loader import Loader
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.evaluation import evaluate
from mpt.run.checkpoints.background_save import BackgroundSave
from mpt.run.checkpoints.checkpoint import encode, load, save, write
from mpt.run.records.layout import create_run

ROOT = Path(__file__).resolve().parents[2]
Work = Callable[[], object]
BY_HAND = """
import numpy, sys, torch
from torch import nn
from torch.nn import functional
torch.manual_seed(0)
data = numpy.load(sys.argv[1])
images = torch.from_numpy(data["images"].reshape(-1, 1, 8, 8)).float() / float(data["images"].max())
labels = torch.from_numpy(data["labels"].astype("int64"))
net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
order = torch.randperm(len(images))[:64]
optimizer.zero_grad()
loss = functional.cross_entropy(net(images[order]), labels[order])
loss.backward()
optimizer.step()
print(f"step 1 loss {loss.item():.4f}")
"""
"""The least a user would write for one step of the same size."""
CONFIG: dict[str, Any] = {
    "model": {"name": "small_cnn", "image_size": 8, "features": 8},
    "dataset": {"name": "digits"},
    "precision": {"mode": "fp32"},
    "optimizer": {"name": "adam", "lr": 1e-3},
    "train": {
        "steps": 1,
        "batch_size": 64,
        "checkpoint_every": 0,
        "on_non_finite": "stop",
        "device": "cpu",
    },
}


@dataclass(frozen=True)
class Row:
    """One comparison: what, mpt's way, the usual way, and how the usual way is called."""

    name: str
    ours: Work
    usual: Work
    usual_name: str
    afterwards: Work = lambda: None
    """What mpt still has to do before the next turn, beside something else; not counted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=ROWS, help="these rows")
    parser.add_argument("--megabytes", type=int, default=256, help="size of a checkpoint's tensors")
    parser.add_argument("--output", type=Path, help="file for the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            f"torch {torch.__version__}, {os.cpu_count()} cores, one thread, {options.rounds} rounds, median ratios",
            "",
            "| what | mpt | usual | wall ratio | processor ratio | the usual way |",
            "|---|---:|---:|---:|---:|---|",
        ]
        for key in options.only or ROWS:
            place = Path(folder) / key
            place.mkdir()
            for row in ROWS[key](place, options):
                lines.append(measure(row, options.rounds))
                print(lines[-1], file=sys.stderr, flush=True)
            shutil.rmtree(place)
    text = "\n".join(lines)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", "utf-8")


def measure(row: Row, rounds: int) -> str:
    """Let both sides take turns, in changing order; return a line of the table."""
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    drawing = random.Random(0)
    for side in (row.ours, row.usual):
        side()  # what is made once
    for _ in range(rounds):
        for ours in drawing.sample((True, False), 2):
            gc.collect()
            before, started = processor_seconds(), time.perf_counter()
            (row.ours if ours else row.usual)()
            times[ours].append((time.perf_counter() - started, processor_seconds() - before))
            row.afterwards()
    walls = [own[0] / other[0] for own, other in zip(times[True], times[False], strict=True)]
    processors = [
        own[1] / max(other[1], 1e-9) for own, other in zip(times[True], times[False], strict=True)
    ]
    ours, usual = (statistics.median(wall for wall, _ in times[side]) for side in (True, False))
    return (
        f"| {row.name} | {ours:.3f} s | {usual:.3f} s | {statistics.median(walls):.2f} | "
        f"{statistics.median(processors):.2f} | {row.usual_name} |"
    )


def processor_seconds() -> float:
    """Return the processor time of this process and of those it has waited for."""
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def run(command: Sequence[str]) -> None:
    """Run a program to its end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def start_rows(place: Path, options: argparse.Namespace) -> list[Row]:
    """From the command to the end of one step."""
    program, config = place / "by_hand.py", place / "config.yaml"
    program.write_text(BY_HAND)
    config.write_text(json.dumps(CONFIG))
    digits = str(ROOT / "mpt" / "data" / "digits.npz")

    def ours() -> None:
        run(
            [
                sys.executable,
                "-m",
                "mpt",
                "train",
                str(config),
                "--runs",
                str(place),
                "--no-report",
                "--quiet",
            ]
        )

    words = "a script of 15 lines: no evaluation, no checkpoint"
    return [
        Row(
            "`mpt train` of one step",
            ours,
            lambda: run([sys.executable, str(program), digits]),
            words,
        )
    ]


def checkpoint_rows(place: Path, options: argparse.Namespace) -> list[Row]:
    """Saving and loading a state."""
    count = options.megabytes * 2**20 // 4 // 16
    state = {"model": {f"layer{n}": torch.randn(count) for n in range(16)}, "step": 1}
    directory = create_run(place, "run")
    path = place / "state.pt"

    def hashed_by_hand() -> None:
        torch.save(state, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            (place / "state.sha256").write_text(hashlib.file_digest(file, "sha256").hexdigest())

    def plainly() -> None:
        with (place / "plain.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load_hashed() -> None:
        with path.open("rb") as file:
            assert (
                hashlib.file_digest(file, "sha256").hexdigest()
                == (place / "state.sha256").read_text()
            )
        torch.load(path, weights_only=True)

    def load_plainly() -> None:
        torch.load(path, weights_only=True)

    size = f"{options.megabytes} MiB"
    hashed_by_hand()

    def ours() -> None:
        save(directory, 1, state, keep_last=1)

    saver = BackgroundSave(True)

    def ours_beside() -> None:
        saver.start(1, encode(state), lambda copied: write(directory, 1, copied, keep_last=1))

    return [
        Row(
            f"a step waits for saving {size}",
            ours_beside,
            ours,
            "mpt's save between steps",
            saver.finish,
        ),
        Row(
            f"a step waits for saving {size}",
            ours_beside,
            plainly,
            "torch.save and fsync, no hash",
            saver.finish,
        ),
        Row(f"saving {size}", ours, hashed_by_hand, "torch.save, fsync, then sha256 of the file"),
        Row(f"saving {size}", ours, plainly, "torch.save and fsync, no hash"),
        Row(
            f"loading {size}",
            lambda: load(directory),
            load_hashed,
            "sha256 of the file, then torch.load",
        ),
        Row(
            f"loading {size}",
            lambda: load(directory),
            load_plainly,
            "torch.load, unchecked",
        ),
    ]


def evaluation_rows(place: Path, options: argparse.Namespace) -> list[Row]:
    """The test set under autocast."""
    model = {"name": "small_cnn", "image_size": 16, "features": 64}
    config = load_config({**CONFIG, "model": model, "precision": "bf16"})
    train_data, test_data = build_datasets(config)
    built = build_run(config, torch.device("cpu"), train_data.spec)
    net = built.task.modules["net"]

    def by_hand() -> None:
        right, loss = 0, 0.0
        net.eval()
        loader = Loader(test_data, 64, 0, drop_last=False, shuffle=False)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for batch in loader.evaluation_batches():
                image = (
                    batch["image"].float() / 255
                    if batch["image"].dtype == torch.uint8
                    else batch["image"]
                )
                logits = net((image - 0.5) / 0.5).float()
                right += int((logits.argmax(1) == batch["label"]).sum())
                loss += float(functional.cross_entropy(logits, batch["label"], reduction="sum"))
        net.train()

    return [
        Row(
            "evaluating, bfloat16",
            lambda: evaluate(built, test_data, 64),
            by_hand,
            "a loop under one autocast",
        )
    ]


def step_rows(place: Path, options: argparse.Namespace) -> list[Row]:
    """Steps of a small network with their batches, and the batches alone."""
    model = {"name": "small_cnn", "image_size": 16, "features": 64}
    config = load_config({**CONFIG, "model": model})
    built, other = mpt.build(config), mpt.build(config)
    batches, taken = built.batches(), iter(range(10**9))
    whole = other.train_data.fetch(range(len(other.train_data)), 0)
    image = other.run.data.as_floats(whole)["image"]
    tensors = torch.utils.data.TensorDataset(image, whole["label"])
    by_hand = torch.utils.data.DataLoader(tensors, 64, shuffle=True, drop_last=True)
    net = other.modules["net"]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def ours() -> None:
        for _ in range(len(by_hand)):
            mpt.update(built, next(batches), next(taken))

    def usual() -> None:
        for images, labels in by_hand:
            optimizer.zero_grad()
            functional.cross_entropy(net((images - 0.5) / 0.5), labels).backward()
            optimizer.step()

    loader = Loader(other.train_data, 64, 0)

    def ours_alone() -> None:
        stream = loader.batches(0)
        for _ in range(len(by_hand)):
            other.run.data.as_floats(next(stream))

    def usual_alone() -> None:
        for _ in by_hand:
            pass

    count = f"{len(by_hand)} batches of 64 digits"
    return [
        Row(f"{count}, trained on", ours, usual, "a loop with DataLoader: no finite check"),
        Row(count, ours_alone, usual_alone, "DataLoader over a TensorDataset"),
    ]


def image_rows(place: Path, options: argparse.Namespace) -> list[Row]:
    """Photographs from files, cut at random."""
    from PIL import Image

    transforms: Any = vision_ops.import_torchvision("transforms")
    folders: Any = vision_ops.import_torchvision("datasets")

    for number in range(32):
        folder = place / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = torch.nn.functional.interpolate(
            torch.rand(1, 3, 24, 32), size=(768, 1024), mode="bicubic"
        )[0]
        array = (pixels.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(array).save(folder / f"{number}.jpg", quality=90)
    rows = []
    for name, augment, usual in (
        (
            "RandomResizedCrop",
            ["RandomResizedCrop", "RandomHorizontalFlip"],
            [transforms.RandomResizedCrop(128)],
        ),
        ("resize", [], [transforms.CenterCrop(768), transforms.Resize(128)]),
    ):
        dataset: dict[str, Any] = {"name": "image_folder", "root": str(place), "test_fraction": 0.1}
        if augment:
            dataset["augment"] = augment
        config = load_config(
            {
                **CONFIG,
                "model": {"name": "small_cnn", "image_size": 128},
                "dataset": {**dataset, "channels": 3},
            }
        )
        data = build_datasets(config)[0]
        fast = build_datasets(
            replace(config, dataset=replace(config.dataset, settings=faster(config)))
        )[0]
        flip = [transforms.RandomHorizontalFlip()] if augment else []
        folder = folders.ImageFolder(
            place / "train", transforms.Compose([*usual, *flip, transforms.ToTensor()])
        )
        order = list(range(min(len(data), 28)))

        def theirs(folder: Any = folder, order: list[int] = order) -> None:
            for _ in torch.utils.data.DataLoader(
                torch.utils.data.Subset(folder, order), batch_size=14
            ):
                pass

        for words, used in (("", data), (", decoding: fast", fast)):

            def ours(data: Any = used, order: list[int] = order) -> None:
                for start in range(0, len(order), 14):
                    data.fetch(order[start : start + 14], 0)

            title = f"28 photographs of 1024 x 768, {name} to 128{words}"
            rows.append(Row(title, ours, theirs, "torchvision and DataLoader"))
    return rows


def faster(config: Config) -> Any:
    """Return the settings of a data set with fast decoding."""
    return config.dataset.settings.model_copy(update={"decoding": "fast"})


def report_rows(place: Path, options: argparse.Namespace) -> list[Row]:
    """The report of a long run."""
    run_folder = place / "run"
    run_folder.mkdir()
    (run_folder / "config.yaml").write_text("model: {name: small_cnn}\n")
    line = {
        "kind": "train",
        "time": 1.7e9,
        "seconds": 1.0,
        "losses": {"net/loss": 0.5, "aux": 0.25},
        "lr": {"net": 1e-3},
    }
    line |= {
        "scale": {"net": 65536.0},
        "skipped": {"net": 0},
        "step_seconds": 0.1,
        "samples_per_second": 640.0,
    }
    with (run_folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 200_001):
            file.write(json.dumps({**line, "step": step}, separators=(",", ":")) + "\n")

    def by_hand() -> None:
        from matplotlib.figure import Figure

        lines = [json.loads(text) for text in (run_folder / "metrics.jsonl").open()]
        figure = Figure()
        axes = figure.add_subplot()
        for name in ("net/loss", "aux"):
            axes.plot([row["step"] for row in lines], [row["losses"][name] for row in lines])
        figure.savefig(io.BytesIO(), format="png")

    def ours() -> None:
        from mpt.report.run_page.page import write_report

        write_report(run_folder)

    return [
        Row(
            "a report of 200,000 lines, five plots",
            ours,
            by_hand,
            "json.loads and one plot of two losses",
        )
    ]


def compare_rows(place: Path, options: argparse.Namespace) -> list[Row]:
    """Two modes with two seeds."""
    config = place / "config.yaml"
    settings = {**CONFIG, "train": {**CONFIG["train"], "steps": 30}}
    config.write_text(json.dumps(settings))
    numbers = iter(range(1000))
    mpt = [sys.executable, "-m", "mpt"]

    def ours() -> None:
        output = str(place / f"compared{next(numbers)}")
        run(
            [
                *mpt,
                "compare",
                "fp32",
                "bf16",
                "--config",
                str(config),
                "--seeds",
                "2",
                "--output",
                output,
            ]
        )

    def one_by_one() -> None:
        for mode in ("fp32", "bf16"):
            for seed in (0, 1):
                words = [
                    f"precision={mode}",
                    "--seed",
                    str(seed),
                    "--runs",
                    str(place / "runs"),
                    "--quiet",
                ]
                run([*mpt, "train", str(config), *words])

    return [
        Row(
            "comparing two modes, two seeds, 30 steps",
            ours,
            one_by_one,
            "`mpt train` four times, no verdict",
        )
    ]


ROWS: dict[str, Callable[[Path, argparse.Namespace], list[Row]]] = {
    "start": start_rows,
    "step": step_rows,
    "checkpoint": checkpoint_rows,
    "evaluation": evaluation_rows,
    "images": image_rows,
    "report": report_rows,
    "compare": compare_rows,
}

if __name__ == "__main__":
    main()
