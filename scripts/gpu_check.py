"""Check mpt on a CUDA machine and measure it there, with one command in under nine minutes.

Usage: python scripts/gpu_check.py FOLDER [--minutes 8.5] [--only PART,...] [--config FILE ...] [--cpu-rehearsal]

Three parts, none of which can take the others' time:

- the tests marked `gpu`;
- the planner: some fifty workloads planned without looking at the GPU and then trained a few steps, predicted beside
  measured memory, and recipes that must fit the budgets they were chosen for (`gpu_check_plan.py` and
  `gpu_check_memory.py`);
- for each file in configs/ a table of fp32, tf32, amp, bf16, O1 and O2: peak memory, seconds per step, samples per
  second, skipped steps, the evaluation figure (`gpu_check_modes.py`). All modes of a config take the same number of
  steps, as many as the time allows. Where a config's data is not there, drawn data of the same shape takes its
  place, which the table says: its memory and speed are right, its figure says nothing.

FOLDER gets gpu_check.md and gpu_check.json, rewritten after each part and config, so that an early end still leaves
what was measured. `--cpu-rehearsal` goes the same way on a CPU with a few steps of small batches, to know beforehand
that the scripts run. It needs what mpt needs; pytest is used where it is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that a checkout can be checked without being installed

from scripts import gpu_check_modes, gpu_check_plan  # noqa: E402

PARTS = ("tests", "plan", "modes")
TESTS_PART, PLAN_PART = 0.22, 0.42
"""The most that a part takes of the whole time; what it leaves is the next one's."""
RESERVE_SECONDS = 15
LARGE_CONFIGS = ("saehd_512.yaml", "stylegan2_256.yaml", "resnet50_imagefolder.yaml")
"""Measured last: they take longest."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where gpu_check.md and gpu_check.json go")
    parser.add_argument("--minutes", type=float, default=8.5, help="stop within this time")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, of tests, plan, modes")
    parser.add_argument("--config", type=Path, action="append", help="check this file; default: all in configs/")
    parser.add_argument("--cpu-rehearsal", action="store_true")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--only: there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return check_everything(options)


def check_everything(options: argparse.Namespace) -> int:
    """Run the parts and write the results as they come. Return the exit code."""
    import torch

    started = time.monotonic()
    whole = options.minutes * 60 - RESERVE_SECONDS
    deadline = started + whole
    if not options.cpu_rehearsal and not torch.cuda.is_available():
        print("torch sees no CUDA device here; use --cpu-rehearsal to try the script without one", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": describe_machine(torch), "rehearsal": options.cpu_rehearsal, "configs": []}
    parts = options.only.split(",")
    if "tests" in parts:
        results["tests"] = run_tests(TESTS_PART * whole)
        write(options.folder, results, started)
    if "plan" in parts:
        seconds = PLAN_PART * whole if "modes" in parts else deadline - time.monotonic()
        results["plan"] = gpu_check_plan.check_planner(options.folder, seconds, options.cpu_rehearsal)
        write(options.folder, results, started)
    configs = options.config or shipped_configs()
    for number, path in enumerate(configs if "modes" in parts else ()):
        left = deadline - time.monotonic()
        share = left / (len(configs) - number)
        if share < 5:
            results["configs"].append({"config": path.name, "error": "not reached in time"})
            continue
        results["configs"].append(run_worker(path, share, left, options.cpu_rehearsal))
        write(options.folder, results, started)
    write(options.folder, results, started)
    print((options.folder / "gpu_check.md").read_text("utf-8"))
    return 1 if is_broken(results) else 0


def shipped_configs() -> list[Path]:
    """Return the shipped configurations, the large ones last."""
    found = [path for path in (ROOT / "configs").glob("*.yaml") if not path.name.endswith(".plan.yaml")]
    return sorted(found, key=lambda path: (path.name in LARGE_CONFIGS, path.name))


def is_broken(results: dict[str, Any]) -> bool:
    """Did a test fail, or anything else for another reason than memory, data or time?"""
    tests_failed = results.get("tests", {}).get("exit_code") not in (0, 5, None)
    plan_failed = "plan" in results and gpu_check_plan.is_broken(results["plan"])
    return tests_failed or plan_failed or any(is_broken_config(entry) for entry in results["configs"])


def is_broken_config(entry: dict[str, Any]) -> bool:
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
    # Only the files that have some: importing all the others would take a good part of the time.
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["-o", "filterwarnings=default", "--import-mode=importlib", *files]
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
    """Measure one config in a process of its own, so that a crash there costs one mode alone."""
    command = [sys.executable, str(Path(gpu_check_modes.__file__).resolve()), str(path), "--seconds", str(share)]
    command += ["--cpu-rehearsal"] if rehearsal else []
    print(f"{path.name}: {share:.0f} s", file=sys.stderr, flush=True)
    wrong: dict[str, str] = {}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(5.0, min(2 * share, left)), check=False
        )
        said = done.stdout
        if done.returncode:
            wrong["crash"] = f"exit {done.returncode}: {' | '.join(done.stderr.strip().splitlines()[-3:])}"
    except subprocess.TimeoutExpired as error:
        said = error.stdout or ""  # bytes, whatever was asked for
        said = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
        wrong["error"] = "did not end in its time"
    try:
        entry: dict[str, Any] = json.loads(said[: said.rindex("\n")].splitlines()[-1])  # the last whole line
    except (ValueError, IndexError):
        return {"config": path.name, **(wrong or {"crash": "it said nothing"})}
    under_way = gpu_check_modes.MODES[len(entry["modes"]) :][:1]
    entry["modes"] += [{"mode": mode, **wrong} for mode in under_way if wrong]
    return entry


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
    """Return the results as Markdown."""
    machine = results["machine"]
    where = machine.get("gpu", "a CPU (rehearsal: these figures say that the script runs, nothing else)")
    lines = [f"# gpu_check: {where}", ""]
    lines += [", ".join(f"{key} {value}" for key, value in machine.items() if key != "gpu"), ""]
    if "tests" in results:
        lines += [f"Tests marked gpu: exit {results['tests']['exit_code']}: {results['tests']['said']}", ""]
    if "plan" in results:
        lines += gpu_check_plan.as_markdown(results["plan"])
    for entry in results["configs"]:
        lines += gpu_check_modes.as_markdown(entry)
    lines.append(f"{results['seconds']:.0f} s in all.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
