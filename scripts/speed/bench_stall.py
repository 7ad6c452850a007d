"""For how long saving stops a training of several processes, between steps and beside the training.

    python scripts/speed/bench_stall.py            # 2 gloo ranks on CPUs, some 200 MiB of state

Whole trainings are run, with `train.asynchronous_save` and without, in ddp and fsdp; told is how long `Training.save`
keeps the slower rank, medians over the saves but the last, which a run waits for. `written` says after how long the
checkpoint had its name.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mpt.report.run_page.page
from mpt.commands.train import Command as TrainArguments
from mpt.commands.train import run as train
from mpt.engine.loop.training import Training
from mpt.run.checkpoints import checkpoint
from tests.parallel.forked import run_ranks

CONFIG = """
model: {{name: lsgan, hidden: {hidden}, image_size: 32}}
dataset: {{name: digits}}
precision: fp32
optimizer: {{name: adam, lr: 0.0001}}
train: {{steps: {steps}, batch_size: 32, checkpoint_every: {every}, keep_last: 1, asynchronous_save: {beside}}}
parallel: {{strategy: {strategy}}}
"""


def on_rank(rank: int, folder: Path) -> dict[str, list[float]]:
    """Train, and return the seconds of every save."""
    stalls: list[float] = []
    begun: list[float] = []
    written: list[float] = []
    save, write = Training.save, checkpoint.write

    def timed_save(training: Training) -> Any:
        begun.append(time.perf_counter())
        try:
            return save(training)
        finally:
            stalls.append(time.perf_counter() - begun[-1])

    def timed_write(*args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        finally:
            written.append(time.perf_counter() - begun[-1])

    Training.save, checkpoint.write = timed_save, timed_write  # type: ignore[method-assign]
    mpt.report.run_page.page.write_report = lambda path: None  # type: ignore[assignment]
    train(
        TrainArguments(
            config=folder / "c.yaml", runs=str(folder / "runs"), name="r", quiet=True, device="cpu"
        )
    )
    return {"stalls": stalls[:-1], "written": written[:-1]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--every", type=int, default=6, help="steps between saves")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    print(
        "| strategy | ranks | state, MiB | saved | a step waits, s | written after, s |\n|---|---:|---:|---|---:|---:|"
    )
    for strategy in ("ddp", "fsdp"):
        for beside in ("false", "true"):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                steps = arguments.saves * arguments.every + 1
                words = {"steps": steps, "beside": beside, "strategy": strategy}
                text = CONFIG.format(hidden=arguments.hidden, every=arguments.every, **words)
                (folder / "c.yaml").write_text(text)
                told = run_ranks(arguments.ranks, on_rank, folder, limit=900)
                files = (folder / "runs" / "r" / "checkpoints").glob("*/*.safetensors")
                size = sum(path.stat().st_size for path in files) / 2**20
            stall = statistics.median(map(max, *(one["stalls"] for one in told)))
            written = statistics.median(told[0]["written"])
            how = "beside the training" if beside == "true" else "between steps"
            print(
                f"| {strategy} | {arguments.ranks} | {size:.0f} | {how} | {stall:.2f} | {written:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
