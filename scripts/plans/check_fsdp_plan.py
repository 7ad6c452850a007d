"""Compare a planned FSDP2 rank with a published one: torchtitan's Llama 3.1 8B on H100s.

`python scripts/plans/check_fsdp_plan.py [--layers N]`. The measurements are tables 1 and 3 of torchtitan's
benchmarks/llama3_h100_202412_torchtitan.md: H100s of 96 GB and 500 W, FSDP2, two sequences of 8192 tokens per card,
bfloat16 weights gathered and float32 gradients reduced, selective activation checkpointing (per operator: every second
matrix product is computed again), eager and with every block compiled. The transformer is written down here, outside of
`mpt`, on `meta`; the tracing is the planner's own. Nothing is fitted to these rows.
"""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from mpt.planner.device import fake_device, routes
from mpt.planner.device.fake_mode import LeanFakeMode
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.facts.links import find_cluster
from mpt.planner.step.compiled import PlannedNetwork
from mpt.planner.step.shard_trace import fake_world, watch_shards
from mpt.planner.trace.overlap import OrderedWork, step_time
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.replay import replay, split_at
from mpt.planner.trace.unseen import unseen_on

WIDTH, HEADS, KEYS, HIDDEN, WORDS, LAYERS = 4096, 32, 8, 14336, 128256, 32
LENGTH, SEQUENCES = 8192, 2
PUBLISHED = {
    (8, False): (82.4, 5762),
    (128, False): (67.0, 5605),
    (8, True): (77.0, 6667),
    (128, True): (62.0, 6514),
}
"""Cards and whether blocks are compiled -> GiB that torch reserved, and tokens per second and card."""
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
}


class Body(nn.Module):
    """Grouped-query attention and a gated linear unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        size = WIDTH // HEADS * KEYS
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = nn.Linear(WIDTH, size, bias=False), nn.Linear(WIDTH, size, bias=False)
        self.w1, self.w3 = (
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.Linear(WIDTH, HIDDEN, bias=False),
        )
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x_blc: Tensor, turns: Tensor) -> Tensor:
        """Return the block's output."""
        batch, length, _ = x_blc.shape
        normed = self.norm(x_blc)
        q, k, v = (
            proj(normed).view(batch, length, -1, WIDTH // HEADS)
            for proj in (self.q, self.k, self.v)
        )
        q, k = turned(q, turns), turned(k, turns)
        k, v = (one.repeat_interleave(HEADS // KEYS, dim=2) for one in (k, v))
        seen = F.scaled_dot_product_attention(
            *(one.transpose(1, 2) for one in (q, k, v)), is_causal=True
        )
        x_blc = x_blc + self.o(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        normed = self.norm2(x_blc)
        return x_blc + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


class Block(nn.Module):
    """A body whose activations are partly computed again: by torch's checkpoint, or by the compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.is_compiled = False

    def forward(self, x_blc: Tensor, turns: Tensor) -> Tensor:
        """Return the block's output."""
        if self.is_compiled:
            return self.body(x_blc, turns)
        return checkpoint(self.body, x_blc, turns, use_reentrant=False, context_fn=contexts)


class CompiledBody(PlannedNetwork):
    """A compiled body that keeps what the policy of the eager one keeps."""

    def cut(
        self, joint: fx.GraphModule, inputs: Any, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Mark the forward's operators as torch marks those of a checkpoint, and cut."""
        of_backward = {
            node
            for node in joint.graph.nodes
            if node.op == "placeholder" and "tangents" in node.name
        }
        products = 0
        for node in joint.graph.nodes:
            if of_backward.intersection(node.all_input_nodes):
                of_backward.add(node)
            elif node.op == "call_function" and node not in of_backward:
                products += node.target is torch.ops.aten.mm.default
                origin = node.args[0] if node.target is operator.getitem else node
                keeps = origin.target in KEPT and not (
                    node.target is torch.ops.aten.mm.default and products % 2 == 0
                )
                node.meta["recompute"] = (
                    CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
                )
                node.meta["ac_graph_id"] = 0
        return super().cut(joint, inputs, **options)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Return queries or keys with rotary positions, in float32 on the way."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    a, b = pairs.unbind(-1)
    cos, sin = turns[:, None, :, 0], turns[:, None, :, 1]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).type_as(x)


def contexts() -> Any:
    """Keep attention and every other matrix product."""
    seen = {"forward": 0, "recompute": 0}

    def policy(
        context: Any, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        mode = "recompute" if context.is_recompute else "forward"
        if function is torch.ops.aten.mm.default:
            seen[mode] += 1
        keeps = function in KEPT and not (
            function is torch.ops.aten.mm.default and seen[mode] % 2 == 0
        )
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    """The 8B transformer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, turns: Tensor) -> Tensor:
        """Return logits."""
        x_blc = self.words(tokens)
        for layer in self.layers:
            x_blc = layer(x_blc, turns)
        return self.output(self.norm(x_blc))


def plan(size: int, layers: int, is_compiled: bool) -> None:
    """Trace two steps of the first of `size` ranks and print what they hold."""
    gpu = find_gpu("h100")
    fake_device.register()
    routes.register()
    routes.target.capability = gpu.capability
    work = OrderedWork()
    device = torch.device(fake_device.DEVICE, 0)
    watching = {"work": False}

    def observe(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if watching["work"]:
            work.observe(func, args, kwargs, result)

    recorder = Recorder(device.type, unseen_on(gpu), observe)
    work.is_noted = False
    with (
        fake_world(0, size),
        LeanFakeMode(allow_non_fake_inputs=True),
        torch.autograd.set_multithreading_enabled(False),
        watch_shards(recorder, work),
        recorder.recording(),
    ):
        with torch.device("meta"), unset_fake_temporarily():
            model = Llama(layers)
        notes: list[str] = []
        shared: dict[Any, Any] = {}
        for block in model.layers if is_compiled else ():
            block.is_compiled = True
            compiled = block.body._compiled_call_impl = CompiledBody(
                block.body, recorder, True, False, notes
            )
            compiled._graphs = shared
        with unset_fake_temporarily():
            mesh = init_device_mesh(device.type, (size,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for number, layer in enumerate(model.layers):
            fully_shard(
                layer, mesh=mesh, mp_policy=policy, reshard_after_forward=number < layers - 1
            )
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device=device)
        recorder.mark_modules({"net": model})
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        turns = torch.empty(LENGTH, WIDTH // HEADS // 2, 2, device=device)
        for step in range(2):
            watching["work"] = work.is_noted = step == 1
            recorder.enter_moment(step, "net", "forward")
            tokens = torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64, device=device)
            logits = model(tokens, turns)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            del logits
            recorder.enter_moment(step, "net", "backward")
            loss.backward()
            recorder.enter_moment(step, "net", "step")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            for values in optimizer.state.values():
                recorder.mark(
                    (one for one in values.values() if isinstance(one, Tensor)), "optimizer state"
                )
    for note in notes:
        print(note)
    found = replay(recorder.trace)
    split = split_at(recorder.trace, found.peak_event)
    times = step_time(work, gpu, find_cluster(gpu, None, 8))
    reserved, speed = PUBLISHED[size, is_compiled]
    error = f"published {reserved}: {found.reserved / 2**30 / reserved - 1:+.1%}"
    name = f"{size} cards{', compiled' if is_compiled else ''}"
    print(
        f"{name}: {found.allocated / 2**30:.1f} GiB allocated, {found.reserved / 2**30:.1f} reserved, {error}"
    )
    print(
        f"  at {split.moment}: "
        + ", ".join(f"{k} {v / 2**30:.1f}" for k, v in split.by_category.items())
    )
    tokens_per_second = LENGTH * SEQUENCES / times.total
    seen = f"{tokens_per_second:,.0f} tokens/s a card (published {speed:,})"
    print(f"  step {times.total:.2f} s, {seen}, exposed {times.exposed:.2f} s")


def main() -> None:
    """Plan what was published."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS, help="fewer for a quick look")
    parser.add_argument("--only", type=int, nargs="+", help="these numbers of cards")
    arguments = parser.parse_args()
    for size, is_compiled in PUBLISHED:
        if not arguments.only or size in arguments.only:
            plan(size, arguments.layers, is_compiled)


if __name__ == "__main__":
    main()
