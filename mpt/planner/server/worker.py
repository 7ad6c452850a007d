"""The process in which plans are made: one request per line on standard input, one answer per line on standard output.

A process of its own, because the fake device is registered for good and because real GPUs must be
hidden. Models may print: their output goes to standard error. Asked to, it forks: the fork answers requests of its own
(`mpt.planner.server.twins`).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import IO, Any

from mpt.planner.facts.kept_apart import own_folders

COLLECTED = 8
"""Plans after which garbage is looked for: one leaves some 10 MiB, and a search takes a tenth of a second for it."""


def main() -> None:
    """Answer requests until the input ends."""
    own_folders()
    answers: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    gc.disable()
    preload()
    gc.freeze()
    from mpt.planner.server import twins

    specs: dict[str, Any] = {}
    requests: IO[str] = os.fdopen(os.dup(0), encoding="utf-8")
    close_input()
    planned = 0
    while line := requests.readline():
        request = json.loads(line)
        if request == {"fork": True}:
            pid, streams = twins.fork(int(sys.argv[1]))
            if streams is not None:
                answers.close()
                requests.close()
                requests, answers = streams
                continue
            found: dict[str, Any] = {"pid": pid}
        else:
            found = answer(request, specs)
        answers.write(json.dumps(found) + "\n")
        answers.flush()
        planned += 1
        if planned % COLLECTED == 0:
            # Garbage is looked for between plans, and not again and again among all that torch consists of.
            gc.collect()
            gc.freeze()
    twins.leave()


def close_input() -> None:
    """Let processes that a script starts read from the terminal, if there is one, and not the requests."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        terminal = os.open(os.devnull, os.O_RDONLY)
    os.dup2(terminal, 0)
    os.close(terminal)


def preload() -> None:
    """Hide real GPUs, and import the modules of every plan, while the command still reads its configuration."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import mpt.planner.plans.plan  # noqa: F401


def answer(request: dict[str, Any], specs: dict[str, Any]) -> dict[str, Any]:
    """Return a plan as plain data, or the one line that says why there is none.

    `specs` are kept for later requests.
    """
    from mpt.config.finding.part_packages import outside_packages
    from mpt.config.load import load_config
    from mpt.errors import ConfigError, DataError, MptError, PartError
    from mpt.outside.own_calls import explain_call
    from mpt.outside.own_code import explain_own_code
    from mpt.planner.facts.calibration import Calibration
    from mpt.planner.facts.gpus import Gpu
    from mpt.planner.plans.inference import InferenceWish, plan_inference
    from mpt.planner.plans.plan import Wish, plan_config
    from mpt.planner.plans.worlds import plan_worlds
    from mpt.planner.server.lone_libraries import lone_libraries
    from mpt.seams import DataSpec

    try:
        gpu = Gpu(**{**request["gpu"], "capability": tuple(request["gpu"]["capability"])})
        calibration = Calibration(**request["calibration"])
        if "own" in request:
            return {"found": answer_own(request["own"], gpu, calibration, Wish(**request["wish"]))}
        config = load_config(request["config"], allow=request["allow"])
        key = json.dumps(
            [config.to_data()["dataset"], config.to_data()["model"], config.to_data()["task"]]
        )
        if request.get("data") is not None:
            data, spec, notes = None, DataSpec.from_record(request["data"]), []
        else:
            if key not in specs:
                try:
                    specs[key] = find_data(config)
                except DataError as error:
                    return {"error": str(error), "exit_code": error.exit_code, "lacks_data": True}
            data, spec, notes = specs[key]
        if "inference" in request:
            made = plan_inference(
                config, spec, gpu, calibration, InferenceWish(**request["inference"])
            )
            return {"found": replace(made, notes=[*made.notes, *notes]).as_data()}
        if "worlds" in request:
            rows = plan_worlds(
                config, spec, gpu, calibration, Wish(**request["wish"]), request["worlds"]
            )
            return {"found": [replace(row, notes=[*row.notes, *notes]).as_data() for row in rows]}
        wish = Wish(**request["wish"])
        if wish.draws:
            if data is not None:
                draw_sample(config, data)
            meet_weights(config, spec)
        is_own = not request["allow"] and not outside_packages()
        with lone_libraries() if is_own else nullcontext():
            plan = plan_config(config, spec, gpu, calibration, wish)
        return {"found": replace(plan, notes=[*plan.notes, *notes]).as_data()}
    except MptError as error:
        return {"error": str(error), "exit_code": error.exit_code}
    except (
        Exception
    ) as error:  # of a data set's build, say: a step's are explained where it is traced
        if (wrong_call := explain_call(error)) is not None:
            return {"error": wrong_call, "exit_code": PartError.exit_code}
        if (said := explain_own_code(error)) is None:
            raise
        return {"error": f"cannot plan: {said}", "exit_code": ConfigError.exit_code}


def answer_own(asked: dict[str, Any], gpu: Any, calibration: Any, wish: Any) -> dict[str, Any]:
    """Return the plan of somebody's own training step as plain data."""
    from mpt.planner.own.execution.source import Source
    from mpt.planner.own.plan import plan_own

    source = Source.of(asked["source"])
    arguments, with_changes = asked["arguments"], asked["with_changes"]
    return plan_own(source, arguments, gpu, calibration, wish, with_changes).as_data()


def find_data(config: Any) -> tuple[Any, Any, list[str]]:
    """Return the data, their layout and notes. Labelled images that are not here are assumed, with None for the data:
    a plan needs none.
    """
    import torch

    from mpt.config.options import setting_of
    from mpt.engine.building.build import build_datasets
    from mpt.errors import DataError
    from mpt.seams import DataSpec, FieldSpec

    try:
        data = build_datasets(config)[0]
        return data, data.spec, []
    except DataError as error:
        found = str(error).partition(". ")[0]  # the remedy is for training
        plugin = config.sized_dataset.plugin
        assume = plugin.optional("assume")
        assumed = assume(plugin.native_settings(config.sized_dataset.settings)) if assume else None
        if assumed is not None:
            return (
                None,
                assumed,
                [f"the data set is not here ({found}): its layout follows from the settings"],
            )
        size = setting_of(config.sized_dataset.settings, "image_size")
        if config.task.name != "classify" or size is None:
            raise
        channels = setting_of(config.sized_dataset.settings, "channels") or 3
        fields = {
            "image": FieldSpec((channels, size, size), torch.float32, "image"),
            "label": FieldSpec((), torch.int64),
        }
        classes = tuple(str(number) for number in range(ASSUMED_CLASSES))
        note = f"the data set is not here ({found}): planned with {channels}x{size}x{size} images in 1000 classes"
        return None, DataSpec(fields, ASSUMED_CLASSES, classes), [note]


def draw_sample(config: Any, data: Any) -> None:
    """Raise DataError if training could not draw its batches of data that are here."""
    from mpt.engine.loop.assembly import supply_batches

    supply_batches(config, data)
    data.fetch([0], 0)


def meet_weights(config: Any, spec: Any) -> None:
    """Raise CheckpointError if training would refuse a file of weights that it begins with."""
    from mpt.config.options import setting_of
    from mpt.engine.building.build import build_networks, build_tricks, load_start
    from mpt.seams import HoldsWeights

    tricks = build_tricks(config)
    if setting_of(config.model.settings, "weights"):
        load_start(config, build_networks(config, spec, fake=True), tricks)
    for trick in tricks:
        if isinstance(trick, HoldsWeights):
            trick.check_start()


ASSUMED_CLASSES = 1000

if __name__ == "__main__":
    main()
