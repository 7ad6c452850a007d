"""Check mpt on a CUDA machine and measure it there, what is worth most first; run it again and it goes on.

Usage: python scripts/gpu_check.py FOLDER [--minutes 8.5] [--only PART,...] [--config FILE ...] [--fresh] [--page]
       [--at-once 8] [--small | --cpu-rehearsal]

Parts, in their order; each runs in processes of its own, and none can take the time of those before it:

1. `card`: what is right or wrong, as `mpt doctor --only device` has it (`mpt.doctor.card`): versions, driver, memory
   and bus; losses as on the CPU in each mode; the same bits with streams and blocking launches; waits; a NaN gradient;
   data workers; memory and time as planned; 20 steps of offloading; resumes; NCCL with one rank;
2. `plan`: twenty workloads, of batches that the card's memory holds, planned without looking at the GPU and then
   trained a few steps, predicted and measured memory and time (`gpu_check_plan.py`, `gpu_check_memory.py`);
3. `tests`: the tests marked `gpu`;
4. `demo`: one whole demo, `configs/dcgan_amp.yaml` as it is shipped, and inference from it in half;
5. `modes`: for one config of each system a table of fp32, tf32, amp, bf16, O1 and O2: peak memory, seconds per step,
   samples per second, skipped steps, the evaluation figure (`gpu_check_modes.py`). All modes of a config take the same
   number of steps. Where a config's data is not there, drawn data of the same shape takes its place, which the table
   says: its memory and speed are right, its figure says nothing;
6. `peers`: the same training written by hand, by hand and compiled, in mpt, in Accelerate and in Lightning
   (`gpu_check_peers.py`);
7. `features`: saves beside the training, streamed weights, kernels as `mpt plan tune` chooses them, updates
   recorded as CUDA graphs, DAIN's Triton operators beside torch's, sharded checkpoints of two cards
   (`gpu_check_features.py`);
8. `rest`: the remaining workloads and budgets of `plan`, and the remaining configs of `modes`.

FOLDER gets gpu_check.md and gpu_check.json, rewritten after each step, so that an early end still leaves what was
measured; the first lines of gpu_check.md say what to mend first. A second run with the same FOLDER on the same card
goes on where the first stopped, also where that was killed; what failed once is tried once more, behind all that was
not reached, and what failed twice stays listed (`--fresh` begins anew). `--page` measures nothing and copies the
results to docs/benchmarks/gpu-NAME.md. `--small` takes a few steps of small networks: whether all parts run, and
nothing else; `--cpu-rehearsal` does so on a CPU. It needs what mpt needs; pytest is used where it is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that a checkout can be checked without being installed

from scripts.card.gpu_check_processes import refuse_without_packages, run  # noqa: E402

refuse_without_packages()  # before what needs them is imported

from mpt.config.finding.shipped import shipped_configs  # noqa: E402
from mpt.doctor.card import runner  # noqa: E402
from mpt.doctor.card.checks import check_names, commands_of  # noqa: E402
from scripts.card import gpu_check_features, gpu_check_modes, gpu_check_peers, gpu_check_plan  # noqa: E402
from scripts.card.gpu_check_modes import FIRST_CONFIGS, LARGE_CONFIGS, modes_of  # noqa: E402
from scripts.provenance import made  # noqa: E402

PARTS = ("card", "plan", "tests", "demo", "modes", "peers", "features", "rest")
SHARES = {"card": 0.5, "plan": 0.5, "tests": 0.3, "demo": 0.35}
SHARES |= {"modes": 0.6, "peers": 0.5, "features": 0.5, "rest": 1.0}
"""The most that a part takes of the time that is left; what it leaves is the next one's."""
CHECKED = ("card", "features")
"""Parts whose results are rows of checks."""
FIRST_WORKLOADS = 20
RESERVE_SECONDS = 15
REFERENCE = "reference.yaml"
"""Explains every setting, and trains what another configuration trains."""
SETTLED_STEPS = 20
"""After so many a loss scale has come down from where it began."""
NOT_REACHED = "not reached in time"
SAME_FOR_MANY = "test_float16_on_a_gpu_takes_twenty_finite_steps"
FOR_A_GPU_ALONE = (
    "test_a_gpu_that_is_too_small_for_the_batch",
    "test_prefetched_batches_are_not_overwritten",
)
"""Tests that a CPU would take minutes for: tests/cuda_rehearsal has a smaller one of the first, and a pretended card's
streams order nothing, so that the second would show nothing there."""
DEMO = ROOT / "configs" / "dcgan_amp.yaml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where gpu_check.md and gpu_check.json go")
    parser.add_argument("--minutes", type=float, default=8.5, help="stop within this time")
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"parts to run, of {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--config", type=Path, action="append", help="check this file; default: all in configs/"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="measure all anew, whatever FOLDER holds"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="checks of the card side by side; each takes a core and up to 2 GiB of the card, and times say less",
    )
    page_help = (
        "write FOLDER's results to docs/benchmarks/gpu-NAME.md, or to FILE, and measure nothing"
    )
    parser.add_argument(
        "--page", type=Path, nargs="?", const=Path(), metavar="FILE", help=page_help
    )
    small = parser.add_mutually_exclusive_group()
    small.add_argument("--small", dest="rehearsal", action="store_const", const="cuda", default="")
    small.add_argument("--cpu-rehearsal", dest="rehearsal", action="store_const", const="cpu")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(
            f"--only: there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}"
        )
    for path in options.config or ():
        if not path.is_file():
            parser.error(f"--config: there is no file {path}")
    if not options.minutes > 0.5:
        parser.error(
            f"--minutes: found {options.minutes:g}; a look at anything takes more than half a minute"
        )
    try:
        return (
            check_everything(options)
            if options.page is None
            else write_page(options.folder, options.page)
        )
    except OSError as error:  # a full disk, or a file where the folder should be
        print(
            f"error: {error}; what was measured before stays in {options.folder}", file=sys.stderr
        )
        return 5


def check_everything(options: argparse.Namespace) -> int:
    """Run the parts that are not done and write the results as they come. Return the exit code."""
    import torch

    started = time.monotonic()
    deadline = started + options.minutes * 60 - RESERVE_SECONDS
    if options.rehearsal != "cpu" and not torch.cuda.is_available():
        print(
            "torch sees no CUDA device (see mpt doctor); --cpu-rehearsal tries the script on a CPU",
            file=sys.stderr,
        )
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    from mpt.doctor.card.machine import describe_machine

    results = begin(
        options, describe_machine(torch.device("cpu" if options.rehearsal == "cpu" else "cuda"))
    )

    def save() -> None:
        write(options.folder, results, started)

    wanted = [part for part in PARTS if part in options.only.split(",")]
    try:
        for part in wanted:
            left = deadline - time.monotonic()
            if left > 5:
                run_part(part, options, results, share_of(part, wanted, results) * left, save)
            save()
    except KeyboardInterrupt:
        save()
        print(
            f"stopped; {options.folder} holds what was measured, and the same command goes on",
            file=sys.stderr,
        )
        return 130
    print((options.folder / "gpu_check.md").read_text("utf-8"))
    return 1 if is_broken(results) else 0


def share_of(part: str, wanted: list[str], results: dict[str, Any]) -> float:
    """Return the most that a part takes of the time that is left: the last all, one that had too little before more."""
    late = results.get(part, {}).get("late", 0)
    return 1.0 if part == wanted[-1] else min(0.9, SHARES[part] * 2**late)


def begin(options: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Return the results that a run before this one left of the same machine, or none."""
    kept = options.folder / "gpu_check.json"
    if kept.is_file() and not options.fresh:
        found = read_results(kept)
        if found.get("machine") == machine and found.get("rehearsal") == options.rehearsal:
            found["seconds_before"] = found.get("seconds", 0.0)
            return found
    gpu_check_plan.forget(options.folder)
    return {"machine": machine, "rehearsal": options.rehearsal, "configs": [], "made": made()}


def read_results(kept: Path) -> dict[str, Any]:
    """Return what a run wrote. Ends with exit code 2 and one line where that is no JSON."""
    try:
        found: dict[str, Any] = json.loads(kept.read_text("utf-8"))
    except ValueError as error:
        print(f"error: {kept} cannot be read ({error}); --fresh begins anew", file=sys.stderr)
        sys.exit(2)
    return found


def run_part(
    part: str,
    options: argparse.Namespace,
    results: dict[str, Any],
    seconds: float,
    save: Callable[[], None],
) -> None:
    """Run what is not done yet of one part within some seconds."""
    rehearsal = options.rehearsal
    before = results.get(part, {})
    if part == "card":

        def keep(rows: list[dict[str, Any]]) -> None:
            results["card"] = {"rows": rows}
            save()

        commands = commands_of(check_names(bool(rehearsal)), rehearsal or "cuda", bool(rehearsal))
        rows = before.get("rows", ())
        results["card"] = {
            "rows": runner.run_checks(commands, seconds, rows, keep, options.at_once),
            "at_once": max(options.at_once, before.get("at_once", 1)),
        }
    elif part == "tests":
        if not is_settled(before):
            results["tests"] = count_failures(before, run_tests(seconds, rehearsal))
    elif part == "demo":
        if not is_settled(before):
            results["demo"] = count_failures(before, run_demo(options.folder, seconds, rehearsal))
    elif part == "plan":
        results["plan"] = gpu_check_plan.check_planner(
            options.folder, seconds, rehearsal, FIRST_WORKLOADS
        )
    elif part == "peers":
        results["peers"] = gpu_check_peers.measure_all(seconds, rehearsal, before)
    elif part == "features":
        results["features"] = gpu_check_features.try_all(seconds, rehearsal, before)
    elif part == "modes":
        check_configs(
            [p for p in chosen_configs(options) if p.name in FIRST_CONFIGS],
            results,
            seconds,
            rehearsal,
            save,
        )
    elif part == "rest":
        started = time.monotonic()
        if "plan" in options.only.split(","):
            results["plan"] = gpu_check_plan.check_planner(options.folder, seconds / 2, rehearsal)
        save()
        left = seconds - (time.monotonic() - started)
        first = FIRST_CONFIGS if "modes" in options.only.split(",") else ()
        others = [path for path in chosen_configs(options) if path.name not in first]
        check_configs(others, results, left, rehearsal, save)


def chosen_configs(options: argparse.Namespace) -> list[Path]:
    """Return the configs that are asked for, or those that are shipped."""
    return options.config or all_configs()


def is_settled(part: dict[str, Any]) -> bool:
    """Is a part done (exit code 5: there were no tests), or has it failed twice? Else it has another turn."""
    return part.get("exit_code") in (0, 5) or part.get("failures", 0) > 1


def count_failures(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return a part's results with how often it failed, and how often it found too little time, which is no failure."""
    failed, late = now["exit_code"] not in (0, 5, None), now["exit_code"] is None
    return {
        **now,
        "failures": before.get("failures", 0) + failed,
        "late": before.get("late", 0) + late,
    }


def check_configs(
    paths: list[Path],
    results: dict[str, Any],
    seconds: float,
    rehearsal: str,
    save: Callable[[], None],
) -> None:
    """Measure the configs that have no whole entry yet, each with its share of the time; behind them what crashed."""
    deadline = time.monotonic() + seconds
    known = {entry["config"]: entry for entry in results["configs"]}
    waiting = [path for path in paths if path.name not in known or not is_whole(known[path.name])]
    crashed = [path for path in paths if is_crashed_once(known.get(path.name, {}))]
    waiting += [path for path in crashed if path not in waiting]
    for number, path in enumerate(waiting):
        left = deadline - time.monotonic()
        share = left / (len(waiting) - number)
        if share < 5 and path.name in known:
            continue  # what there is says more
        entry = (
            run_worker(path, share, left, rehearsal)
            if share >= 5
            else {"config": path.name, "error": NOT_REACHED}
        )
        entry["failures"] = known.get(path.name, {}).get("failures", 0) + is_broken_config(entry)
        results["configs"] = [e for e in results["configs"] if e["config"] != path.name] + [entry]
        save()


def is_crashed_once(entry: dict[str, Any]) -> bool:
    """Did a config crash in one run alone?"""
    return is_broken_config(entry) and entry.get("failures", 1) < 2


def is_whole(entry: dict[str, Any]) -> bool:
    """Was a config measured in every mode, as far as time goes?"""
    late = (NOT_REACHED, "did not end in its time")
    return entry.get("error") not in late and all(
        row.get("error") not in late for row in entry.get("modes", [])
    )


def all_configs() -> list[Path]:
    """Return the shipped configurations, the large ones last."""
    found = [path for path in shipped_configs().values() if path.name != REFERENCE]
    return sorted(found, key=lambda path: (path.name in LARGE_CONFIGS, path.name))


def is_broken(results: dict[str, Any]) -> bool:
    """Did a test fail, or anything else for another reason than memory, data or time?"""
    tests_failed = results.get("tests", {}).get("exit_code") not in (0, 5, None)
    plan_failed = "plan" in results and gpu_check_plan.is_broken(results["plan"])
    demo_failed = results.get("demo", {}).get("exit_code") not in (0, None)
    feature_failed = any(runner.faults(results.get(part, {}).get("rows", ())) for part in CHECKED)
    config_failed = any(is_broken_config(entry) for entry in results["configs"])
    return tests_failed or demo_failed or plan_failed or feature_failed or config_failed


def is_broken_config(entry: dict[str, Any]) -> bool:
    """Did a config fail for another reason than memory, data or time?"""
    return "crash" in entry or any("crash" in row for row in entry.get("modes", []))


def run_tests(seconds: float, rehearsal: str) -> dict[str, Any]:
    """Run the tests that need a GPU; exit code 5 means that there were none, None that they did not end in time.

    A rehearsal leaves out what takes a CPU too long, and takes one of those that are the same for many objectives.
    """
    # Only the files that have some: importing all the others would take a good part of the time.
    files = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text("utf-8")
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
    ]
    command += ["-o", "filterwarnings=default", "--import-mode=importlib", *files]
    left_out = " or ".join(FOR_A_GPU_ALONE)
    quick = f"not ({left_out}) and (not {SAME_FOR_MANY} or {SAME_FOR_MANY}[amp-wgan])"
    command += ["-k", quick] if rehearsal else []
    try:
        done = run(command, seconds, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"exit_code": None, "said": f"the tests did not end within {seconds:.0f} s"}
    if "No module named pytest" in done.stderr:
        return {"exit_code": None, "said": "pytest is not installed, so no tests were run"}
    lines = (done.stdout or done.stderr).strip().splitlines()
    notable = [line for line in lines if line.startswith(("FAILED", "ERROR"))][:20]
    return {"exit_code": done.returncode, "said": "\n".join([*notable, lines[-1] if lines else ""])}


def run_demo(folder: Path, seconds: float, rehearsal: str) -> dict[str, Any]:
    """Train the demo as it is shipped and infer from it in half precision; return what was said last."""
    folder = folder.absolute()  # the commands run in the checkout
    runs = folder / "runs"
    train = [
        sys.executable,
        "-m",
        "mpt",
        "train",
        str(DEMO),
        "--runs",
        str(runs),
        "--name",
        "demo",
        "--resume",
        "auto",
    ]
    train += [
        "--device",
        rehearsal or "cuda",
        *(["train.steps=3", "train.batch_size=4"] if rehearsal else []),
    ]
    infer = [
        sys.executable,
        "-m",
        "mpt",
        "infer",
        str(runs / "demo"),
        "--half",
        "--output",
        str(folder / "demo"),
    ]
    deadline, said = time.monotonic() + seconds, ""
    for command in (train, infer):
        try:
            left = max(5.0, deadline - time.monotonic())
            done = run(command, left, cwd=ROOT)
        except subprocess.TimeoutExpired:
            return {"exit_code": None, "said": f"{command[3]} did not end within {left:.0f} s"}
        lines = (done.stdout + done.stderr).strip().splitlines()
        said += "\n".join(line for line in lines[-12:]) + "\n"
        if done.returncode:
            return {"exit_code": done.returncode, "said": said}
    return {"exit_code": 0, "said": said}


def run_worker(path: Path, share: float, left: float, rehearsal: str) -> dict[str, Any]:
    """Measure one config in a process of its own, so that a crash there costs one mode alone."""
    command = [
        sys.executable,
        str(Path(gpu_check_modes.__file__).resolve()),
        str(path),
        "--seconds",
        str(share),
    ]
    command += [f"--rehearsal={rehearsal}"] if rehearsal else []
    print(f"{path.name}: {share:.0f} s", file=sys.stderr, flush=True)
    wrong: dict[str, str] = {}
    try:
        done = run(command, max(5.0, min(2 * share, left)))
        said = done.stdout
        if done.returncode:
            wrong["crash"] = (
                f"exit {done.returncode}: {' | '.join(done.stderr.strip().splitlines()[-3:])}"
            )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or ""  # bytes, whatever was asked for
        said = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
        wrong["error"] = "did not end in its time"
    try:
        # the last whole line
        entry: dict[str, Any] = json.loads(said[: said.rindex("\n")].splitlines()[-1])
    except (ValueError, IndexError):
        return {"config": path.name, **(wrong or {"crash": "it said nothing"})}
    under_way = modes_of(path, rehearsal)[len(entry["modes"]) :][:1]
    entry["modes"] += [{"mode": mode, **wrong} for mode in under_way if wrong]
    return entry


def write(folder: Path, results: dict[str, Any], started: float) -> None:
    """Write both files."""
    results["seconds"] = round(results.get("seconds_before", 0.0) + time.monotonic() - started, 1)
    texts = {"gpu_check.json": json.dumps(tidy(results), indent=1, allow_nan=False)}
    texts["gpu_check.md"] = "\n".join(as_markdown(results))
    # replaced in one: a check that is killed here leaves the one before
    for name, text in texts.items():
        unfinished = folder / f"{name}.unfinished"
        unfinished.write_text(text + "\n", "utf-8")
        unfinished.replace(folder / name)


def tidy(value: Any) -> Any:
    """Return data that strict JSON holds."""
    if isinstance(value, dict):
        return {key: tidy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [tidy(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary(results: dict[str, Any]) -> list[str]:
    """Return what to mend first: what failed, in the order of the parts, then what was not reached."""
    found = []
    tests, demo = results.get("tests", {}), results.get("demo", {})
    if tests.get("exit_code") not in (0, 5, None):
        found.append(f"tests marked gpu fail: {tests['said'].splitlines()[0]}")
    if demo.get("exit_code") not in (0, None):
        found.append(
            f"the demo ends with {demo['exit_code']}: {demo['said'].strip().splitlines()[-1]}"
        )
    found += runner.faults(results.get("card", {}).get("rows", ()))
    found += gpu_check_plan.faults(results["plan"]) if "plan" in results else []
    found += gpu_check_peers.faults(results["peers"]) if "peers" in results else []
    found += runner.faults(results.get("features", {}).get("rows", ()))
    for entry in results["configs"]:
        rows = [{"mode": "", **entry}, *entry.get("modes", [])]
        found += [
            f"{entry['config']} {row['mode']}: {row['crash']}" for row in rows if "crash" in row
        ]
        overflowed = [
            row
            for row in rows
            if row.get("steps", 0) >= SETTLED_STEPS and row.get("skipped") == row["steps"]
        ]
        found += [
            f"{entry['config']} {row['mode']}: all {row['steps']} steps overflowed"
            for row in overflowed
        ]
        late = not is_whole(entry)
        found += (
            [f"{entry['config']}: not measured in full; run this again to go on"] if late else []
        )
    for name, part in (("tests", tests), ("demo", demo)):
        if part and part["exit_code"] is None:
            found.append(
                f"{name}: {part['said'].strip().splitlines()[-1]}; run this again to go on"
            )
    for part in CHECKED:
        left = runner.left_over(results.get(part, {}).get("rows", ()))
        found += [f"{part}: left for the next run: {', '.join(left)}"] if left else []
    missing = [
        part
        for part in ("card", "plan", "tests", "demo", "peers", "features")
        if part not in results
    ]
    found += [f"{part}: not done yet" for part in missing]
    return [
        "## What to mend first",
        "",
        *([f"1. {line}" for line in found] or ["Nothing failed."]),
        "",
    ]


def write_page(folder: Path, page: Path) -> int:
    """Write the results to a page, by default among the documents under the card's name. Return the exit code."""
    kept = folder / "gpu_check.json"
    if not kept.is_file():
        print(f"{kept} is not there: measure first", file=sys.stderr)
        return 2
    results = read_results(kept)
    gpu = results["machine"].get("gpu", "cpu-rehearsal")
    name = re.sub(
        r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "").replace("geforce", "")
    ).strip("-")
    page = page if page.name else ROOT / "docs" / "benchmarks" / f"gpu-{name}.md"
    lines = as_markdown(results)
    told = f"Written by `python scripts/gpu_check.py FOLDER`, {results.get('made') or made()}."
    page.write_text("\n".join([lines[0], "", told, *lines[1:], ""]), "utf-8")
    print(f"wrote {page}")
    return 0


def as_markdown(results: dict[str, Any]) -> list[str]:
    """Return the results as Markdown."""
    machine = results["machine"]
    where = machine.get("gpu", "a CPU")
    where += (
        " (rehearsal: these figures say that the script runs, nothing else)"
        if results.get("rehearsal")
        else ""
    )
    lines = [f"# gpu_check: {where}", ""]
    lines += [", ".join(f"{key} {value}" for key, value in machine.items() if key != "gpu"), ""]
    lines += summary(results)
    if "card" in results:
        at_once = results["card"].get("at_once", 1)
        beside = "" if at_once == 1 else f" ({at_once} checks at once: times are of a shared card)"
        title = f"What is right and wrong on this card{beside}"
        lines += runner.as_markdown(title, results["card"]["rows"])
    if "tests" in results:
        lines += [
            f"Tests marked gpu: exit {results['tests']['exit_code']}: {results['tests']['said']}",
            "",
        ]
    if "demo" in results:
        demo = results["demo"]
        lines += [f"## Demo: exit {demo['exit_code']}", "", "```", demo["said"].strip(), "```", ""]
    if "plan" in results:
        lines += gpu_check_plan.as_markdown(results["plan"])
    if "peers" in results:
        lines += gpu_check_peers.as_markdown(results["peers"])
    if "features" in results:
        lines += runner.as_markdown("Single features", results["features"]["rows"])
    for entry in results["configs"]:
        lines += gpu_check_modes.as_markdown(entry)
    lines.append(f"{results['seconds']:.0f} s in total.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
