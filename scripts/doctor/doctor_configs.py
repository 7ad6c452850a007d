"""The doctor on every shipped configuration: data and numerics, what it found, and what the examination costs.

    python scripts/doctor/doctor_configs.py            # all
    python scripts/doctor/doctor_configs.py NAME ...   # some of configs/

Prints a table in Markdown. Configurations of days are taken at the smaller size of `tests/test_configs.py`, and those
whose data are not shipped on stand-ins of the same layout; both are marked. The cost of the numerics is given in steps:
how many plain steps of the run's own mode would take as long, in processor time of one thread.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from mpt.config.load import load_config
from mpt.data.loading.loader import Loader
from mpt.doctor.data.data_checks import examine_data
from mpt.doctor.findings import Section
from mpt.doctor.numerics.numerics_section import describe_numerics
from mpt.doctor.numerics.subject import Subject, as_on_a_gpu
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.step.step import update

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.test_configs import RECIPES, SMALLER, data_for, head_command

BATCH, STEPS = 16, 3
SHIPPED = ("image_folder", "faceset", "detection_files", "frame_triplets")
"""Data sets of files, which are the user's."""


def first_of(section: Section) -> str:
    """Return the gravest findings of a section in a few words."""
    grave = [one for one in section.findings if one.level == section.worst and one.level != "ok"]
    if not grave:
        return "ok"
    more = f" (and {len(grave) - 1} more)" if len(grave) > 1 else ""
    return f"{section.worst}: {grave[0].about}: {grave[0].text}{more}"


def row_of(path: Path) -> str:
    """Examine one configuration and return its row."""
    words = [word for word in head_command(path)[3:] if "=" in word]
    config = load_config(path, [*words, *SMALLER.get(path.stem, [])])
    stands_in = config.dataset.name in SHIPPED
    with tempfile.TemporaryDirectory() as folder:
        train = data_for(config, Path(folder)) if stands_in else build_datasets(config)[0]
        size = min(config.train.batch_size, BATCH, len(train))
        said = "stand-in" if stands_in else first_of(examine_data(train, build_datasets(config)[1]))
        batch = next(iter(Loader(train, size, config.seed).batches(0)))
        subject = Subject(as_on_a_gpu(config), train.spec, batch, torch.device("cpu"))
        started = time.process_time()
        section = describe_numerics(subject)
        seconds = time.process_time() - started
        run = build_run(config, torch.device("cpu"), train.spec)
        floats = train.spec.as_floats(batch)
        for phase in run.phases:  # the first makes the optimizer's state
            update(run, phase, floats)
        started = time.process_time()
        for _ in range(STEPS):
            for phase in run.phases:
                update(run, phase, floats)
        step = (time.process_time() - started) / STEPS
    name = path.stem + (", smaller" if path.stem in SMALLER else "")
    modules = len({row["module"] for row in section.tables.get("ranges", ())})
    cells = (
        name,
        said,
        first_of(section),
        str(modules),
        f"{seconds:.1f}",
        f"{step:.2f}",
        f"{seconds / step:.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="of configs/, without .yaml; all by default")
    chosen = parser.parse_args().names
    torch.set_num_threads(1)
    # imports and first calls, not counted
    row_of(next(path for path in RECIPES if path.stem == "classify_digits"))
    print(
        "| configuration | data | numerics (float16 where it may choose) | modules | s | step, s | in steps |"
    )
    print("|---|---|---|---:|---:|---:|---:|")
    for path in RECIPES:
        if not chosen or path.stem in chosen:
            print(row_of(path), flush=True)


if __name__ == "__main__":
    main()
