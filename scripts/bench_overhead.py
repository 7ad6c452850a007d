"""Measure what the loop costs beside the work: mpt against a hand-written PyTorch loop, Accelerate and Lightning.

Usage: OMP_NUM_THREADS=1 python scripts/bench_overhead.py [--mode fp32|bf16] [--rounds 12] [--steps 60] [--output
FOLDER]

All contestants train the same small network with the same optimizer on the same number of samples, log the mean loss
every 50 steps, and take turns in short blocks in rotating order, so that a drift of the machine meets all of them. A
step is timed from its start to the start of the next, which leaves nothing out. The figure is the ratio of medians to
the hand-written loop. Accelerate and Lightning take part where they are installed; their batches come ready-made from
a list, so that their data loaders are not what is measured; mpt's batches come from its own loader, and the
hand-written loop indexes a tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import itertools
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpt.config.load import load_config
from mpt.data.loader import Loader
from mpt.engine.build import build_datasets, build_networks, build_run, seed_everything
from mpt.engine.loop import Training
from mpt.run.console import Console
from mpt.run.files import write_atomically
from mpt.run.layout import create_run
from mpt.run.recorder import Recorder
from mpt.run.signals import StopRequest

LOG_EVERY = 10
DROPPED_STEPS = 5
"""At the head of each block: warm-up, and the step whose memory mpt tracks."""

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}

Contestant = Callable[[int], list[float]]
"""Train so many steps and return when each began."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument(
        "--clock", choices=["cpu", "wall"], default="cpu", help="cpu: what else runs here is not counted"
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--features", type=int, default=24, help="width of the network; 24 makes a step of about 10 ms")
    parser.add_argument("--output", type=Path, help="folder for overhead.md and overhead.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seconds = race(make_contestants(options), options.rounds, options.steps)
    lines, content = describe(seconds, options)
    print("\n".join(lines))
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        write_atomically(options.output / "overhead.md", "\n".join(lines) + "\n")
        write_atomically(options.output / "overhead.json", json.dumps(content, indent=1) + "\n")


def race(contestants: dict[str, Contestant], rounds: int, steps: int) -> dict[str, list[list[float]]]:
    """Let the contestants take turns; return name -> a list of step times per round."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            gc.collect()
            gc.disable()  # a collection would hit whoever happens to be running
            marks = contestants[name](steps)
            gc.enable()
            if number:  # the first round warms up
                times = [after - before for before, after in itertools.pairwise(marks)]
                seconds[name].append(times[DROPPED_STEPS:])
        print(f"round {number}/{rounds}", file=sys.stderr, flush=True)
    return seconds


def describe(seconds: dict[str, list[list[float]]], options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return the table and its data: the median over rounds of the rounds' medians, and the ratios per round."""
    base = [statistics.median(times) for times in seconds["hand-written"]]
    lines = [
        f"Seconds per step, {options.mode}, torch {torch.__version__}, {torch.get_num_threads()} thread, "
        f"{options.rounds} rounds of {options.steps} steps in turn, {options.clock} time",
        "",
        "| loop | median step | ratio of medians | rounds from .. to | mean step |",
        "|---|---:|---:|---:|---:|",
    ]
    content: dict[str, Any] = {"mode": options.mode, "torch": torch.__version__, "loops": {}}
    for name, rounds in seconds.items():
        medians = [statistics.median(times) for times in rounds]
        ratios = sorted(own / other for own, other in zip(medians, base))
        every = [value for times in rounds for value in times]
        middle, ratio = statistics.median(every), statistics.median(ratios)
        mean = statistics.fmean(every)
        span = f"{ratios[0]:.3f} .. {ratios[-1]:.3f}"
        lines.append(f"| {name} | {middle * 1e3:.3f} ms | {ratio:.4f} | {span} | {mean * 1e3:.3f} ms |")
        content["loops"][name] = {"median": middle, "ratio": ratio, "ratios": ratios, "mean": mean}
    return lines, content


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

    def run_mpt(steps: int) -> list[float]:
        with tempfile.TemporaryDirectory() as folder, Console("quiet", steps) as console:
            built = build_run(config, torch.device("cpu"), train_data.spec)
            directory = create_run(Path(folder), "bench")
            loader = Loader(train_data, options.batch_size, 0)
            with Recorder(directory) as recorder:
                training = Training(built, directory, recorder, console, loader, test_data, steps + 1)
                marks: list[float] = []
                stream = training.stream

                def marking() -> Any:
                    for batch in stream():
                        yield batch
                        marks.append(CLOCKS[options.clock]())  # runs when the next batch is asked for

                training.stream = marking  # type: ignore[method-assign]
                training.evaluate = lambda: None  # type: ignore[method-assign]
                training.go(StopRequest(), stop_after=steps)
        return marks

    def run_by_hand(steps: int) -> list[float]:
        net, marks, total = network(), [], torch.zeros(())
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(images), generator=generator)
        for step in range(steps):
            marks.append(CLOCKS[options.clock]())
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
        return marks

    contestants: dict[str, Contestant] = {"hand-written": run_by_hand, "mpt": run_mpt}
    if importlib.util.find_spec("accelerate"):
        contestants["Accelerate"] = accelerate_loop(options, network, loss_of, batches)
    if importlib.util.find_spec("lightning"):
        contestants["Lightning"] = lightning_loop(options, network, loss_of, batches)
    return contestants


def accelerate_loop(options: argparse.Namespace, network: Any, loss_of: Any, batches: Any) -> Contestant:
    """Return a loop as Accelerate's documentation writes it."""
    from accelerate import Accelerator

    def run(steps: int) -> list[float]:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16" if options.mode == "bf16" else "no")
        net = network()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        net, optimizer = accelerator.prepare(net, optimizer)
        marks, total = [], torch.zeros(())
        for step, (image, label) in enumerate(batches(steps)):
            marks.append(CLOCKS[options.clock]())
            with accelerator.accumulate(net):
                optimizer.zero_grad(set_to_none=True)
                logits = net((image - 0.5) / 0.5)
                loss = functional.cross_entropy(logits.float(), label)
                accelerator.backward(loss)
                optimizer.step()
            total += loss.detach()
            if (step + 1) % LOG_EVERY == 0:
                accelerator.print(f"step {step + 1} loss {total.item() / LOG_EVERY:.4f}", file=io.StringIO())
                total.zero_()
        accelerator.free_memory()
        return marks

    return run


def lightning_loop(options: argparse.Namespace, network: Any, loss_of: Any, batches: Any) -> Contestant:
    """Return Lightning's trainer with everything optional switched off but logging."""
    import lightning

    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.marks = network(), []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = functional.cross_entropy(self.net((batch[0] - 0.5) / 0.5).float(), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net.parameters(), lr=1e-3)

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            self.marks.append(CLOCKS[options.clock]())

    def run(steps: int) -> list[float]:
        module = Module()
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
        return module.marks

    return run


if __name__ == "__main__":
    main()
