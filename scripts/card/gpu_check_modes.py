"""One configuration in every precision mode: memory, seconds per step, samples per second, skipped steps, the figure.

Part of `gpu_check.py`, which starts a process of this for each configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MODES = ("fp32", "tf32", "amp", "bf16", "O1", "O2")
FIRST_CONFIGS = ("classify_digits.yaml", "dcgan_amp.yaml", "stylegan2_16.yaml", "saehd_demo.yaml")
"""One of each system, with its data."""
LARGE_CONFIGS = ("saehd_512.yaml", "stylegan2_256.yaml", "resnet50_imagefolder.yaml")
"""Measured last, since they take longest, and left out of a rehearsal: tests/cuda_rehearsal makes them smaller."""
TOO_LARGE = "too large for a rehearsal"
REHEARSED_MODES = ("fp32", "amp")
"""Of all other configurations in a rehearsal: tests/cuda_rehearsal crosses configurations and modes."""
MOST_STEPS, REHEARSAL_STEPS, REHEARSAL_BATCH = 300, 3, 4
WARM_UP_STEPS = 3
METRIC_SAMPLES, REHEARSED_SAMPLES = 256, 32
SUBSTITUTES: dict[str, dict[str, Any]] = {
    "image_folder": {"name": "shapes", "size": 512},
    "faceset": {"name": "procedural_faces", "count": 24, "test_count": 8},
}
LARGE_PARAMETERS = 30_000_000
"""A rehearsal leaves out what a CPU would take minutes for."""


def check_config(
    path: Path, seconds: float, rehearsal: str, tell: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure every mode of a config within about `seconds`; tell what there is after each, should the end be early."""
    started = time.monotonic()
    import torch

    from mpt.engine.step.faults import is_out_of_memory
    from mpt.errors import DataError, MptError

    flags = precision_flags(torch)
    entry: dict[str, Any] = {"config": path.name, "modes": [], "substitute": None}
    if rehearsal and path.name in LARGE_CONFIGS:
        return {**entry, "error": TOO_LARGE}
    try:
        config, entry["substitute"] = read_config(path, rehearsal)
    except MptError as error:
        return {**entry, "error": str(error).splitlines()[0]}
    entry |= {"model": config.model.name, "batch_size": config.train.batch_size}
    steps = REHEARSAL_STEPS if rehearsal else None
    modes = modes_of(path, rehearsal)
    for index, mode in enumerate(modes):
        left = seconds - (time.monotonic() - started)
        if index and left < 2:
            entry["modes"].append({"mode": mode, "error": "not reached in time"})
            continue
        set_flags(torch, flags)
        row: dict[str, Any] = {"mode": mode}
        try:
            row |= measure(config, mode, steps, left / (len(modes) - index), rehearsal)
            steps = row["steps"]
        except DataError as error:  # the same in every mode
            return {**entry, "modes": [], "error": str(error).splitlines()[0]}
        except MptError as error:
            row["error"] = str(error).splitlines()[0]
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            # where the weights alone find no room
            row["error" if is_out_of_memory(error) else "crash"] = text
            traceback.print_exc()
        entry["modes"].append(row)
        tell(entry)
        if row.get("error") == TOO_LARGE:
            break
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return entry


def modes_of(path: Path, rehearsal: str) -> tuple[str, ...]:
    """Return the modes that a config is measured in."""
    return REHEARSED_MODES if rehearsal and path.name not in FIRST_CONFIGS else MODES


def read_config(path: Path, rehearsal: str) -> tuple[Any, str | None]:
    """Return the config, its data replaced by drawn data where it is missing, and the name of the substitute."""
    from mpt.config.load import load_config
    from mpt.engine.building.build import build_datasets
    from mpt.errors import DataError

    overrides = [
        "train.epochs=null",
        f"train.steps={MOST_STEPS}",
        "train.evaluate_every=0",
        "train.sample_every=0",
    ]
    overrides += ["train.checkpoint_every=0", "train.on_non_finite=stop", "dataset.workers=0"]
    if rehearsal:
        overrides += [f"train.batch_size={REHEARSAL_BATCH}", f"train.device={rehearsal}"]
    config = load_config(path, overrides)
    data = config.to_data()
    # thousands of samples in each mode would take the steps' time
    if data["task"].get("metric_samples"):
        most = REHEARSED_SAMPLES if rehearsal else METRIC_SAMPLES
        data["task"]["metric_samples"] = min(most, data["task"]["metric_samples"])
        config = load_config(data)
    substitute = SUBSTITUTES.get(config.dataset.name)
    if substitute is None:
        return config, None
    with contextlib.suppress(DataError):
        build_datasets(config)
        return config, None
    data["dataset"] = {**substitute, "image_size": data["dataset"].get("image_size")}
    if config.train.batch_size > 256:
        data["train"]["batch_size"] = 256
    return load_config(data), str(substitute["name"])


def measure(
    config: Any, mode: str, steps: int | None, seconds: float, rehearsal: str
) -> dict[str, Any]:
    """Train a few steps in one mode and return its figures. `steps` None: find out how many the time allows."""
    import torch

    from mpt.boards.boards import Boards
    from mpt.boards.console import Console
    from mpt.config.load import change_precision
    from mpt.data.loading.loader import Loader
    from mpt.engine.building.build import build_datasets, build_run, parameter_count
    from mpt.engine.building.devices import choose_device
    from mpt.engine.loop.loop import fit
    from mpt.engine.loop.training import Training
    from mpt.errors import ConfigError
    from mpt.run.process.signals import StopRequest
    from mpt.run.records.layout import create_run
    from mpt.run.records.recorder import Recorder

    began = time.monotonic()
    device = choose_device(rehearsal or "cuda")
    config = change_precision(config, mode)
    train_data, test_data = build_datasets(config)
    loader = Loader(
        train_data, config.train.batch_size, config.seed, pin_memory=device.type == "cuda"
    )
    torch.backends.cudnn.benchmark = True

    def train(count: int, evaluates: bool) -> dict[str, Any]:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        own = config.train.model_copy(update={"steps": count, "log_every": max(1, count // 8)})
        built = build_run(type(config)(**{**vars(config), "train": own}), device, train_data.spec)
        if rehearsal and parameter_count(list(built.task.trainable.values())) > LARGE_PARAMETERS:
            raise ConfigError(TOO_LARGE)
        with tempfile.TemporaryDirectory() as folder, Console("quiet", count) as console:
            directory = create_run(Path(folder), "check")
            with Recorder(directory) as recorder:
                training = Training(
                    built,
                    directory,
                    recorder,
                    console,
                    loader,
                    test_data,
                    count,
                    Boards((), directory, {}),
                )
                training.save = lambda: None  # type: ignore[method-assign]
                if not evaluates:
                    training.evaluate = lambda: None  # type: ignore[method-assign]
                fit(training, StopRequest())
            rows = [
                json.loads(line) for line in directory.metrics_path.read_text("utf-8").splitlines()
            ]
            summary = json.loads(directory.summary_path.read_text("utf-8"))
        return {
            **summary,
            "windows": [row["step_seconds"] for row in rows if row["kind"] == "train"],
        }

    if steps is None:  # a short try gives the step time; its set-up counts against the time as well
        tried = train(WARM_UP_STEPS + 5, False)
        spent = time.monotonic() - began
        step_seconds = max(1e-4, statistics.median(tried["windows"][-4:]))
        steps = int(max(10, min(MOST_STEPS, (seconds - 2 * spent) / step_seconds)))
    summary = train(steps, True)
    step_seconds = statistics.median(summary["windows"][1:] or summary["windows"])
    memory = summary["peak_memory"]
    return {
        "steps": steps,
        "dtype": summary["precision"]["dtype"],
        "peak_bytes": memory.get("steps_peak_bytes") or memory.get("peak_bytes"),
        "reserved_bytes": memory.get("steps_reserved_bytes") or memory.get("reserved_bytes"),
        "outside_bytes": memory.get("outside_bytes"),
        "step_seconds": step_seconds,
        "samples_per_second": config.train.batch_size / step_seconds,
        "skipped": sum(summary["skipped"].values()),
        "metric": summary["metric"],
        "figure": summary["final"],
        "parameters": summary["parameters"],
        "reason": summary["precision"]["reason"],
    }


def precision_flags(torch: Any) -> tuple[bool, bool]:
    """Return what float32 products may use, as this process found it."""
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def set_flags(torch: Any, flags: tuple[bool, bool]) -> None:
    """Put back what fp32 and tf32 change, so that the next mode starts as a process of its own would.

    By the older switches, as `mpt.precision.fp32` does: a program that uses both kinds cannot read them any more.
    """
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags


def as_markdown(entry: dict[str, Any]) -> list[str]:
    """Return one configuration's table, ratios to the first mode that ran (fp32)."""
    lines = [f"## {entry['config']}", ""]
    wrong = entry.get("error") or entry.get("crash")
    if wrong:
        return [*lines, wrong, ""]
    measured = [row for row in entry["modes"] if "steps" in row]
    base = measured[0] if measured else {}
    text = f"{entry['model']}, batch {entry['batch_size']}, {base.get('steps', 0)} steps"
    if entry["substitute"]:
        text += f", with drawn data ({entry['substitute']}) in place of its own: the figure says nothing"
    metric = base.get("metric", "figure")
    lines += [f"{text}.", ""]
    lines += [
        f"| mode | dtype | peak | ratio | reserved | step | speed-up | samples/s | skipped | {metric} |"
    ]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for row in entry["modes"]:
        if "steps" not in row:
            lines.append(
                f"| {row['mode']} | {row.get('error') or row.get('crash')} | | | | | | | | |"
            )
            continue
        lines.append(f"| {' | '.join(cells(row, base))} |")
    return [*lines, ""]


def cells(row: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Return a table row's cells."""
    from mpt.report.units import show_bytes, show_figure, show_ratio, show_seconds

    peak, reserved = row["peak_bytes"] or math.nan, row["reserved_bytes"] or math.nan
    return [
        row["mode"],
        row["dtype"],
        show_bytes(peak),
        show_ratio(peak / (base["peak_bytes"] or math.nan)),
        show_bytes(reserved),
        show_seconds(row["step_seconds"]),
        show_ratio(base["step_seconds"] / row["step_seconds"]),
        show_figure(row["samples_per_second"]),
        str(row["skipped"]),
        show_figure(math.nan if row["figure"] is None else row["figure"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rehearsal", choices=("cpu", "cuda"), default="")
    options = parser.parse_args()

    def tell(entry: dict[str, Any]) -> None:
        print(json.dumps(entry), flush=True)

    tell(check_config(options.config, options.seconds, options.rehearsal, tell))


if __name__ == "__main__":
    main()
