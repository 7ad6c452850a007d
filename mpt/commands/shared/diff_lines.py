"""Output of `mpt diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpt.config.differences import Difference
from mpt.workflows.partings import not_finite_in
from mpt.workflows.sides import Side

if TYPE_CHECKING:
    from mpt.doctor.parting import Comparison
    from mpt.doctor.run_difference import RunDifference


def show(
    first: Side,
    second: Side,
    differences: list[Difference],
    files: RunDifference | None,
    replayed: Comparison | None,
) -> None:
    """Print the findings."""
    print(f"A: {first.label}\nB: {second.label}")
    print(f"settings that differ: {', '.join(map(str, differences)) or 'none that training sees'}")
    if files is not None:
        show_files(files)
    if replayed is None:
        if files is not None and not files.differs and not files.not_finite:
            print("the same to the bit, as far as the runs kept it")
        return
    print(f"trained side by side: {replayed.steps} step{'s' * (replayed.steps != 1)} from step {replayed.start}")
    for note in replayed.notes:
        print(f"note: {note}")
    if replayed.bits is None and not_finite_in(files, replayed):
        print("no difference was seen up to the first loss that is not finite")
    elif replayed.bits is None:
        print("the same to the bit")
        if files is not None and files.differs:
            where = "; ".join(files.environment) or "it is not recorded what"
            print(f"so what the runs differ in was not the configuration but what they ran on: {where}")
    else:
        print(f"first difference: {replayed.bits.describe()}")
    if replayed.beyond is not None:
        if replayed.beyond is not replayed.bits:
            print(f"beyond rounding: {replayed.beyond.describe()}")
        else:
            print("it is more than rounding")
    elif replayed.bits is not None:
        print("never more than rounding explains")
    show_rows(replayed.rows)


def show_files(files: RunDifference) -> None:
    """Print what two runs' files say."""
    for line in files.environment:
        print(f"made with {line}")
    for name, found in (("logged losses", files.logged), ("evaluations", files.evaluated)):
        if found:
            values = f"{found['first']} against {found['second']}"
            print(f"{name} differ first at step {found['step']}: {found['name']} {values}")
        else:
            print(f"{name}: the same wherever both have them")
    for row in files.checkpoints:
        said = (
            "the same to the bit" if not row["differing"] else f"{row['differing']} of {row['tensors']} tensors differ"
        )
        largest = row["largest"]
        if largest is not None:
            said += f", most {largest['name']} by {largest['apart']:.2%}"
        print(f"checkpoint {row['step']}: {said}")
    for note in files.notes:
        print(f"note: {note}")


def show_rows(rows: list[dict[str, Any]]) -> None:
    """Print a table of the steps."""
    if not rows:
        return
    names = list(rows[0]["losses"][0])
    width = max(24, *(len(name) + 2 for name in names))
    print(f"{'step':>6}  {'loss':<{width}}{'A':>14}{'B':>14}{'weights apart':>16}{'rounding':>12}")
    for row in rows:
        apart = f"{row['weights_apart']:.1e}"
        rounding = "-" if row["rounding"] is None else f"{row['rounding']:.1e}"
        for index, (name, value) in enumerate(row["losses"][0].items()):
            other = row["losses"][1].get(name)
            shown = "-" if other is None else f"{other:.6g}"
            more = f"{apart:>16}{rounding:>12}" if not index else ""
            print(f"{row['step'] if not index else '':>6}  {name:<{width}}{value:>14.6g}{shown:>14}{more}")
