"""Measure what the loop costs beside the work: mpt against a hand-written PyTorch loop, Accelerate and Lightning.

Usage: OMP_NUM_THREADS=1 python scripts/speed/bench_overhead.py [--mode fp32|bf16] [--rounds 12] [--steps 100] [--output
FOLDER]

All contestants train the same small network with the same optimizer on the same number of samples, and log the mean
loss every 10 steps. They take turns step by step, in random order: each runs in a greenlet that is left where a step
ends, so that a drift of the machine meets all of them within a few hundredths of a second. The figure is the median,
over all turns, of a step's ratio to the hand-written step of the same turn; its interval comes from drawing whole
rounds again. A round builds every network anew, so that no one keeps a lucky place in memory. The hand-written loop
runs twice: what the second differs from the first is noise. Every contestant fetches its own batches: the hand-written
loop indexes a tensor, mpt's come from its own loader, and those of Accelerate and Lightning lie ready in a list, so
that their data loaders are not what is measured.

Needs greenlet (pip install greenlet); Accelerate and Lightning take part where they are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import io
import itertools
import json
import logging
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import greenlet
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpt.boards.boards import Boards
from mpt.boards.console import Console
from mpt.config.load import load_config
from mpt.data.loading.loader import Loader
from mpt.engine.building.build import build_datasets, build_networks, build_run, seed_everything
from mpt.engine.loop.loop import fit
from mpt.engine.loop.training import Training
from mpt.run.process.files import write_atomically
from mpt.run.process.signals import StopRequest
from mpt.run.records.layout import create_run
from mpt.run.records.recorder import Recorder
from mpt.seams import Batch

BASELINE = "hand-written"
LOG_EVERY = 10
DROPPED_STEPS = 5
"""At the head of each round: warm-up, and the step whose memory mpt tracks."""

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}

Turn = Callable[[], None]
Contestant = Callable[[int, Turn], None]
"""Train so many steps, and call `turn` where each of them ends."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument(
        "--clock",
        choices=["cpu", "wall"],
        default="cpu",
        help="cpu: what else runs here is not counted",
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument(
        "--features",
        type=int,
        default=38,
        help="width of the network; 38 makes a step of about 10 ms",
    )
    parser.add_argument("--only", nargs="+", help="these contestants beside the hand-written loop")
    parser.add_argument("--output", type=Path, help="folder for overhead.md and overhead.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    contestants = make_contestants(options)
    kept = {BASELINE, *(options.only or contestants)}
    seconds = race({n: c for n, c in contestants.items() if n in kept}, options)
    lines, content = describe(seconds, options)
    print("\n".join(lines))
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        write_atomically(options.output / "overhead.md", "\n".join(lines) + "\n")
        write_atomically(options.output / "overhead.json", json.dumps(content, indent=1) + "\n")


def race(
    contestants: dict[str, Contestant], options: argparse.Namespace
) -> dict[str, list[list[float]]]:
    """Let the contestants take turns; return name -> the step times of each round, one per turn."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in contestants}
    clock = CLOCKS[options.clock]
    names, drawing = list(contestants), random.Random(0)
    for number in range(options.rounds):
        here = greenlet.getcurrent()
        runners = {
            name: greenlet.greenlet(
                functools.partial(contestants[name], options.steps, here.switch)
            )
            for name in names
        }
        times: dict[str, list[float]] = {name: [] for name in names}
        gc.collect()
        gc.disable()  # a collection would hit whoever happens to be running
        for _ in range(options.steps):
            for name in drawing.sample(names, len(names)):
                started = clock()
                runners[name].switch()
                times[name].append(clock() - started)
        gc.enable()
        for name, runner in runners.items():
            while not runner.dead:  # what a loop does after its last step
                runner.switch()
            # in the last turn mpt saves its checkpoint
            seconds[name].append(times[name][DROPPED_STEPS:-1])
        print(f"round {number + 1}/{options.rounds}", file=sys.stderr, flush=True)
    return seconds


def describe(
    seconds: dict[str, list[list[float]]], options: argparse.Namespace
) -> tuple[list[str], dict[str, Any]]:
    """Return the table and its data: medians over all turns, and the interval of the ratio by resampling rounds."""
    lines = [
        f"Seconds per step, {options.mode}, torch {torch.__version__}, {torch.get_num_threads()} thread, "
        f"{options.rounds} rounds of {options.steps} steps in turn, {options.clock} time",
        "",
        "| loop | median step | ratio of a turn, median | 90 % interval | ratio of mean steps |",
        "|---|---:|---:|---:|---:|",
    ]
    base = seconds[BASELINE]
    content: dict[str, Any] = {"mode": options.mode, "torch": torch.__version__, "loops": {}}
    for name, rounds in seconds.items():
        ratios = [
            [own / other for own, other in zip(mine, hand)] for mine, hand in zip(rounds, base)
        ]
        ratio = statistics.median(itertools.chain.from_iterable(ratios))
        low, high = interval_of_median(ratios)
        median = statistics.median(itertools.chain.from_iterable(rounds))
        mean = sum(map(sum, rounds)) / sum(map(sum, base))
        lines.append(
            f"| {name} | {median * 1e3:.3f} ms | {ratio:.4f} | {low:.4f} .. {high:.4f} | {mean:.4f} |"
        )
        content["loops"][name] = {
            "median": median,
            "ratio": ratio,
            "interval": [low, high],
            "mean_ratio": mean,
        }
    return lines, content


def interval_of_median(rounds: list[list[float]], draws: int = 400) -> tuple[float, float]:
    """Return the 5 % and 95 % points of the median when whole rounds are drawn again with replacement."""
    drawing = random.Random(0)
    medians = sorted(
        statistics.median(itertools.chain.from_iterable(drawing.choices(rounds, k=len(rounds))))
        for _ in range(draws)
    )
    return medians[draws // 20], medians[-draws // 20]


def make_contestants(options: argparse.Namespace) -> dict[str, Contestant]:
    """Return the loops that can run here."""
    config = load_config(
        {
            "model": {"name": "small_cnn", "image_size": 16, "features": options.features},
            "dataset": {"name": "digits"},
            "precision": {"mode": options.mode},
            "optimizer": {"name": "adam", "lr": 1e-3},
            "train": {
                "steps": options.steps,
                "batch_size": options.batch_size,
                "log_every": LOG_EVERY,
                "checkpoint_every": 0,
                "evaluate_every": 0,  # the step is measured, and an evaluation is none
                "sample_every": 0,
                "on_non_finite": "stop",
                "device": "cpu",
            },
        }
    )
    train_data, test_data = build_datasets(config)
    everything = train_data.fetch(list(range(len(train_data))), 0)
    images, labels = everything["image"], everything["label"]

    def network() -> nn.Module:
        seed_everything(0)
        return build_networks(config, train_data.spec, fake=False)["net"]

    def loss_of(net: nn.Module, image: Tensor, label: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=options.mode == "bf16"):
            logits = net((image - 0.5) / 0.5)
        return functional.cross_entropy(logits.float(), label)

    def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
        order = torch.randint(len(images), (steps, options.batch_size))
        return [(images[chosen], labels[chosen]) for chosen in order]

    def run_mpt(steps: int, turn: Turn) -> None:
        with tempfile.TemporaryDirectory() as folder, Console("quiet", steps) as console:
            built = build_run(config, torch.device("cpu"), train_data.spec)
            directory = create_run(Path(folder), "bench")
            loader = Loader(train_data, options.batch_size, 0)
            with Recorder(directory) as recorder:
                training = Training(
                    built,
                    directory,
                    recorder,
                    console,
                    loader,
                    test_data,
                    steps + 1,
                    Boards((), directory, {}),
                )
                stream = training.stream

                def in_turn() -> Iterator[Batch]:
                    for batch in stream():
                        yield batch
                        turn()  # runs when the next batch is asked for

                training.stream = in_turn  # type: ignore[method-assign]
                training.evaluate = lambda: None  # type: ignore[method-assign]
                fit(training, StopRequest(), stop_after=steps)

    def run_by_hand(steps: int, turn: Turn) -> None:
        net, total = network(), torch.zeros(())
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(images), generator=generator)
        for step in range(steps):
            start = step * options.batch_size % (len(images) - options.batch_size)
            chosen = order[start : start + options.batch_size]
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(net, images[chosen], labels[chosen])
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if (step + 1) % LOG_EVERY == 0:
                print(f"step {step + 1} loss {total.item() / LOG_EVERY:.4f}", file=io.StringIO())
                total.zero_()
            turn()

    contestants: dict[str, Contestant] = {
        BASELINE: run_by_hand,
        f"{BASELINE}, again": run_by_hand,
        "mpt": run_mpt,
    }
    if importlib.util.find_spec("accelerate"):
        contestants["Accelerate"] = accelerate_loop(options, network, loss_of, batches)
    if importlib.util.find_spec("lightning"):
        contestants["Lightning"] = lightning_loop(options, network, loss_of, batches)
    return contestants


def accelerate_loop(
    options: argparse.Namespace, network: Any, loss_of: Any, batches: Any
) -> Contestant:
    """Return a loop as Accelerate's documentation writes it."""
    from accelerate import Accelerator

    def run(steps: int, turn: Turn) -> None:
        accelerator = Accelerator(
            cpu=True, mixed_precision="bf16" if options.mode == "bf16" else "no"
        )
        net = network()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        net, optimizer = accelerator.prepare(net, optimizer)
        total = torch.zeros(())
        for step, (image, label) in enumerate(batches(steps)):
            with accelerator.accumulate(net):
                optimizer.zero_grad(set_to_none=True)
                logits = net((image - 0.5) / 0.5)
                loss = functional.cross_entropy(logits.float(), label)
                accelerator.backward(loss)
                optimizer.step()
            total += loss.detach()
            if (step + 1) % LOG_EVERY == 0:
                accelerator.print(
                    f"step {step + 1} loss {total.item() / LOG_EVERY:.4f}", file=io.StringIO()
                )
                total.zero_()
            turn()
        accelerator.free_memory()

    return run


def lightning_loop(
    options: argparse.Namespace, network: Any, loss_of: Any, batches: Any
) -> Contestant:
    """Return Lightning's trainer with everything optional switched off but logging."""
    import lightning

    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self, turn: Turn) -> None:
            super().__init__()
            self.net, self.turn = network(), turn

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = functional.cross_entropy(self.net((batch[0] - 0.5) / 0.5).float(), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net.parameters(), lr=1e-3)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.turn()

    def run(steps: int, turn: Turn) -> None:
        module = Module(turn)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            trainer = lightning.Trainer(
                max_steps=steps,
                accelerator="cpu",
                precision="bf16-mixed" if options.mode == "bf16" else "32-true",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                log_every_n_steps=LOG_EVERY,
            )
            loader = torch.utils.data.DataLoader(batches(steps), batch_size=None, shuffle=False)
            trainer.fit(module, loader)

    return run


if __name__ == "__main__":
    main()
