"""The report of a training that ran out of memory for good: who held it, how much there is, and changes that would fit.

The configuration as it stood, adaptations included, is planned by `mpt.planner` in processes of its own, under a time
limit; memory at the peak is counted there and not guessed here. On a GPU the planner also searches a recipe that fits
the memory that the process could have; elsewhere the next move of the ladder is proposed. The proposal is written into
the run's folder as a patch. Whatever fails on the way is one line of the report: the reason why training stopped is
never lost.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mpt import accelerator
from mpt.config.schema import Config
from mpt.config.sizes import describe_bytes
from mpt.config.text.yaml_text import read_file, write_text
from mpt.engine.loop.training import Training
from mpt.engine.recovery import ladder
from mpt.errors import ConfigError, MptError
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import load_calibration
from mpt.planner.facts.gpus import DEFAULT, Gpu, find_gpu, installed_gpu
from mpt.planner.recipes.patches import patched
from mpt.planner.recipes.recipe import Recipe, describe_cost, describe_patch
from mpt.planner.recipes.search import search
from mpt.run.process.files import write_atomically
from mpt.workflows.training.retry import Retry

SECONDS = 90.0
"""After so long the report is printed with the known facts by then."""
MODULES = 5
CATEGORIES = 5
REFUSED_SIZE = re.compile(r"ried to allocate ([0-9.]+ ?[KMGT]?i?B|[0-9]+ bytes)")


@dataclass(frozen=True)
class Budget:
    """The memory that the process could have. `limit_bytes` is known on a GPU only."""

    text: str
    gpu: Gpu
    limit_bytes: int | None = None


@dataclass
class Findings:
    """Results of planning: the plan as it stood, a recipe to continue with, and why there is none of either."""

    plan: Plan | None = None
    patch: dict[str, Any] = field(default_factory=dict)
    verdict: str = ""
    problem: str = ""


def add_report(message: str, training: Training, retry: Retry) -> str:
    """Return the message with the report below it, and write the patch that the report names."""
    config = ladder.adapted_config(training.run)
    try:
        budget = find_budget(training.run.device, message, training.peaks.allocated)
        training.journal.say(
            f"out of memory; planning what held it and what would fit, {SECONDS:.0f} s at most ..."
        )
        findings = plan(config, budget, training.run.device)
        lines = [*describe_budget(budget), *describe_plan(findings, budget)]
        if findings.patch:
            changes = training.run.adaptation.changes
            adapted = {"memory": dict(changes)} if changes else {}
            lines += propose(merge(adapted, findings.patch), findings.verdict, training, retry)
        lines += keep_snapshot(training)
    except (
        MptError,
        OSError,
    ) as error:  # the planner's reasons, or no memory or disk for it either
        lines = [f"what held the memory could not be planned: {error}"]
    return "\n".join([message, *(f"  {line}" for line in lines)])


def keep_snapshot(training: Training) -> list[str]:
    """Write torch's snapshot of the moment at which memory ran out, if there is one, and name it."""
    snapshot, path = training.ladder.snapshot, training.directory.snapshot_path
    if not snapshot:
        return []
    write_atomically(path, snapshot)
    return [
        f"torch's snapshot of it: {path}, for https://pytorch.org/memory_viz (mpt plan --snapshot has the plan's)"
    ]


def refused_size(text: str) -> str:
    """Return the size of a request as torch's message names it, large numbers of bytes in MiB."""
    amount = int(text.removesuffix(" bytes")) if text.endswith(" bytes") else 0
    return describe_bytes(amount) if amount >= 2**20 else text


def find_budget(device: torch.device, message: str, earlier_peak: int = 0) -> Budget:
    """Return a process's budget on a device: on a GPU all that others leave, elsewhere the refused size."""
    if device.type != "cuda":  # the planner's table has no other cards
        found = REFUSED_SIZE.search(message)
        return Budget(
            f"{refused_size(found[1])} were refused" if found else "unknown on this device",
            find_gpu(DEFAULT),
        )
    properties = torch.cuda.get_device_properties(device)
    gpu = installed_gpu(
        properties.name, properties.total_memory, (properties.major, properties.minor)
    )
    free, total = accelerator.free_and_total(device)
    context = load_calibration(gpu.name).context_bytes
    own = accelerator.reserved_bytes(device) + context
    limit = min(free + own, total, int(accelerator.share_limit(device) * total) + context)
    peak = describe_bytes(max(earlier_peak, accelerator.peaks(device)[0]))
    text = (
        f"{describe_bytes(limit)} for this process, of {describe_bytes(total)} on {properties.name}"
    )
    return Budget(f"{text}; measured peak {peak}", gpu, limit)


def plan(config: Config, budget: Budget, device: torch.device) -> Findings:
    """Plan a configuration that ran out of memory, and find one that would not."""
    findings = Findings()
    calibration = load_calibration(budget.gpu.name)
    workers = min(2, os.cpu_count() or 1) if budget.limit_bytes else 1
    with (
        Session(budget.gpu, calibration, config.granted, workers) as session,
        limited(session.kill, SECONDS) as out_of_time,
    ):
        answer = session.plan([config], budget_bytes=budget.limit_bytes)[0]
        findings.plan, findings.problem = answer.found, answer.error
        if findings.plan and budget.limit_bytes:
            found = search(session, config, budget.gpu, budget.limit_bytes)
            choose_recipe(findings, findings.plan, found.recipes, budget.limit_bytes)
        if not findings.patch and not (findings.plan and budget.limit_bytes):
            choose_next_move(findings, config, session, device)
        if out_of_time.is_set():
            findings.problem = findings.problem and f"not done within {SECONDS:.0f} s"
    return findings


@contextmanager
def limited(stop: Callable[[], None], seconds: float) -> Iterator[threading.Event]:
    """Call `stop` when the block takes longer, and set the event that is given."""
    late = threading.Event()

    def ring() -> None:
        late.set()
        stop()

    timer = threading.Timer(seconds, ring)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def choose_recipe(findings: Findings, plan: Plan, recipes: list[Recipe], limit_bytes: int) -> None:
    """Choose the smallest change that fits: precision last, exact tricks first, few before many, then the fastest."""
    # Less than the plan of the training that ran out, too: if that was planned to fit, the plan was too low.
    fitting = [
        one for one in recipes if one.fits and one.patch and one.plan.reserved < plan.reserved
    ]
    if fitting:

        def cost(one: Recipe) -> tuple[object, ...]:
            exact = describe_cost(one) == "exact"
            changes = len(one.patch.get("memory", {}))
            return (
                "precision" in one.patch,
                one.plan.tight,
                not exact,
                changes,
                one.plan.step_seconds,
            )

        best = min(fitting, key=cost)
        findings.patch = best.patch
        tight = ", only by emptying the cache within a step" if best.plan.tight else ""
        findings.verdict = (
            f"{describe_patch(best.patch)}: fits in {describe_bytes(limit_bytes)}{tight}, {describe_cost(best)}, "
            f"{describe_bytes(best.plan.allocated)} planned instead of {describe_bytes(plan.allocated)}"
        )
    elif recipes:
        smallest = min(recipes, key=lambda recipe: recipe.total)
        findings.verdict = (
            f"nothing fits: the smallest of {len(recipes)} recipes needs {describe_bytes(smallest.total)} "
            f"({describe_patch(smallest.patch)}); use a smaller train.batch_size, image or model"
        )


def choose_next_move(
    findings: Findings, config: Config, session: Session, device: torch.device
) -> None:
    """Propose the ladder's next move, if there is one that can be planned to hold less."""
    for name, value in ladder.next_moves(config, whole_ladder=True):
        patch = {"memory": {name: value}}
        if ladder.pointless(name, device):
            continue
        try:
            changed = patched(config, patch, session.allow)
        except ConfigError:
            continue
        words = describe_patch(patch)
        if findings.plan:
            found = session.plan([changed])[0].found
            if found is None or found.allocated >= findings.plan.allocated:
                continue
            before, after = (describe_bytes(one.allocated) for one in (findings.plan, found))
            words += f": {after} planned instead of {before}"
        findings.patch, findings.verdict = (
            patch,
            f"{words}; a first step, whether it suffices will be seen",
        )
        return


def describe_budget(budget: Budget) -> list[str]:
    """Return the line of the budget."""
    return [f"budget: {budget.text}"]


def describe_plan(findings: Findings, budget: Budget) -> list[str]:
    """Return the memory at the peak, by category and by module."""
    if findings.plan is None:
        return [f"what held the memory could not be planned: {findings.problem or 'no answer'}"]
    peak = findings.plan
    where = "" if budget.limit_bytes else f" on a GPU ({budget.gpu.name})"
    lines = [f"planned peak: {describe_bytes(peak.allocated)}{where}, {peak.moment}"]
    held = sorted(peak.by_category.items(), key=lambda item: -item[1])[:CATEGORIES]
    lines.append(
        "held by: " + ", ".join(f"{name} {describe_small(amount)}" for name, amount in held)
    )
    largest = peak.by_module[:MODULES]
    lines.append(
        "in modules: " + ", ".join(f"{name} {describe_small(amount)}" for name, amount in largest)
    )
    if not findings.patch and findings.verdict:
        lines.append(findings.verdict)
    return lines


def describe_small(amount: int) -> str:
    """Return bytes for people, also when there are few."""
    return describe_bytes(amount) if amount >= 10 * 2**20 else f"{amount / 2**20:.2f} MiB"


def propose(patch: dict[str, Any], verdict: str, training: Training, retry: Retry) -> list[str]:
    """Write the patch into the run's folder; return its effect and the command to continue with it."""
    path = Path(training.directory.path) / "plan.yaml"
    # an earlier proposal: the file keeps it
    if path.resolve() in [given.resolve() for given in retry.patches]:
        patch = merge(read_file(path)[0].plain(), patch)
    path.write_text(f"# {verdict}\n{write_text(patch)}", "utf-8")
    resumes = any(training.directory.checkpoints.glob("step-*"))
    return [f"try {verdict}", retry.write(path.parent, training.run.config, path, resumes)]


def merge(base: Any, over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay the sections of one patch over another's."""
    base = base if isinstance(base, dict) else {}
    return {**base, **{name: {**base.get(name, {}), **section} for name, section in over.items()}}
