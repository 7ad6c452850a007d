"""What `mpt doctor` finds: planted faults with their names and cures, and false alarms on healthy models.

    python scripts/doctor_table.py            # all: about a minute on one core
    python scripts/doctor_table.py NAME ...   # some of the planted networks

Prints a table in Markdown. A row counts as cured where the offered modules or stable forms were tried, are inside the
planted block, and leaving out any one of them was seen to fail. All runs are of one step with a random start, in
float16 as a GPU would compute it (`mpt.doctor.half_arithmetic`), with CUDA's lists for autocast.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.data.loading.loader import Loader
from mpt.doctor.cure import Cure, find_cure
from mpt.doctor.numerics import examine
from mpt.doctor.subject import Subject, as_on_a_gpu
from mpt.engine.building.build import build_datasets
from scripts.planted_faults import PLANTED, SOUND

ROOT = Path(__file__).resolve().parent.parent
DIGITS: Mapping[str, Any] = {"dataset": "digits", "precision": "amp", "train": {"steps": 1, "batch_size": 32}}
SHIPPED = ("classify_digits", "dcgan_amp", "lsgan", "wgan_gp", "vae", "began", "stylegan2_16")
GENERATIVE = ("vanilla_gan", "wgan", "cgan", "acgan", "infogan", "ebgan", "aae", "bigan", "cvae", "dvae")
VISION = ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5")


@dataclass(frozen=True)
class Row:
    """What the doctor said about one network."""

    name: str
    found: str
    place: str
    cure: str
    is_cured: bool
    seconds: float


def subject_of(config: Config) -> Subject:
    """Return a configuration with its first batch."""
    config = as_on_a_gpu(config)
    data, _ = build_datasets(config)
    batch = next(iter(Loader(data, min(32, config.train.batch_size), config.seed).batches(0)))
    return Subject(config, data.spec, batch, torch.device("cpu"))


def planted(name: str) -> Config:
    """Return the configuration of a network with a fault."""
    model = {"name": f"scripts.planted_faults:{name}", "image_size": 16, "channels": 1}
    return load_config({"model": model, **DIGITS}, allow=["scripts"])


def healthy() -> Iterator[tuple[str, Config]]:
    """Yield configurations in which nothing is wrong."""
    for name in SHIPPED:
        yield name, load_config(f"@{name}", ["precision=amp"])
    for name in GENERATIVE:
        yield name, load_config({"model": name, **DIGITS})
    for name in VISION:
        model = {"name": f"torchvision:{name}", "image_size": 32}
        data = {"name": "digits", "image_size": 32, "channels": 3}
        yield name, load_config({"model": model, **DIGITS, "dataset": data})
    for name in SOUND:
        yield name.removeprefix("plant_"), planted(name)
    for depth in (1, 12):
        model = {
            "name": "scripts.planted_faults:harmless",
            "image_size": 16,
            "channels": 1,
            "options": {"depth": depth},
        }
        yield f"harmless, depth {depth}", load_config({"model": model, **DIGITS}, allow=["scripts"])


def diagnose(name: str, config: Config) -> Row:
    """Examine one configuration and look for its cure."""
    started = time.perf_counter()
    subject = subject_of(config)
    faulty = [one for one in examine(subject) if not one.is_healthy]
    if not faulty:
        return Row(name, "", "", "", False, time.perf_counter() - started)
    cure = find_cure(subject, faulty)
    places = [culprit.describe() for culprit in faulty[0].culprits]
    places += [faulty[0].refusal.describe()] if faulty[0].refusal else []
    return Row(
        name,
        faulty[0].faults[0],
        "; ".join(places),
        describe(cure) if cure else "none found",
        cure is not None and is_smallest_inside(cure),
        time.perf_counter() - started,
    )


def describe(cure: Cure) -> str:
    """Return a cure for the table: what it keeps in float32, or which form it takes for which."""
    if not cure.forms:
        return cure.describe()
    said = "; ".join(f"`{place.instead}` for `{place.was}`" for place in cure.places)
    return f"{', '.join(cure.forms)}: {said}" + (" (or keep net.planted in float32)" if cure.instead else "")


def is_smallest_inside(cure: Cure) -> bool:
    """Return whether a cure changes the planted block alone, and no less would do."""
    if cure.kept is not None:
        return cure.kept.is_minimal and all(name.startswith("net.planted") for name in cure.kept.modules)
    return len(cure.forms) == 1 and all(place.module == "net.planted" for place in cure.places)


def main() -> None:
    """Print the table and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="planted networks; all of them and the healthy ones by default")
    chosen = parser.parse_args().names
    torch.set_num_threads(1)
    rows = [diagnose(name, planted(name)) for name in chosen or PLANTED]
    print("| planted | found | first wrong operator | cure | s |\n|---|---|---|---|---:|")
    for row in rows:
        cells = (row.name.removeprefix("plant_").replace("_", " "), row.found or "MISSED", row.place, row.cure)
        print("| " + " | ".join(cells) + f" | {row.seconds:.1f} |")
    found = sum(bool(row.found) for row in rows)
    named = sum("net.planted" in row.place for row in rows)
    print(f"\nfound {found} of {len(rows)}, named {named}, cured {sum(row.is_cured for row in rows)}")
    if not chosen:
        rows = [diagnose(name, config) for name, config in healthy()]
        alarms = [row for row in rows if row.found]
        print(f"healthy models: {len(rows)}, false alarms: {len(alarms)}")
        for row in alarms:
            print(f"- {row.name}: {row.found}; {row.place}; {row.cure}")


if __name__ == "__main__":
    main()
