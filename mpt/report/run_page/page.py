"""A run as three files: `report.md` to paste, `report.json` to compute with, `report.html` to show.

The page is one file that asks the network for nothing: styles inline, plots as SVG, images as data, and a content
policy that forbids the rest. One script of ours enlarges pictures and sorts tables; the policy names its hash, so that
no other runs, and without it the page says the same. Everything that came from a user or a run passes through the
template's escaping; the plots are the one exception, and their words were escaped when they were drawn.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mpt.config.differences import find_differences, flatten
from mpt.report.reading.log_values import curves, number, section
from mpt.report.reading.read_run import read_run
from mpt.report.reading.run_record import RunRecord
from mpt.report.run_page.classification import read_classification
from mpt.report.run_page.evaluation_section import read_section, show_section
from mpt.report.run_page.numerics_map import read_numerics
from mpt.report.run_page.pictures import embed_samples
from mpt.report.run_page.plots import constant_rates, draw_run, memory_parts, skipped_steps
from mpt.report.units import (
    show_bytes,
    show_count,
    show_figure,
    show_ratio,
    show_seconds,
    show_spread,
)
from mpt.run.process.files import write_atomically
from mpt.run.records.layout import RunDirectory
from mpt.run.records.used_parts import read_used_parts

MOST_RANKS = 8
MOST_EVENTS = 200

HASH_DIGITS = 16
"""Of a part's SHA-256 that are shown."""


def memory_kind(record: RunRecord) -> str:
    """Return how a run's memory was measured; "" if it was not."""
    if not record.memory.get("kind"):
        return ""
    return (
        "the allocator's peak on the GPU"
        if record.is_on_gpu
        else "the peak of live tensor bytes over a tracked step"
    )


def write_report(run_path: Path) -> None:
    """Write `report.md`, `report.json` and `report.html` into a run directory.

    Raises DataError if `run_path` is no run, InputOutputError if it cannot be written.
    """
    record = read_run(run_path)
    template = environment()
    content = describe_run(record)
    write_atomically(run_path / "report.md", template.get_template("run.md.j2").render(**content))
    pictures = {name: Markup(svg) for name, svg in draw_run(record).items()}
    page = template.get_template("run.html.j2").render(
        **content,
        plots=pictures,
        samples=embed_samples(record),
        numerics=read_numerics(run_path),
        classification=read_classification(run_path),
        evaluation=read_section(run_path),
    )
    write_atomically(run_path / "report.html", page)
    # Last: it says that the other two are there (see `mpt.run.records.ending`).
    write_atomically(
        run_path / "report.json",
        json.dumps(plain(as_json(record)), indent=1, allow_nan=False) + "\n",
    )


def write_evaluation(path: Path, name: str, section: Mapping[str, Any], step: int) -> None:
    """Write one evaluation as a page of its own. Raises InputOutputError if it cannot be written."""
    template = environment().get_template("evaluation_page.html.j2")
    write_atomically(path, template.render(name=name, evaluation=show_section(section, step)))


@cache
def environment() -> Environment:
    """Return the templates, compiled once in a process: HTML escapes everything, a missing name is an error."""
    made = Environment(
        loader=PackageLoader("mpt.report"),
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    assert made.loader is not None
    script = made.loader.get_source(made, "page.js.j2")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    made.globals.update(script=Markup(script), script_hash=f"sha256-{digest}")
    made.filters.update(
        bytes=show_bytes,
        seconds=show_seconds,
        count=show_count,
        figure=show_figure,
        ratio=show_ratio,
        spread=show_spread,
        cell=escape_cell,
        cell_of=show_cell,
    )
    return made


def show_cell(value: Any) -> str:
    """Write a value of a table as a person would: 0.02, 3.28e+38; nothing for None."""
    if value is None:
        return ""
    return show_figure(value) if isinstance(value, float) else str(value)


def escape_cell(value: Any) -> str:
    """Make text safe inside a cell of a Markdown table."""
    text = " ".join(str(value).split())
    for mark in "\\`*_<>[]|":
        text = text.replace(mark, f"\\{mark}")
    return text


def describe_run(record: RunRecord) -> dict[str, Any]:
    """Return everything that both templates say about a run."""
    skipped = record.skipped
    peak = record.peak_bytes
    figures = [
        (f"{record.metric or 'metric'}, final", show_figure(record.final)),
        (f"{record.metric or 'metric'}, best", show_figure(record.best)),
        *((("stopped early", str(why)),) if (why := record.summary.get("stopped_early")) else ()),
        ("median step", show_seconds(record.step_seconds)),
        *(
            (f"learning rate, {name}", show_figure(rate))
            for name, rate in constant_rates(record).items()
        ),
        ("samples per second", show_figure(record.samples_per_second)),
        ("device utilisation", show_device_use(record)),
        ("peak memory", show_bytes(peak)),
        *(
            (f"planned, {row.name}", f"{show_bytes(row.planned)} ({row.error:+.1%})")
            for row in record.planned
        ),
        ("steps skipped", show_count(sum(skipped.values())) if skipped or record.train else "–"),
        *(
            (("files skipped", f"{bad:.0f} (skipped_files.csv)"),)
            if (bad := skipped_files(record))
            else ()
        ),
        ("parameters", show_count(number(record.summary.get("parameters")))),
        ("wall clock", show_seconds(wall_seconds(record))),
        *(
            [("raised to float32 in recovery", ", ".join(record.raised_to_float32))]
            if record.raised_to_float32
            else []
        ),
        *rank_figures(section(record.summary, "ranks")),
    ]
    return {
        "record": record,
        "figures": figures,
        "evaluations": evaluation_rows(record),
        "test_samples": number(record.summary.get("test_samples")),
        "memory": memory_parts(record.memory),
        "peak_bytes": peak,
        "memory_kind": memory_kind(record),
        "reserved_bytes": number(record.memory.get("reserved_bytes")),
        "planned": record.planned,
        "planned_parts": {
            name: number(size) for name, size in section(record.plan, "by_category").items()
        },
        "plan_problem": plan_problem(record),
        "skipped": skipped,
        "skipped_steps": skipped_steps(record),
        "events": [event_row(event) for event in record.events[-MOST_EVENTS:]],
        "event_kinds": Counter(
            str(event.get("kind", "other")) for event in record.events
        ).most_common(),
        "environment": [*environment_rows(record.environment), *part_rows(record)],
    }


def show_device_use(record: RunRecord) -> str:
    """Write how busy the device was, or that nobody measured it, and why if it might have been."""
    share, reason = record.device_use
    if math.isfinite(share):
        return f"{100 * share:.0f} %"
    return f"not measured: {reason}" if reason and record.is_on_gpu else "not measured"


def skipped_files(record: RunRecord) -> float:
    """Return how many bad files of the data set the run has skipped."""
    return number(record.summary.get("skipped_files"), 0.0)


def rank_figures(ranks: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the memory and time of each process over the last logged steps; of many, the least and the most."""
    if not ranks:
        return []
    figures = [("processes", show_count(number(ranks.get("count"))))]
    for name, title, show in (
        ("step_seconds", "step of each process, without waiting", show_seconds),
        ("peak_bytes", "peak memory of each process", show_bytes),
    ):
        values = [number(one) for one in ranks.get(name, [])]
        if any(value > 0 for value in values):
            shown = [show(value) for value in values]
            few = len(values) <= MOST_RANKS
            figures.append(
                (title, ", ".join(shown) if few else f"{show(min(values))} to {show(max(values))}")
            )
    return figures


def wall_seconds(record: RunRecord) -> float:
    """Return the seconds the run took, resumes together."""
    if "wall_seconds" in record.summary:
        return number(record.summary["wall_seconds"])
    return max((number(line.get("seconds"), 0.0) for line in record.train), default=math.nan)


def evaluation_rows(record: RunRecord) -> list[tuple[str, float, float, float, float]]:
    """Return name, first, lowest, highest and last value of every evaluation figure, the deciding one first."""
    rows = []
    for name, (_, values) in curves(record.evaluations, "metrics").items():
        finite = [value for value in values if math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (math.nan, math.nan)
        rows.append((name, values[0], low, high, values[-1]))
    return sorted(rows, key=lambda row: row[0] != record.metric)


def event_row(event: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return step, kind, phase and message of an event; facts without a column go into the message."""
    kind, message = str(event.get("kind", "")), str(event.get("message", ""))
    known = {"step", "kind", "phase", "message", "time"}
    if kind == "scale" and message:
        known.add("scale")  # the message has both values
    facts = (
        (key, value)
        for key, value in event.items()
        if key not in known and value not in ([], {}, None, "")
    )
    rest = ", ".join(f"{key} {show_fact(value)}" for key, value in facts)
    message = "; ".join(part for part in (message, rest) if part)
    return str(event.get("step", "")), kind, str(event.get("phase", "")), message


def show_fact(value: Any) -> str:
    """Write a value without the point of a whole number."""
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def environment_rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a run's environment as rows: of a resume only its command and the changes."""
    first = {key: value for key, value in environment.items() if key != "resumes"}
    rows = as_rows(first)
    resumes = environment.get("resumes")
    for index, resume in enumerate(resumes if isinstance(resumes, list) else [], 1):
        if not isinstance(resume, Mapping):
            continue
        changes = find_differences(
            {key: value for key, value in first.items() if key != "command"},
            {key: value for key, value in resume.items() if key != "command"},
        )
        rows += [(f"resume {index}, command", show_command(resume.get("command")))]
        rows += [(f"resume {index}, changed", ", ".join(map(str, changes)))]
    return [(name, value) for name, value in rows if value not in ("", "None")]


def part_rows(record: RunRecord) -> list[tuple[str, str]]:
    """Return the files of parts from outside that the run used, each with the beginning of its SHA-256."""
    used = read_used_parts(RunDirectory(record.path).parts_path)
    return [
        (f"part {package['name']}/{file}", str(digest or "unreadable")[:HASH_DIGITS])
        for package in used
        for file, digest in package["files"].items()
    ]


def show_command(command: Any) -> str:
    """Write a command line as a shell takes it."""
    return shlex.join(map(str, command)) if isinstance(command, list) else str(command or "")


def as_rows(mapping: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a nested mapping as rows of dotted names."""

    def show(name: str, value: Any) -> str:
        if name == "command":
            return show_command(value)
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    return [(name, show(name, value)) for name, value in flatten(mapping).items()]


def as_json(record: RunRecord) -> dict[str, Any]:
    """Return a run as plain data, gaps filled as far as possible."""
    return {
        "name": record.name,
        "finished": record.is_finished,
        "model": record.model,
        "dataset": record.dataset,
        "seed": record.seed,
        "precision": {
            "mode": record.mode,
            "dtype": record.dtype,
            "reason": record.reason,
            "raised_to_float32": record.raised_to_float32,
        },
        "metric": record.metric,
        "higher_is_better": record.higher_is_better,
        "final": record.final,
        "best": record.best,
        "steps": record.steps,
        "stopped_early": record.summary.get("stopped_early"),
        "median_step_seconds": record.step_seconds,
        "samples_per_second": record.samples_per_second,
        "wall_seconds": wall_seconds(record),
        "device_utilization": record.device_use[0],
        "peak_bytes": record.peak_bytes,
        "memory": dict(record.memory),
        "plan": {
            **record.plan,
            "compared": [{**vars(row), "error": row.error} for row in record.planned],
        },
        "skipped": record.skipped,
        "skipped_steps": skipped_steps(record),
        "skipped_files": skipped_files(record),
        "test_samples": record.summary.get("test_samples"),
        "curves": {
            key: {
                name: {"step": steps, "value": values}
                for name, (steps, values) in curves(lines, key).items()
            }
            for key, lines in (
                ("metrics", record.evaluations),
                ("losses", record.train),
                ("logged", record.train),
                ("lr", record.train),
                ("scale", record.train),
            )
        },
        "events": list(record.events),
        "environment": dict(record.environment),
        "config": record.config,
        "problems": list(record.problems),
    }


def plain(value: Any) -> Any:
    """Make data that JSON can hold: numbers that are not finite become null, unknown kinds become text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def plan_problem(record: RunRecord) -> str:
    """Return the sentence that says why no plan is held against what was measured; empty if there is none to say."""
    if error := str(record.plan.get("error", "")):
        return f"There is no plan: {error}"
    return (
        f"The plan is not compared: {record.not_planned}"
        if record.plan and record.not_planned
        else ""
    )
