"""Compare ways of keeping less for backward on full-size models, as planned: `recompute` per tensor and the others.

Usage: python scripts/plans/recompute_table.py [--only resnet50 vit ...] [--gpu NAME] [--output
docs/benchmarks/recompute.md]

Each way is a trace of two steps on fake tensors (`mpt.planner`), so that memory and time are those of `mpt plan`. Two
rows are found by bisection: the least memory in the time that `recompute: sqrt` takes, and the least time in its
memory; then the same with a part of the activations on the host.

A second table is torch's own `activation_memory_budget`, which its compiler obeys: the joint graph of forward and
backward cut at that budget (AOTAutograd's partitioner), for two networks that it traces as one graph, in float32:
bytes kept for backward, and arithmetic. A third puts the same choice into the planned step of two full-size models:
peak and time with each operator run by itself, as `per: tensor` runs them (`aot_eager`), and fused (`inductor`).
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.engine.building.build import build_run
from mpt.engine.step.step import update
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import Gpu, find_gpu
from mpt.planner.facts.placement import Placement
from mpt.planner.plans.plan import trace_placed
from mpt.planner.server.worker import find_data
from mpt.planner.trace.replay import replay
from mpt.seams import DataSpec, FieldSpec, Task
from scripts.command_line import described
from scripts.plans.memory_table import saved_bytes

START, END = (
    "<!-- tables by scripts/plans/recompute_table.py -->",
    "<!-- end of the tables of scripts/plans/recompute_table.py -->",
)
VIT: dict[str, Any] = {
    "model": {"name": "torchvision:vit_b_16", "image_size": 224},
    "dataset": {"name": "image_folder", "root": "data/imagenet"},
    "precision": "amp",
    "optimizer": {"name": "adam", "lr": 1e-3},
    "train": {"batch_size": 64, "steps": 10},
}
MODELS: dict[str, tuple[str, Any]] = {
    "resnet50": ("ResNet-50, amp, batch 256", "@resnet50_imagefolder"),
    "vit": ("ViT-B/16, amp, batch 64", VIT),
    "stylegan2": ("StyleGAN2-256, native, batch 16", "@stylegan2_256"),
    "saehd": ("SAEHD-512, amp, batch 8", "@saehd_512"),
    "yolofuse": ("YOLOFuse mid n, 640 pixels, amp, batch 64", "@yolofuse_mid"),
}
WAYS: tuple[Any, ...] = (None, "sqrt", "all", "selective", {"every": 2}, {"budget": 0.5})
COMPARED = (("resnet50", 160, 8), ("vit_b_16", 224, 1))
"""Networks whose loss torch traces as one graph, image sizes, batches: small, as real tensors are counted."""
PLANNED = ("resnet50", "vit")
SHARES = (0.8, 0.6, 0.4, 0.2)
ROUNDS = 5
HOST_GIB = 1.0


@dataclass(frozen=True)
class Point:
    """What a way of recomputing comes to."""

    way: dict[str, Any]
    allocated: int
    reserved: int
    seconds: float


class Traces:
    """Plans of one configuration with other memory tricks beside its own."""

    def __init__(self, config: Config, gpu: Gpu) -> None:
        self.config, self.gpu = config, gpu
        self.data: DataSpec = find_data(config)[1]

    def take(self, memory: dict[str, Any]) -> Point:
        """Return the plan with some tricks."""
        values = self.config.to_data()
        values["memory"].update(memory)
        config = load_config(values)
        fake = trace_placed(config, self.data, self.gpu, Calibration(), Placement())
        played = replay(fake.trace)
        return Point(memory, played.allocated, played.reserved, fake.work.seconds(self.gpu))

    def find(
        self, good: Callable[[Point], bool], gentle: bool, beside: dict[str, Any]
    ) -> Point | None:
        """Return the point of `per: tensor` that is good, with the largest budget where `gentle`, else the smallest."""
        low, high, found = 0.0, 1.0, None
        for _ in range(ROUNDS):
            budget = (low + high) / 2
            point = self.take({"recompute": {"budget": budget, "per": "tensor"}, **beside})
            if good(point):
                found = point
            if good(point) == gentle:
                low = budget
            else:
                high = budget
        return found


def write_rows(title: str, traces: Traces) -> str:
    """Return the table of one model."""
    lines = [
        f"### {title}",
        "",
        "| Way | allocated MiB | reserved MiB | step |",
        "|---|---:|---:|---:|",
    ]
    points = {str(way): traces.take({} if way is None else {"recompute": way}) for way in WAYS}
    plain, root = points["None"], points["sqrt"]

    def add(name: str, point: Point | None) -> None:
        if point is None:
            lines.append(f"| {name} | not reached | | |")
        else:
            sizes = f"{point.allocated / 2**20:,.0f} | {point.reserved / 2**20:,.0f}"
            lines.append(f"| {name} | {sizes} | ×{point.seconds / plain.seconds:.3f} |")
        print(lines[-1], flush=True)

    for way in WAYS:
        add("nothing" if way is None else f"`recompute: {describe(way)}`", points[str(way)])
    host = {"offload_activations": {"at_most_gib": HOST_GIB}}
    for words, beside in (
        ("", {}),
        (f", `offload_activations: {describe(host['offload_activations'])}`", host),
    ):
        within = traces.find(lambda one: one.seconds <= root.seconds, False, beside)
        add(f"per tensor{words}: sqrt's time, {budget_of(within)}", within)
        within = traces.find(lambda one: one.allocated <= root.allocated, True, beside)
        add(f"per tensor{words}: sqrt's memory, {budget_of(within)}", within)
    return "\n".join(lines)


def budget_of(point: Point | None) -> str:
    """Return a point's budget in words."""
    return "no budget" if point is None else f"budget {point.way['recompute']['budget']:.3f}"


def describe(value: Any) -> str:
    """Return settings as YAML would have them."""
    return json.dumps(value).replace('"', "") if isinstance(value, dict) else str(value)


def compare_with_torch() -> str:
    """Return the table of torch's partitioner beside `per: tensor`: bytes kept for backward, arithmetic done again."""
    lines = ["| Network | Chosen by | budget | kept MiB | arithmetic |", "|---|---|---:|---:|---:|"]
    for name, size, batch in COMPARED:
        settings = {
            "model": {"name": f"torchvision:{name}", "image_size": size}, "dataset": "shapes",
            "precision": "fp32", "optimizer": {"name": "sgd", "lr": 0.1}, "train": {"batch_size": batch, "steps": 1},
        }  # fmt: skip
        fields = {
            "image": FieldSpec((3, size, size), torch.float32),
            "label": FieldSpec((), torch.int64),
        }
        data = DataSpec(fields, 1000, tuple("0123456789"))
        plain = 0
        for budget in (None, *SHARES):
            memory = {} if budget is None else {"recompute": {"budget": budget, "per": "tensor"}}
            config = load_config({**settings, "memory": memory})
            batch_of_zeros = data.zeros(batch, torch.device("cpu"))
            kept = saved_bytes(build_run(config, torch.device("cpu"), data), batch_of_zeros)
            with FlopCounterMode(display=False) as counter:
                run = build_run(config, torch.device("cpu"), data)
                update(run, run.phases[0], batch_of_zeros)
            flops = counter.get_total_flops()
            plain = plain or flops
            words = "-" if budget is None else f"{budget}"
            chosen = "nothing" if budget is None else "`per: tensor`"
            lines.append(
                f"| {name} | {chosen} | {words} | {kept / 2**20:,.1f} | ×{flops / plain:.3f} |"
            )
            print(lines[-1], flush=True)
        for budget in (1.0, *SHARES):
            kept, flops = partition(
                build_run(load_config(settings), torch.device("cpu"), data).task,
                batch,
                size,
                budget,
            )
            lines.append(
                f"| {name} | torch | {budget} | {kept / 2**20:,.1f} | ×{flops / plain:.3f} |"
            )
            print(lines[-1], flush=True)
    return "\n".join(lines)


def plan_with_torch(gpu: Gpu) -> str:
    """Return the table of both choices in a planned step: what the backward holds and computes again is counted."""
    import torch._functorch.config as functorch_config

    lines = [
        "| Model | Chosen by | budget | allocated MiB | reserved MiB | step |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name in PLANNED:
        title, config = MODELS[name]
        traces = Traces(load_config(config), gpu)
        plain = traces.take({})

        def add(
            words: str, budget: Any, point: Point, title: str = title, plain: Point = plain
        ) -> None:
            sizes = f"{point.allocated / 2**20:,.0f} | {point.reserved / 2**20:,.0f}"
            lines.append(
                f"| {title} | {words} | {budget} | {sizes} | ×{point.seconds / plain.seconds:.3f} |"
            )
            print(lines[-1], flush=True)

        add("nothing", "-", plain)
        for budget in SHARES:
            add(
                "`per: tensor`",
                budget,
                traces.take({"recompute": {"budget": budget, "per": "tensor"}}),
            )
        for backend in ("aot_eager", "inductor"):
            for budget in (1.0, *SHARES):
                with functorch_config.patch(activation_memory_budget=budget):
                    add(
                        f"torch, `{backend}`",
                        budget,
                        traces.take({"compile": {"backend": backend}}),
                    )
    return "\n".join(lines)


def partition(task: Task, batch: int, size: int, budget: float) -> tuple[int, int]:
    """Return the bytes that torch's compiled graphs hand to backward at a budget, and the operations of both."""
    import torch._functorch.config as functorch_config
    from torch._functorch.aot_autograd import aot_module, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    network = task.modules["net"]
    for module in network.modules():
        # its statistics are written to, which is not what is compared
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    found = {"kept": 0, "flops": 0}

    def look(graph: torch.fx.GraphModule, is_forward: bool) -> Any:
        if is_forward:
            given = {
                storage_of(node.meta["val"]) for node in graph.graph.find_nodes(op="placeholder")
            }
            outputs = [
                one.meta["val"]
                for one in graph.graph.find_nodes(op="output")[0].args[0]
                if one is not None
            ]
            kept = {
                storage_of(one): one.untyped_storage().nbytes()
                for one in outputs
                if isinstance(one, Tensor)
            }
            found["kept"] = sum(size for storage, size in kept.items() if storage not in given)
        found["flops"] += sum(
            flops_of(node) for node in graph.graph.nodes if node.op == "call_function"
        )
        return make_boxed_func(graph.forward)

    with functorch_config.patch(activation_memory_budget=budget):
        compiled = aot_module(
            network,
            fw_compiler=lambda graph, _: look(graph, True),
            bw_compiler=lambda graph, _: look(graph, False),
            partition_fn=min_cut_rematerialization_partition,
        )
        compiled(torch.zeros(batch, 3, size, size)).sum().backward()
    return found["kept"], found["flops"]


def storage_of(value: Any) -> int | None:
    """Return what tells a tensor's storage from others, None for another value."""
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def flops_of(node: torch.fx.Node) -> int:
    """Return the floating-point operations of a graph's node."""
    from torch.utils.flop_counter import flop_registry

    count = flop_registry.get(getattr(node.target, "_overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    return int(count(*args, **kwargs, out_val=node.meta["val"]))


def main() -> None:
    """Measure, print, and replace the tables in the file where one is named."""
    parser = described(__doc__)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gpu", default="rtx3060")
    parser.add_argument(
        "--torch", action="store_true", help="compare with torch's activation_memory_budget as well"
    )
    parser.add_argument(
        "--output", type=Path, help="a page with the two lines to write between; other tables stay"
    )
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("ignore")
    gpu = find_gpu(options.gpu)
    tables = [
        write_rows(MODELS[name][0], Traces(load_config(MODELS[name][1]), gpu))
        for name in options.only
    ]
    if options.torch:
        tables.append(f"### Beside torch's `activation_memory_budget`\n\n{compare_with_torch()}")
        tables.append(f"### The same choice in a planned step\n\n{plan_with_torch(gpu)}")
    if options.output is not None:
        options.output.write_text(
            replace_tables(options.output.read_text("utf-8"), tables), "utf-8"
        )


def replace_tables(page: str, tables: list[str]) -> str:
    """Return the page with these tables in the place of those under the same headings; the others stay."""
    before, rest = page.split(START, 1)
    there, after = rest.split(END, 1)
    made = {table.splitlines()[0]: table for table in tables}
    parts = ["### " + part.strip() for part in there.split("### ")[1:]]
    kept = [made.pop(part.splitlines()[0], part) for part in parts]
    text = "\n\n".join([*kept, *made.values()])
    return f"{before}{START}\n\n{text}\n\n{END}{after}"


if __name__ == "__main__":
    main()
