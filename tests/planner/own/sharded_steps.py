"""Training steps whose weights are shared out over cards in each of torch's ways.

As a program, the truth that plans are compared with: the live bytes of the first of several gloo ranks on a CPU.

    torchrun --nproc-per-node 2 -m tests.planner.own.sharded_steps flat half waits
    torchrun --nproc-per-node 4 -m tests.planner.own.sharded_steps shards hybrid
"""

from __future__ import annotations

import sys

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, LAYERS, BATCH = 1024, 4, 32


class Block(nn.Module):
    """A layer and its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(self.layer(x)).relu()


class Stack(nn.Module):
    """Blocks and a head; `waits`: the host waits for the card after each of them, forward and backward."""

    def __init__(self, waits) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head, self.waits = nn.Linear(WIDTH, 10), waits

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.waits:
                wait()
                x.register_hook(wait)
        return self.head(x)


def wait(gradient=None):
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def begin(ranks):
    if not distributed.is_initialized():
        distributed.init_process_group("nccl", rank=0, world_size=ranks)
    assert distributed.get_world_size() == ranks


def steps_of(model, place=DEVICE):
    """Return the step of a model with AdamW, which steps one weight after the other as on a CPU."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step():
        optimizer.zero_grad()
        model(torch.randn(BATCH, WIDTH, device=place)).float().sum().backward()
        optimizer.step()

    return step


def flat(way="", ranks=2):
    """FSDP1."""
    from torch.distributed import fsdp
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    begin(ranks)
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block})}
    if "half" in way:
        half = torch.bfloat16
        options["mixed_precision"] = fsdp.MixedPrecision(half, half, half)
    if "gradients" in way:
        options["sharding_strategy"] = fsdp.ShardingStrategy.SHARD_GRAD_OP
    if "hybrid" in way:
        options["sharding_strategy"] = fsdp.ShardingStrategy.HYBRID_SHARD
        options["device_mesh"] = init_device_mesh(DEVICE, (ranks // 2, 2))
    if "unlimited" in way:
        options["limit_all_gathers"] = False
    if "host" in way:
        options["cpu_offload"] = fsdp.CPUOffload(offload_params=True)
    if "original" in way:
        options["use_orig_params"] = True
    place = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
    model = fsdp.FullyShardedDataParallel(Stack("waits" in way), device_id=place, **options)
    return steps_of(model)


def shards(way="", ranks=2):
    """FSDP2."""
    from torch.distributed import fsdp

    begin(ranks)
    sizes, names = ((ranks // 2, 2), ("copies", "parts")) if "hybrid" in way else ((ranks,), None)
    options = {"mesh": init_device_mesh(DEVICE, sizes, mesh_dim_names=names)}
    if "host" in way:
        options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=DEVICE == "cuda")
    model = Stack("waits" in way).to("cpu" if "host" in way else DEVICE)
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)
    return steps_of(model)


def read(way="", ranks=2):
    """FSDP2 on `meta`: weights that are drawn in their places, and parts of gradients that are looked at."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import _random

    begin(ranks)
    mesh = init_device_mesh(DEVICE, (ranks,))
    _random.manual_seed(0, mesh)
    with torch.device("meta"):
        model = Stack(False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=DEVICE)
    for weight in model.parameters():
        nn.init.trunc_normal_(weight, std=0.02)
    taken = steps_of(model)

    def step():
        taken()
        if any((~torch.isfinite(one.grad)).any() for one in model.parameters()):
            raise SystemExit("not finite")
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) >= 0

    return step


def columns(way="", ranks=2):
    """Tensor parallel: each card has some columns of a layer, and the rows of the next; with FSDP2 over the rest."""
    from torch.distributed import fsdp
    from torch.distributed.tensor import Shard, parallel

    begin(ranks)
    mesh = init_device_mesh(DEVICE, (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    parts = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(LAYERS)
    ]  # fmt: skip
    model = nn.Sequential(*parts).to(DEVICE)
    plan = {"1": parallel.ColwiseParallel(), "3": parallel.RowwiseParallel()}
    if "sequence" in way:
        plan = {
            "0": parallel.SequenceParallel(sequence_dim=0),
            "1": parallel.ColwiseParallel(input_layouts=Shard(0)),
            "3": parallel.RowwiseParallel(output_layouts=Shard(0)),
        }
    for part in model:
        parallel.parallelize_module(part, mesh["tensor"], plan)
        if ranks > 2:
            fsdp.fully_shard(part, mesh=mesh["data"])
    return steps_of(model)


def stages(way="", ranks=2):
    """The first stage of a pipeline."""
    from torch.distributed import pipelining

    begin(ranks)
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(DEVICE)
    stage = pipelining.PipelineStage(part, 0, ranks, torch.device(DEVICE, 0))
    schedule = pipelining.ScheduleGPipe(stage, 4, loss_fn=nn.MSELoss())
    return lambda: schedule.step(torch.rand(BATCH, WIDTH, device=DEVICE))


def measure(step, built):
    """Print the most live bytes of two steps of this rank."""
    from mpt.planner.trace.trace import live_peak

    step(), step()
    if distributed.get_rank() == 0:
        print(live_peak(RECORDER.trace, built))


if __name__ == "__main__":
    from mpt.planner.step.shard_trace import watch_shards
    from mpt.planner.trace.overlap import OrderedWork
    from mpt.planner.trace.recorder import Recorder

    RECORDER = Recorder("cpu")
    distributed.init_process_group("gloo")
    make, way = globals()[sys.argv[1]], " ".join(sys.argv[2:])
    with (
        torch.autograd.set_multithreading_enabled(False),
        watch_shards(RECORDER, OrderedWork()),
        RECORDER.recording() as trace,
    ):
        made = make(way, distributed.get_world_size())
        measure(made, len(trace.events))
    distributed.destroy_process_group()
