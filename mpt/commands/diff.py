"""`mpt diff A B`: the first step and the first operator or parameter at which two trainings part, and why.

Two runs are compared by their files first. Then both configurations are trained for some steps side by side: from the
newest checkpoint that the runs have in common to the bit, else from the beginning.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Allow, Device, Json, Runs
from mpt.commands.cli.completion import complete_run
from mpt.config.checking.layers import write_overrides
from mpt.config.schema import Config
from mpt.errors import ConfigError, GateError, NonFiniteError
from mpt.workflows.comparing.sides import Side, read_side, resolve_mode, vary
from mpt.workflows.examining.partings import compare_sides, not_finite_in, read_with_own_parts


@dataclass(frozen=True)
class Command:
    """Find the first difference of two configurations or runs.

    Both are trained for a few steps side by side, from the same seed or from the newest checkpoint that two runs have
    in common to the bit. Exit code 0 if they are the same or differ by rounding, 8 if they part by more.

    Examples:
      mpt diff mine.yaml bf16
      mpt diff mine.yaml --variant "memory.recompute=all"
      mpt diff RUN RUN
    """

    what: Annotated[
        tuple[str, ...], typer.Argument(metavar="A B [KEY=VALUE]", autocompletion=complete_run)
    ]
    """Two of: a YAML file, a run, a checkpoint, a precision mode (then B is A in that mode)."""
    variant: Annotated[str | None, typer.Option(metavar="KEY=VALUE")] = None
    """In place of B: changes of A, several settings in quotes."""
    steps: Annotated[int, typer.Option(min=1)] = 10
    """Steps to take at most."""
    seed: int | None = None
    """The seed of both, if theirs should not count."""
    dtype: str | None = None
    """float16 or bfloat16: the dtype of a mode that may choose; float16 on a CPU is computed as on a GPU."""
    only_files: bool = False
    """Compare the files of two runs, and train nothing."""
    nproc: Annotated[int | None, typer.Option(min=2)] = None
    """In place of B: A on that many processes of this machine, each step from the same state."""
    device: Device = None
    json: Json = False
    allow: Allow = ()
    runs: Runs = "runs"


def run(arguments: Command) -> None:
    """Find the point at which two trainings part.

    Raises GateError (exit 8) if they part by more than rounding, NonFiniteError (exit 6) if neither is finite, so
    that nothing can be said.
    """
    if arguments.nproc is not None:
        compare_processes(arguments, arguments.nproc)
        return
    first, second = read_sides(arguments)
    parted = compare_sides(
        first, second, steps=arguments.steps, dtype=arguments.dtype, only_files=arguments.only_files
    )
    if arguments.json:
        print(json.dumps(parted.to_record(), default=str))
    else:
        print("\n".join(parted.lines()))
    if parted.verdict == "apart":
        beyond = parted.replayed.beyond if parted.replayed is not None else None
        where = f" at step {beyond.step}" if beyond is not None else ""
        raise GateError(f"diff: {first.label} and {second.label} part{where} by more than rounding")
    if parted.verdict == "not finite":
        found = not_finite_in(parted.files, parted.replayed)
        raise NonFiniteError(
            f"diff: {found['name']} of both {first.label} and {second.label} is not finite at step {found['step']}, so "
            "whether they are the same cannot be said; `mpt doctor` finds the operator"
        )


def compare_processes(arguments: Command, nproc: int) -> None:
    """Compare one process with several. Raises GateError if they part by more than the order of sums."""
    from mpt.workflows.examining.rank_comparison import compare_with_ranks

    overrides, words = split_words(arguments)
    if len(words) != 1 or arguments.variant is not None:
        raise ConfigError(
            "mpt diff --nproc: name one configuration, which is compared with itself on N processes"
        )
    side = read_with_own_parts(words[0], overrides, Path(arguments.runs), arguments.allow)
    found = compare_with_ranks(side.config, nproc, arguments.steps, arguments.allow)
    if arguments.json:
        print(json.dumps({"first": side.label, **dataclasses.asdict(found)}))
    else:
        print(
            f"A: {side.label} in one process\nB: the same in {nproc} processes ({side.config.parallel.strategy})"
        )
        for note in found.notes:
            print(f"note: {note}")
        print(f"{found.steps} steps, each from one state")
        print(
            f"differs: {found.beyond.describe()}"
            if found.beyond
            else "never more than the order of sums explains"
        )
    if found.beyond is not None:
        raise GateError(f"diff: {nproc} processes do not train what one does: {found.beyond.where}")


def read_sides(arguments: Command) -> tuple[Side, Side]:
    """Return the two that are compared. Raises ConfigError unless they are two."""
    overrides, words = split_words(arguments)
    wanted = 1 if arguments.variant is not None else 2
    if len(words) != wanted:
        raise ConfigError(
            f"mpt diff: found {len(words)} of {wanted} to compare ({', '.join(words) or 'none'}); name two "
            "configurations or runs, or one and --variant KEY=VALUE"
        )
    runs = Path(arguments.runs)
    first = read_with_own_parts(words[0], overrides, runs, arguments.allow)

    def again(more: Sequence[str]) -> Config:
        return read_side(words[0], [*overrides, *more], runs, arguments.allow).config

    if arguments.variant is not None:
        varied = vary(first.config, arguments.variant, arguments.allow, again)
        return first, Side(f"{words[0]} with {arguments.variant}", varied)
    if resolve_mode(words[1]) is not None and not Path(words[1]).exists():
        return first, Side(
            words[1], vary(first.config, f"precision={words[1]}", arguments.allow, again)
        )
    second = read_with_own_parts(words[1], overrides, runs, arguments.allow)
    return first, second


def split_words(arguments: Command) -> tuple[list[str], list[str]]:
    """Return the settings that are changed, and the names of both sides."""
    overrides = [word for word in arguments.what if "=" in word]
    overrides += write_overrides({"train.device": arguments.device, "seed": arguments.seed})
    return overrides, [word for word in arguments.what if "=" not in word]
