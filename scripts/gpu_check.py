"""Check mpt on a CUDA machine and measure every precision mode there, with one command in under nine minutes.

Usage: python scripts/gpu_check.py FOLDER [--minutes 8.5] [--config FILE ...] [--cpu-rehearsal]

First the tests marked `gpu`, then for each file in configs/ a table of fp32, tf32, amp, bf16, O1 and O2: peak memory,
seconds per step, samples per second, skipped steps, the evaluation figure. All modes of a config take the same number
of steps, as many as the time allows. FOLDER gets gpu_check.md and gpu_check.json, rewritten after each config, so
that an early end still leaves what was measured. Where a config's data is not there, drawn data of the same shape
takes its place, which the table says: its memory and speed are right, its figure says nothing.

`--cpu-rehearsal` goes the same way on a CPU with a few steps of small batches, to know beforehand that the script
runs. It needs what mpt needs; pytest is used where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that a checkout can be checked without being installed

MODES = ("fp32", "tf32", "amp", "bf16", "O1", "O2")
TEST_SECONDS = 120
RESERVE_SECONDS = 15
MOST_STEPS, REHEARSAL_STEPS, REHEARSAL_BATCH = 300, 3, 4
WARM_UP_STEPS = 3
SUBSTITUTES: dict[str, dict[str, Any]] = {
    "image_folder": {"name": "shapes", "size": 512},
    "faceset": {"name": "procedural_faces", "count": 24, "test_count": 8},
}
LARGE_PARAMETERS = 30_000_000
"""A rehearsal leaves out what a CPU would take minutes for."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where gpu_check.md and gpu_check.json go")
    parser.add_argument("--minutes", type=float, default=8.5, help="stop within this time")
    parser.add_argument("--config", type=Path, action="append", help="check this file; default: all in configs/")
    parser.add_argument("--cpu-rehearsal", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(check_config(options.config[0], options.seconds, options.cpu_rehearsal)))
        return 0
    return check_everything(options)


def check_everything(options: argparse.Namespace) -> int:
    """Run the tests, then a worker per config; write the results as they come. Return the exit code."""
    import torch

    started = time.monotonic()
    deadline = started + options.minutes * 60 - RESERVE_SECONDS
    if not options.cpu_rehearsal and not torch.cuda.is_available():
        print("torch sees no CUDA device here; use --cpu-rehearsal to try the script without one", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": describe_machine(torch), "rehearsal": options.cpu_rehearsal, "configs": []}
    results["tests"] = run_tests(min(TEST_SECONDS, (deadline - started) / 3))
    write(options.folder, results, started)
    shipped = (path for path in (ROOT / "configs").glob("*.yaml") if not path.name.endswith(".plan.yaml"))
    configs = options.config or sorted(shipped)
    for number, path in enumerate(configs):
        left = deadline - time.monotonic()
        share = left / (len(configs) - number)
        if share < 5:
            results["configs"].append({"config": path.name, "error": "not reached in time"})
            continue
        results["configs"].append(run_worker(path, share, left, options.cpu_rehearsal))
        write(options.folder, results, started)
    write(options.folder, results, started)
    print((options.folder / "gpu_check.md").read_text("utf-8"))
    failed = results["tests"]["exit_code"] not in (0, 5, None)
    return 1 if failed or any(is_broken(entry) for entry in results["configs"]) else 0


def is_broken(entry: dict[str, Any]) -> bool:
    """Did a config fail for another reason than memory, data or time?"""
    return "crash" in entry or any("crash" in row for row in entry.get("modes", []))


def describe_machine(torch: Any) -> dict[str, Any]:
    """Return what the figures were measured on."""
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        machine |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "gpu_memory_bytes": properties.total_memory,
            "cudnn": torch.backends.cudnn.version(),
        }
    return machine


def run_tests(seconds: float) -> dict[str, Any]:
    """Run the tests that need a GPU; exit code 5 means that there were none, None that they did not end in time."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["-o", "filterwarnings=default", "--import-mode=importlib", str(ROOT / "tests")]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"exit_code": None, "said": f"the tests did not end within {seconds:.0f} s"}
    if "No module named pytest" in done.stderr:
        return {"exit_code": None, "said": "pytest is not installed, so no tests were run"}
    lines = (done.stdout or done.stderr).strip().splitlines()
    notable = [line for line in lines if line.startswith(("FAILED", "ERROR"))][:20]
    return {"exit_code": done.returncode, "said": "\n".join([*notable, lines[-1] if lines else ""])}


def run_worker(path: Path, share: float, left: float, rehearsal: bool) -> dict[str, Any]:
    """Measure one config in a process of its own, so that a crash there costs that config alone."""
    command = [sys.executable, str(Path(__file__).resolve()), str(path.parent), "--worker", "--config", str(path)]
    command += ["--seconds", str(share), *(["--cpu-rehearsal"] if rehearsal else [])]
    print(f"{path.name}: {share:.0f} s", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(5.0, min(2 * share, left)), check=False
        )
    except subprocess.TimeoutExpired:
        return {"config": path.name, "error": "did not end in its time"}
    try:
        entry: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return entry
    except (ValueError, IndexError):
        said = " | ".join(done.stderr.strip().splitlines()[-3:])
        return {"config": path.name, "crash": f"exit {done.returncode}: {said}"}


def check_config(path: Path, seconds: float, rehearsal: bool) -> dict[str, Any]:
    """Measure every mode of a config within about `seconds`."""
    started = time.monotonic()
    import torch

    from mpt.errors import MptError

    flags = precision_flags(torch)
    entry: dict[str, Any] = {"config": path.name, "modes": [], "substitute": None}
    try:
        config, entry["substitute"] = read_config(path, rehearsal)
    except MptError as error:
        return {**entry, "error": str(error).splitlines()[0]}
    entry |= {"model": config.model.name, "batch_size": config.train.batch_size}
    steps = REHEARSAL_STEPS if rehearsal else None
    for index, mode in enumerate(MODES):
        left = seconds - (time.monotonic() - started)
        if index and left < 2:
            entry["modes"].append({"mode": mode, "error": "not reached in time"})
            continue
        set_flags(torch, flags)
        row: dict[str, Any] = {"mode": mode}
        try:
            row |= measure(config, mode, steps, left / (len(MODES) - index), rehearsal)
            steps = row["steps"]
        except MptError as error:
            row["error"] = str(error).splitlines()[0]
        except Exception as error:
            row["crash"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            traceback.print_exc()
        entry["modes"].append(row)
        if row.get("error") == "too large for a rehearsal":
            break
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return entry


def read_config(path: Path, rehearsal: bool) -> tuple[Any, str | None]:
    """Return the config, its data replaced by drawn data where it is missing, and the name of the substitute."""
    from mpt.config.load import load_config
    from mpt.engine.build import build_datasets
    from mpt.errors import DataError

    overrides = ["train.epochs=null", f"train.steps={MOST_STEPS}", "train.evaluate_every=0", "train.sample_every=0"]
    overrides += ["train.checkpoint_every=0", "train.on_non_finite=stop", "dataset.workers=0"]
    if rehearsal:
        overrides += [f"train.batch_size={REHEARSAL_BATCH}", "train.device=cpu"]
    config = load_config(path, overrides)
    substitute = SUBSTITUTES.get(config.dataset.name)
    if substitute is None:
        return config, None
    with contextlib.suppress(DataError):
        build_datasets(config)
        return config, None
    data = config.to_data()
    data["dataset"] = {**substitute, "image_size": data["dataset"].get("image_size")}
    if config.train.batch_size > 256:
        data["train"]["batch_size"] = 256
    return load_config(data), str(substitute["name"])


def measure(config: Any, mode: str, steps: int | None, seconds: float, rehearsal: bool) -> dict[str, Any]:
    """Train a few steps in one mode and return its figures. `steps` None: find out how many the time allows."""
    import torch

    from mpt.config.load import change_precision
    from mpt.data.loader import Loader
    from mpt.engine.build import build_datasets, build_run, choose_device, parameter_count
    from mpt.engine.loop import Training
    from mpt.run.console import Console
    from mpt.run.layout import create_run
    from mpt.run.recorder import Recorder
    from mpt.run.signals import StopRequest

    began = time.monotonic()
    device = choose_device("cpu" if rehearsal else "cuda")
    config = change_precision(config, mode)
    train_data, test_data = build_datasets(config)
    loader = Loader(train_data, config.train.batch_size, config.seed, pin_memory=device.type == "cuda")
    torch.backends.cudnn.benchmark = True

    def train(count: int) -> tuple[dict[str, Any], Any]:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        own = config.train.model_copy(update={"steps": count, "log_every": max(1, count // 8)})
        built = build_run(type(config)(**{**vars(config), "train": own}), device, train_data.spec)
        if rehearsal and parameter_count(list(built.task.trainable.values())) > LARGE_PARAMETERS:
            return {}, None
        with tempfile.TemporaryDirectory() as folder, Console("quiet", count) as console:
            directory = create_run(Path(folder), "check")
            with Recorder(directory) as recorder:
                training = Training(built, directory, recorder, console, loader, test_data, count)
                training.save = lambda: True  # type: ignore[method-assign]
                training.go(StopRequest())
            rows = [json.loads(line) for line in directory.metrics_path.read_text("utf-8").splitlines()]
            summary = json.loads(directory.summary_path.read_text("utf-8"))
        windows = [row["step_seconds"] for row in rows if row["kind"] == "train"]
        return {**summary, "windows": windows}, training

    if steps is None:  # a short try gives the step time; its set-up and evaluation count against the time as well
        tried, _ = train(WARM_UP_STEPS + 5)
        spent = time.monotonic() - began
        step_seconds = max(1e-4, statistics.median(tried["windows"][-4:]))
        steps = int(max(10, min(MOST_STEPS, (seconds - 2 * spent) / step_seconds)))
    summary, training = train(steps)
    if training is None:
        from mpt.errors import ConfigError

        raise ConfigError("too large for a rehearsal")
    windows = summary["windows"][1:] or summary["windows"]
    step_seconds = statistics.median(windows)
    return {
        "steps": steps,
        "dtype": summary["precision"]["dtype"],
        "peak_bytes": summary["peak_memory"].get("peak_bytes"),
        "reserved_bytes": summary["peak_memory"].get("reserved_bytes"),
        "step_seconds": step_seconds,
        "samples_per_second": config.train.batch_size / step_seconds,
        "skipped": sum(summary["skipped"].values()),
        "metric": summary["metric"],
        "figure": summary["final"],
        "parameters": summary["parameters"],
        "reason": summary["precision"]["reason"],
    }


def precision_flags(torch: Any) -> tuple[Any, Any, Any]:
    """Return what float32 products may use, as this process found it."""
    backends = torch.backends
    return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision


def set_flags(torch: Any, flags: tuple[Any, Any, Any]) -> None:
    """Put back what fp32 and tf32 change, so that the next mode starts as a process of its own would."""
    backends = torch.backends
    backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision, backends.cudnn.rnn.fp32_precision = flags


def write(folder: Path, results: dict[str, Any], started: float) -> None:
    """Write both files."""
    results["seconds"] = round(time.monotonic() - started, 1)
    (folder / "gpu_check.json").write_text(json.dumps(tidy(results), indent=1, allow_nan=False) + "\n", "utf-8")
    (folder / "gpu_check.md").write_text("\n".join(as_markdown(results)) + "\n", "utf-8")


def tidy(value: Any) -> Any:
    """Return data that strict JSON holds."""
    if isinstance(value, dict):
        return {key: tidy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [tidy(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_markdown(results: dict[str, Any]) -> list[str]:
    """Return the results as Markdown, ratios to the first mode that ran (fp32)."""
    machine = results["machine"]
    where = machine.get("gpu", "a CPU (rehearsal: these figures say that the script runs, nothing else)")
    lines = [f"# gpu_check: {where}", ""]
    lines += [", ".join(f"{key} {value}" for key, value in machine.items() if key != "gpu"), ""]
    lines += [f"Tests marked gpu: exit {results['tests']['exit_code']}: {results['tests']['said']}", ""]
    for entry in results["configs"]:
        lines += [f"## {entry['config']}", ""]
        wrong = entry.get("error") or entry.get("crash")
        if wrong:
            lines += [wrong, ""]
            continue
        steps = next((row["steps"] for row in entry["modes"] if "steps" in row), 0)
        text = f"{entry['model']}, batch {entry['batch_size']}, {steps} steps"
        if entry["substitute"]:
            text += f", with drawn data ({entry['substitute']}) in place of its own: the figure says nothing"
        metric = next((row["metric"] for row in entry["modes"] if "metric" in row), "figure")
        lines += [
            text + ".",
            "",
            f"| mode | dtype | peak | ratio | reserved | step | speed-up | samples/s | skipped | {metric} |",
        ]
        lines += ["|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
        base = next((row for row in entry["modes"] if "steps" in row), {})
        for row in entry["modes"]:
            if "steps" not in row:
                lines.append(f"| {row['mode']} | {row.get('error') or row.get('crash')} | | | | | | | | |")
                continue
            lines.append(f"| {' | '.join(cells(row, base))} |")
        lines.append("")
    lines.append(f"{results['seconds']:.0f} s in all.")
    return lines


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


if __name__ == "__main__":
    sys.exit(main())
