"""Training steps of DistributedDataParallel with communication hooks.

As a program: live bytes at the peak of five such steps on a CPU, of one process of gloo and as they are planned.

    python -m tests.planner.own.reduced_steps fp16
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import nullcontext

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mpt.planner.own.stand_ins.ranks import one_of_several
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.trace import live_peak

WIDTH = 1536


def hooked(model, kind):
    parallel = DistributedDataParallel(model)
    if kind == "fp16":
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if kind == "power":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return parallel


def compressed(kind: str, width: int = WIDTH):
    """Five layers, whose gradients are compressed before they are exchanged, and a rank with fewer batches."""
    distributed.init_process_group("nccl")
    model = hooked(nn.Sequential(*[nn.Linear(width, width) for _ in range(5)]).cuda(), kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        with model.join():
            optimizer.zero_grad()
            with model.no_sync():
                model(torch.randn(64, width, device="cuda")).mean().backward()
            model(torch.randn(64, width, device="cuda")).mean().backward()
            optimizer.step()

    return step


def saved_in_parts(folder: str):
    """A step after which torch.distributed.checkpoint saves the weights of all cards, at once and in a thread."""
    distributed.init_process_group("nccl")
    model = nn.Linear(256, 256).cuda()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(64, 256, device="cuda")).mean().backward()
        optimizer.step()
        weights, states = get_state_dict(model, optimizer)
        checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
        checkpoint.async_save({"model": weights}, checkpoint_id=folder).result()

    return step


def held(kind: str, is_planned: bool) -> int:
    """Return the live bytes at the peak of steps on a CPU."""
    recorder = Recorder("cpu")
    torch.autograd.set_multithreading_enabled(False)
    with one_of_several(recorder) if is_planned else nullcontext(), recorder.recording():
        distributed.init_process_group("gloo")
        model = hooked(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)]), kind)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(64, WIDTH)).mean().backward()
            optimizer.step()
    return live_peak(recorder.trace)


if __name__ == "__main__":
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = str(taken.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
    print(held(sys.argv[1], is_planned=True), held(sys.argv[1], is_planned=False))
