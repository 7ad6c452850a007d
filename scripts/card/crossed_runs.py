"""Random pairs and triples of modes and memory tricks on a card: what changes no result must change no bit.

    python scripts/card/crossed_runs.py FOLDER --seconds 200 --workers 6 --seed 1

Each row is a shipped configuration, made small, in a random precision mode, trained a few steps as it is and once more
with random tricks that are exact; some of the second runs are killed (SIGKILL) within a step and resumed. The last
checkpoints are compared tensor by tensor, and the planned peak is held against the measured one. FOLDER gets
rows-N.jsonl of each worker; the summary is printed. Works on a CPU too (`--device cpu`), more slowly.

Kernels are chosen by how much of the card is free: leave it half empty, or equal runs may differ by rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

STEPS = 5
ROUNDING = 1e-5
"""Differences below are of kernels that were chosen for other addresses: weights that travel lie in one buffer."""
LONGEST = 120.0
"""Seconds that a training may take."""
FACES = ("dataset=null", "dataset={name: procedural_faces, count: 8, test_count: 4}")
CAMERAS = ("dataset=null", "dataset={name: rgb_ir_scenes, count: 8, test_count: 4}")
LAZY = ("task.r1_every=2", "task.path_every=2")
CONFIGS: dict[str, tuple[int, tuple[str, ...]]] = {
    **dict.fromkeys(("began", "dcgan_o1", "diffusion_digits", "lsgan", "vae", "wgan_gp"), (32, ())),
    **dict.fromkeys(("classify_digits", "dcgan_amp"), (64, ())),
    **dict.fromkeys(("dain_demo", "rife_demo"), (2, ("task.flow_steps=1",))),
    "saehd_demo": (4, ()),
    "yolofuse_demo": (4, ()),
    "stylegan2_16": (8, ("task.ada_target=0.6", *LAZY)),
    "stylegan2_256": (4, ("model.image_size=64", "dataset.root=pictures", *LAZY)),
    "resnet50_imagefolder": (
        8,
        ("model.image_size=128", "dataset.augment=[]", "dataset.root=pictures"),
    ),
    "yolofuse_mid": (2, ("model.image_size=128", *CAMERAS)),
    "saehd_512": (2, ("model.image_size=128", *FACES)),
}
"""Each shipped configuration with a batch, and what makes it small enough."""
DRAWN = (
    "began",
    "dcgan_amp",
    "dcgan_o1",
    "diffusion_digits",
    "lsgan",
    "stylegan2_16",
    "stylegan2_256",
    "vae",
    "wgan_gp",
)
"""Those whose evaluation draws samples: 64 of them."""
MODES = ("fp32", "tf32", "bf16", "bf16-pure", "bf16-sr", "bf16-kahan", "bf16-24bit", "fp16-24bit")
MODES += tuple(f"{{mode: {mode}, init_scale: 16}}" for mode in ("amp", "O1", "O2"))
MODES += ("{mode: O3, loss_scale: 16}", "fp16-pure")
EXACT = [
    ("empty_cache_every", "1"),
    ("expandable_segments", "true"),
    ("offload_activations", "0.0"),
    ("offload_activations", "0.1"),
    ("optimizer_in_backward", "true"),
    ("park_optimizer", "true"),
    *(("recompute", mode) for mode in ("sqrt", "all", "selective", "{budget: 0.5, per: tensor}")),
    ("release_grads_after", "true"),
    ("set_to_none", "false"),
    ("stream_weights", "{min_kibibytes: 0}"),
]
BOTH = [
    "",
    *(f"memory.{trick}" for trick in ("lora={rank: 2}", "prune=0.5", "micro_batch=1")),
    *(f"memory.low_bit_optimizer={{{how}}}" for how in ("bits: 8", "backend: own, bits: 4")),
    *("train.ema={decay: 0.9}", "train.freeze=['*.bias']", "optimizer.clip_grad_norm=1.0"),
    *(f"optimizer={{name: {name}}}" for name in ("muon", "adafactor", "lion", "adabelief")),
    *("optimizer={name: adamw, fused: true}", "optimizer={name: sgd, lr: 0.01, momentum: 0.9}"),
]
"""What both trainings have."""
FURTHER = ("train.asynchronous_save=true", "dataset.workers=2", "train.recent_states=1")


def begin(words: list[str]) -> int:
    """Run `mpt WORDS` in a fork of this process; return its number. What it says goes to `said-NUMBER`."""
    number = os.fork()
    if number:
        return number
    os.setpgid(0, 0)
    said = os.open(f"said-{os.getpid()}", os.O_CREAT | os.O_RDWR | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    code: Any = 0
    try:
        from mpt.cli import main

        main(words)
    except SystemExit as exit:
        code = exit.code
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code or 0))


def end_of(number: int, kill_at: int = 0, delay: float = 0.0) -> tuple[int | None, str]:
    """Return a command's exit code and words; None if it took too long or was killed after a line of its log."""
    until, log = time.monotonic() + LONGEST, Path("runs/crossed/metrics.jsonl")
    while time.monotonic() < until:
        ended, status = os.waitpid(number, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), words_of(number)
        if kill_at and log.exists() and log.read_text("utf-8").count("\n") >= kill_at:
            time.sleep(delay)
            break
        time.sleep(0.02)
    os.killpg(number, signal.SIGKILL)
    os.waitpid(number, 0)
    return None, words_of(number)


def words_of(number: int) -> str:
    """Return what a command has said, and forget it."""
    path = Path(f"said-{number}")
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    path.unlink(missing_ok=True)
    return text.strip()[-1500:]


def command(config: str, name: str, device: str, words: list[str]) -> list[str]:
    """Return the training of a configuration for a few steps, each of which is saved."""
    batch, small = CONFIGS[config]
    fixed = [
        f"train.{key}"
        for key in ("log_every=1", "checkpoint_every=1", "sample_every=0", "evaluate_every=0")
    ]
    fixed += [
        f"train.steps={STEPS}",
        "train.epochs=null",
        f"train.batch_size={batch}",
        f"name={name}",
    ]
    drawn = ["task.metric_samples=64"] if config in DRAWN else []
    options = ["--runs", "runs", "--quiet", "--no-report", "--device", device]
    return ["train", f"@{config}", *small, *drawn, *fixed, *options, *words]


def largest_difference(name: str, other: str) -> tuple[float, str]:
    """Return how far two runs' last tensors are apart, over their largest number, and which differs the most."""
    import torch
    from safetensors.torch import load_file

    def tensors_of(run: str) -> dict[str, Any]:
        files = sorted(Path("runs", run, "checkpoints", f"step-{STEPS:08d}").glob("*.safetensors"))
        return {key: value for file in files for key, value in load_file(file).items()}

    found, expected = tensors_of(name), tensors_of(other)
    if found.keys() != expected.keys():
        return float("inf"), f"only one has {sorted(found.keys() ^ expected.keys())[0]}"
    worst = 0.0, ""
    for key, value in found.items():
        if not torch.equal(value, expected[key]):
            one, two = value.double(), expected[key].double()
            apart = float((one - two).abs().max() / two.abs().max().clamp_min(1e-12))
            worst = max(worst, (apart, key))
    return worst


def cross(
    draws: random.Random, number: int, device: str, plain: dict[tuple[str, ...], str]
) -> dict[str, Any]:
    """Train a random crossing with and without its tricks; return the row."""
    config, mode, both = draws.choice(list(CONFIGS)), draws.choice(MODES), draws.choice(BOTH)
    tricks = dict(draws.sample(EXACT, draws.choice((1, 1, 2, 2, 3))))
    further = [word for word in FURTHER if draws.random() < 0.3]
    shared = [f"precision={mode}", *(["optimizer=null"] if both.startswith("optimizer={") else [])]
    shared += [both] if both and not both.startswith("memory.") else []
    memory = (
        [both.removeprefix("memory.").replace("=", ": ", 1)] if both.startswith("memory.") else []
    )
    is_killed = draws.random() < 0.4
    row: dict[str, Any] = {
        "config": config,
        "mode": mode,
        "both": both,
        "tricks": tricks,
        "further": further,
    }
    alone = (*shared, f"memory={{{', '.join(memory)}}}", "train.plan_memory=false")
    key = (config, *alone)
    if key not in plain:
        plain[key] = f"plain{number}"
        code, said = end_of(begin(command(config, plain[key], device, list(alone))))
        if code != 0:
            plain[key] = ""
            return {**row, "plain": code, "said": said}
    if not plain[key]:
        return {**row, "plain": "as before"}
    memory += [f"{name}: {value}" for name, value in tricks.items() if name not in both]
    changed = [
        *shared,
        f"memory={{{', '.join(memory)}}}",
        *further,
        f"train.plan_memory={str(not is_killed).lower()}",
    ]
    shutil.rmtree("runs/crossed", ignore_errors=True)
    process = begin(command(config, "crossed", device, changed))
    code, said = end_of(process, draws.choice((1, 2, 3)) if is_killed else 0, draws.random() * 0.3)
    if code is None and is_killed:
        row["killed"] = True
        code, said = end_of(begin(["train", "--resume", "runs/crossed", "--quiet", "--no-report"]))
    if code != 0:
        return {**row, "crossed": code, "said": said}
    row["apart"] = largest_difference("crossed", plain[key])
    measured = json.loads(Path("runs/crossed/summary.json").read_text("utf-8"))["peak_memory"]
    planned = Path("runs/crossed/plan.json")
    if planned.exists():
        plan = json.loads(planned.read_text("utf-8"))
        names = ("peak_bytes", "reserved_bytes")
        row["memory"] = {name: (plan.get(name), measured.get(f"steps_{name}")) for name in names}
    return row


def work(index: int, options: argparse.Namespace, until: float) -> None:
    """Cross until the time is over, in a folder of its own."""
    from tests.test_configs import folder_of_images

    here = options.folder.resolve() / f"worker-{index}"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    rows = options.folder.resolve() / f"rows-{index}.jsonl"
    os.chdir(here)
    folder_of_images(Path("pictures"))
    draws, plain, number = random.Random(options.seed * 1000 + index), {}, 0
    with rows.open("w", encoding="utf-8") as file:
        while time.monotonic() < until:
            number += 1
            row = cross(draws, number, options.device, plain)
            file.write(json.dumps(row) + "\n")
            file.flush()
    os._exit(0)


def summary(folder: Path) -> list[str]:
    """Return what is worth looking at: rows that failed, or differ; then how many were the same."""
    rows = [
        json.loads(line)
        for file in sorted(folder.glob("rows-*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    compared = [row for row in rows if "apart" in row]
    refused = [row for row in rows if row.get("plain", row.get("crossed")) in (2, 3, "as before")]
    failed = [row for row in rows if row not in compared and row not in refused]
    differ = [row for row in compared if row["apart"][0] > ROUNDING]
    rounded = [row for row in compared if 0 < row["apart"][0] <= ROUNDING]
    lines = [f"failed: {json.dumps(row)}" for row in failed] + [
        f"differs: {json.dumps(row)}" for row in differ
    ]
    killed = sum("killed" in row for row in compared)
    lines.append(
        f"{len(compared)} of {len(rows)} crossings compared, {killed} of them killed and resumed: {len(differ)} "
        f"differ, {len(rounded)} by rounding; {len(refused)} refused in a line, {len(failed)} failed"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where rows go")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.seconds
    import mpt.api
    import mpt.cli  # noqa: F401  imported once, for all forks

    for index in range(options.workers):
        if os.fork() == 0:
            work(index, options, until)
    for _ in range(options.workers):
        os.wait()
    print("\n".join(summary(options.folder)))


if __name__ == "__main__":
    main()
