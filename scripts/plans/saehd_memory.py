"""Where each GiB of SAEHD at 512 pixels goes, trick by trick: the table of docs/benchmarks/saehd.md.

    python scripts/plans/saehd_memory.py                 # predicted, for an RTX 2060
    python scripts/plans/saehd_memory.py --measure       # with what this machine's GPU takes, under a hard cap of 6 GiB

Predictions are `mpt plan`'s: the run's own build and step on fake tensors. Measurements are of the same build and step
on zeros, in a process each, capped by `torch.cuda.set_per_process_memory_fraction`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.facts.verdict import fits_surely

GIB = 2**30
CONFIG = "@saehd_512"
DENSE_IN_HALF = "precision.keep_fp32=[]"
FIXED_SEGMENTS = "memory.expandable_segments=false"
RECIPES: list[tuple[str, list[str]]] = [
    ("fp32", ["precision.mode=fp32", DENSE_IN_HALF, FIXED_SEGMENTS]),
    ("amp", [DENSE_IN_HALF, FIXED_SEGMENTS]),
    ("amp, dense layers in float32", [FIXED_SEGMENTS]),
    ("+ expandable segments (the configuration)", []),
    ("+ activations offloaded", ["memory.offload_activations=true"]),
    ("micro-batches of 4 instead", ["memory.micro_batch=4"]),
    ("micro-batches of 2", ["memory.micro_batch=2"]),
    ("micro-batches of 1 (**the plan**)", ["memory.micro_batch=1"]),
    (
        "micro-batches of 1, activations offloaded",
        ["memory.micro_batch=1", "memory.offload_activations=true"],
    ),
    ("micro-batches of 4, stages recomputed", ["memory.micro_batch=4", "memory.recompute=all"]),
    ("micro-batches of 4, dense layers in half", ["memory.micro_batch=4", DENSE_IN_HALF]),
    ("micro-batches of 4, fixed segments", ["memory.micro_batch=4", FIXED_SEGMENTS]),
    ("micro-batches of 4, fp32", ["precision.mode=fp32", DENSE_IN_HALF, "memory.micro_batch=4"]),
    (
        "stages recomputed, optimizer on the host",
        ["memory.recompute=all", "memory.cpu_optimizer=true"],
    ),
]
CLEAN_STEPS, MOST_STEPS = 3, 20
COLUMNS = ("parameters", "gradients", "optimizer state", "activations", "cast cache")


def main() -> None:
    """Print the table, or measure one recipe (for a process of this script's own)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="rtx2060")
    parser.add_argument("--cap", type=float, default=6.0, help="GiB")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(
            json.dumps(
                measure(load_config(CONFIG, RECIPES[arguments.one][1]), int(arguments.cap * GIB))
            )
        )
        return
    configs = [load_config(CONFIG, overrides) for _, overrides in RECIPES]
    gpu = find_gpu(arguments.gpu)
    with Session(gpu, Calibration()) as session:
        answers = session.plan(
            configs, budget_bytes=min(int(arguments.cap * GIB), gpu.usable_bytes)
        )
    further = ("measured peak", "measured reserved") if arguments.measure else ()
    print("\n".join(heading_of(arguments.cap, *further)))
    for index, ((name, _), answer) in enumerate(zip(RECIPES, answers, strict=True)):
        cells = [name, *cells_of(answer.get())]
        if arguments.measure:
            cells += measured_cells(index, arguments.cap)
        print("| " + " | ".join(cells) + " |", flush=True)


def heading_of(cap: float, *further: str) -> list[str]:
    """Return the first two lines of the table."""
    headings = [
        "recipe",
        *COLUMNS,
        "the rest",
        "peak",
        "on the card",
        f"fits {cap:g} GiB",
        "s/step",
        *further,
    ]
    return ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]


def cells_of(plan: Plan) -> list[str]:
    """Return one plan's figures; sizes in GiB."""
    parts = plan.by_category
    named = [parts.get(column, 0) for column in COLUMNS]
    sizes = [*named, plan.allocated - sum(named), plan.allocated, plan.total]
    fits = (
        "no"
        if not plan.fits
        else "barely"
        if plan.tight
        else "yes"
        if fits_surely(plan)
        else "closely"
    )
    return [f"{size / GIB:.2f}" for size in sizes] + [fits, f"{plan.step_seconds:.1f}"]


def measured_cells(index: int, cap: float) -> list[str]:
    """Measure one recipe in a process of its own."""
    command = [sys.executable, __file__, "--one", str(index), "--cap", str(cap)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        from mpt.engine.step.faults import REFUSALS

        return [
            "out of memory"
            if any(words in done.stderr for words in ("OutOfMemory", *REFUSALS))
            else "failed",
            "",
        ]
    found = json.loads(done.stdout.splitlines()[-1])
    return [f"{found['allocated'] / GIB:.2f}", f"{found['reserved'] / GIB:.2f}"]


def measure(config: Config, cap_bytes: int) -> dict[str, int]:
    """Run some steps on this machine's GPU under the cap and return the peaks."""
    from mpt.engine.building.torch_settings import prepare_torch

    prepare_torch(config)
    import torch

    from mpt.engine.building.build import build_run
    from mpt.engine.step.step import update
    from mpt.systems.deepfacelab.data.faces.face_pairs import describe_pairs

    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), device)
    data = describe_pairs(config.model.settings.image_size, 1000)
    run = build_run(config, device, data)
    clean = 0
    # where the loss scale is still too large, the optimizer has no state yet
    for _ in range(MOST_STEPS):
        torch.cuda.reset_peak_memory_stats(device)
        batch = data.zeros(config.train.batch_size, device)
        updates = [update(run, phase, batch) for phase in run.phases]
        clean += not any(done.stats.skipped for done in updates)
        if clean == CLEAN_STEPS:
            break
    else:
        raise RuntimeError(f"{clean} steps of {MOST_STEPS} were taken, the others skipped")
    torch.cuda.synchronize(device)
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }


if __name__ == "__main__":
    main()
