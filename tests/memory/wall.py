"""The wall of pairs: every precision mode with every memory trick and every optimizer, some steps of a small network.

A run must move every trained weight, keep all of them finite, and equal the run without its trick where the trick is
exact. What cannot be combined must say so in a ConfigError, for one of the reasons in `REFUSALS`.

`python -m tests.memory.wall` builds the whole wall, `--quick` what the default tests build, `--low-bit` that of fp8 and
int8; all print what is wrong.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mpt
from mpt.engine.building.build import build_run
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.memory import offload_activations
from mpt.optim.shared.schedules import set_learning_rates
from mpt.seams import Run
from tests.engine import parts
from tests.memory.mechanism import same, state

STEPS = 3
PARTS = Path(__file__).with_name("wall_parts")
NETWORKS: dict[str, dict[str, Any]] = {
    "classifier": {"name": "wall_net"},
    "gan": {"name": "dcgan", "features": 4, "image_size": 16, "latent_size": 8},
    "own_half": {
        **{"name": "stylegan2", "image_size": 16, "channels": 1, "latent_size": 8, "style_size": 8},
        **{"mapping_layers": 2, "channel_base": 64, "channel_max": 8, "num_fp16_res": 1},
    },
}
MODES = (
    *("fp32", "tf32", "O0", "amp", "bf16", "O1", "O2", "O3"),
    *("fp16-pure", "bf16-pure", "bf16-sr", "bf16-kahan", "bf16-24bit", "fp16-24bit", "native"),
)
LOW_BIT = ("fp8", "int8")
"""They need torchao, and on a CPU fp8's numbers are emulated; int8's are not."""
LOW_BIT_STATES = frozenset(
    {"low_bit_optimizer", *(f"low_bit_optimizer own {bits}" for bits in (4, 8, 16))}
)
NEVER = {
    "O1": {"compile", "low_bit_base"},
    "O2": {"optimizer_in_backward"},
    "native": {"compile", "lora", "low_bit_base", "prune"},
    **{
        mode: {"cpu_optimizer", "stream_weights", *LOW_BIT_STATES}
        for mode in ("bf16-sr", "bf16-kahan", "bf16-24bit", "fp16-24bit")
    },
}
"""Of each mode, the tricks that it refuses with every network and optimizer."""
TRICKS: dict[str, dict[str, Any]] = {
    "recompute sqrt": {"recompute": "sqrt"},
    "recompute all": {"recompute": "all"},
    "recompute selective": {"recompute": "selective"},
    "recompute per tensor": {"recompute": {"budget": 0.5, "per": "tensor"}},
    "micro_batch": {"micro_batch": 4},
    "offload_activations": {"offload_activations": 0.0},
    "optimizer_in_backward": {"optimizer_in_backward": True},
    "release_grads_after": {"release_grads_after": True},
    "cpu_optimizer": {"cpu_optimizer": True},
    "low_bit_optimizer": {"low_bit_optimizer": True},
    "low_bit_optimizer own 8": {"low_bit_optimizer": {"backend": "own"}},
    "low_bit_optimizer own 4": {"low_bit_optimizer": {"backend": "own", "bits": 4}},
    "low_bit_optimizer own 16": {"low_bit_optimizer": {"backend": "own", "bits": 16}},
    "park_optimizer": {"park_optimizer": True},
    "stream_weights": {"stream_weights": {"min_kibibytes": 0}},
    "lora": {"lora": 2},
    "low_bit_base": {"low_bit_base": "nf4", "lora": 2},
    "channels_last": {"channels_last": True},
    "prune": {"prune": 0.5},
    "compile": {"compile": {"backend": "aot_eager"}},
    "expandable_segments": {"expandable_segments": True},
    "empty_cache_every": {"empty_cache_every": 1},
    "cuda_graphs": {"cuda_graphs": True},
    "set_to_none on": {"set_to_none": True},
    "set_to_none off": {"set_to_none": False},
}
"""Every trick, with settings by which it does something to a small network."""
ROUNDED = LOW_BIT_STATES | {
    "micro_batch",
    "lora",
    "low_bit_base",
    "channels_last",
    "prune",
    "compile",
}
"""Those that do not claim to be bit-equal (the table in docs/benchmarks/memory.md)."""
OPTIMIZERS = (
    *("sgd", "adam", "adamw", "adamax", "rmsprop", "lion", "muon", "adafactor", "schedule_free"),
    *("adabelief", "rmsprop_leras", "sgd_warmup"),
)
RATES = {"sgd": {"lr": 1.0}, "sgd_warmup": {"lr": 1.0, "warmup": 0}}
"""So large that weights in bfloat16 move too: updates below half an ulp are lost there by design."""
COMPILED_WITH = ("sgd", "adam", "muon")
"""Compiling takes seconds each time, and changes nothing of the optimizer."""
WITH_EPS = frozenset({"adam", "adamw", "adamax", "rmsprop", "muon", "schedule_free"})
REFUSALS = "|".join(
    (
        "[a-z_]+: .*(bf16|fp16)-24bit takes the optimizer's steps",
        "cannot be combined with",
        "(lora|low_bit_base): no Linear layer",
        "memory.prune: no hidden channels",
        "low_bit_base: O1 casts call by call",
        "lora, stream_weights: there is no trained weight",
        "cpu_optimizer: (bf16-(sr|kahan) takes|evaluations read ScheduleFreeAdamW)",
        "low_bit_optimizer: (bf16-(sr|kahan) takes|evaluations read|there is no 8-bit|needs bitsandbytes)",
        "optimizer_in_backward: (O2 copies|optimizer.clip_grad_norm needs)",
        "stream_weights: single layers of a Sequential travel here, and memory.lora",
        "stream_weights: trained weights travel, (and bf16-(sr|kahan) takes|whose .* on the host)",
        "compile: (O1 casts call by call|task stylegan2 differentiates a gradient)",
    )
)
"""What does not go together and says so; anything else that is refused is a mistake."""


@dataclass(frozen=True)
class Brick:
    """One run of the wall."""

    network: str
    mode: str
    optimizer: str
    tricks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " + ".join((self.network, self.mode, self.optimizer, *self.tricks))

    @property
    def is_exact(self) -> bool:
        """Whether it must equal the run without its tricks."""
        if "set_to_none off" in self.tricks and self.network == "own_half":
            # a phase leaves weights without a gradient, which zeros let an optimizer move all the same
            return False
        return ROUNDED.isdisjoint(self.tricks)

    @property
    def loses_small_steps(self) -> bool:
        """Whether small gradients are lost by design: an adapter's first ones, to the epsilon of Adafactor in float16
        and of AdaBelief in bfloat16."""
        has_adapters = not {"lora", "low_bit_base"}.isdisjoint(self.tricks)
        losing = {"adafactor": ("O3", "fp16-pure"), "adabelief": ("bf16-pure",)}
        return self.mode in losing.get(self.optimizer, ()) and has_adapters


def build(brick: Brick) -> Run:
    """Build a run. Raises ConfigError where its parts do not go together."""
    # 1e-8 is 0 in float16
    half_state = brick.mode in ("O3", "fp16-pure") and brick.optimizer in WITH_EPS
    scaling: dict[str, Any] = (
        {"init_scale": 16} if brick.mode in ("amp", "O1", "O2", "fp16-24bit") else {}
    )  # the first step is no overflow
    if brick.mode in ("O3", "fp16-pure"):
        scaling["loss_scale"] = 128  # small gradients underflow there by design
    if brick.mode in ("amp", "O1", "O2", "O3"):
        scaling["dtype"] = "float16"  # on a CPU they would choose bfloat16
    if "optimizer_in_backward" in brick.tricks and scaling.get("init_scale"):
        scaling = {"dtype": "float16", "loss_scale": 16}
    model = NETWORKS[brick.network]
    if brick.mode in LOW_BIT:
        scaling = {"emulate": brick.mode == "fp8", "min_speedup": 0}
        model = {**model, "features": 8}  # the sides of its matrices become 16
    config = mpt.load(
        {
            "model": model,
            "dataset": "digits",
            "precision": {"mode": brick.mode, **scaling},
            "optimizer": {
                "name": brick.optimizer,
                **RATES.get(brick.optimizer, {"lr": 0.02}),
                **({"eps": 1e-4} if half_state else {}),
            },
            "memory": {
                name: value for trick in brick.tricks for name, value in TRICKS[trick].items()
            },
            "train": {"steps": STEPS, "batch_size": 8},
        },
        parts=[PARTS],
    )
    return build_run(config, torch.device("cpu"), parts.DIGITS)


def train(run: Run) -> tuple[set[str], dict[str, Tensor]]:
    """Train for some steps; return the trained weights that did not move, and all weights."""
    before, trained = state(run), trained_names(run)
    torch.manual_seed(7)
    for step in range(STEPS):
        set_learning_rates(run.optimizers, run.optimizer_settings, step, STEPS)
        for phase in run.phases:
            done = update(run, phase, parts.batch(step))
            assert not done.stats.skipped, f"step {step} of {phase.name} was skipped"
        run.task.after_step(step, 8 * (step + 1))
    after = state(run)
    return {name for name in trained if torch.equal(before[name], after[name])}, after


def trained_names(run: Run) -> set[str]:
    """Return the names of the weights that an optimizer updates."""
    return {
        f"{name}.{key}"
        for name, module in run.task.trainable.items()
        for key, parameter in module.named_parameters()
        if parameter.requires_grad
    }


@functools.cache
def plain(brick: Brick) -> tuple[set[str], dict[str, Tensor]]:
    """Train without tricks, once for all that are compared with it."""
    return train(build(brick))


def lay(brick: Brick) -> str:
    """Train a run; return what is wrong with it, "refused: ..." or nothing."""
    try:
        run = build(brick)
    except ConfigError as error:
        return f"refused: {error}"
    try:
        unmoved, after = train(run)
    except ConfigError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if unmoved and not brick.loses_small_steps:
        return f"{len(unmoved)} of {len(trained_names(run))} trained weights did not move: {', '.join(sorted(unmoved))}"
    infinite = [name for name, value in after.items() if not value.isfinite().all()]
    if infinite:
        return f"not finite: {', '.join(infinite)}"
    if (
        brick.is_exact
        and brick.tricks
        and not same(after, plain(Brick(brick.network, brick.mode, brick.optimizer))[1])
    ):
        return "is not the run without its tricks"
    return ""


def network_of(mode: str, index: int) -> str:
    """Return a network that a mode can train, one or the other in turn."""
    return "own_half" if mode == "native" else ("classifier", "gan")[index % 2]


def quick() -> Iterator[Brick]:
    """Yield a sixth of all pairs of a mode and a trick, a third of modes that step in pieces, with optimizers in turn.

    Not `compile`, which takes seconds each time.
    """
    tricks = [trick for trick in TRICKS if trick != "compile"]
    for (row, mode), (column, trick) in product(enumerate(MODES), enumerate(tricks)):
        if (row + column) % (3 if mode in ("bf16-sr", "bf16-kahan") else 6):
            continue
        optimizer = OPTIMIZERS[(5 * row + column) % len(OPTIMIZERS)]
        # few have states in few bits, one of them without a further package
        if trick in LOW_BIT_STATES:
            optimizer = "muon" if trick == "low_bit_optimizer" else "adamw"
        yield Brick(network_of(mode, row + column // 2), mode, optimizer, (trick,))


def whole(modes: Sequence[str] = MODES) -> Iterator[Brick]:
    """Yield some modes, each with every trick and every optimizer, and with pairs of tricks."""
    for mode, optimizer in product(modes, OPTIMIZERS):
        plain.cache_clear()
        for network in dict.fromkeys(network_of(mode, one) for one in range(2)):
            yield Brick(network, mode, optimizer)
            yield from (
                Brick(network, mode, optimizer, (trick,))
                for trick in TRICKS
                if trick != "compile" or optimizer in COMPILED_WITH
            )
    tricks = [trick for trick in TRICKS if trick != "compile"]
    for index, (mode, (one, other)) in enumerate(product(modes, combinations(tricks, 2))):
        if TRICKS[one].keys().isdisjoint(TRICKS[other]):
            yield Brick(
                network_of(mode, index), mode, ("sgd", "adam", "adabelief")[index % 3], (one, other)
            )


def low_bit() -> Iterator[Brick]:
    """Yield fp8 and int8 with every trick and every optimizer, on the network that has matrices."""
    for mode, optimizer in product(LOW_BIT, OPTIMIZERS):
        yield Brick("classifier", mode, optimizer)
        yield from (
            Brick("classifier", mode, optimizer, (trick,)) for trick in TRICKS if trick != "compile"
        )


def main() -> None:
    """Build the wall and print what is wrong with it."""
    warnings.simplefilter("ignore")
    offload_activations.POINTLESS_ON.clear()
    counts: Counter[str] = Counter()
    reasons: dict[str, list[str]] = {}
    for brick in (
        low_bit() if "--low-bit" in sys.argv else quick() if "--quick" in sys.argv else whole()
    ):
        found = lay(brick)
        kind = "right" if not found else "refused" if found.startswith("refused") else "wrong"
        counts[kind] += 1
        if kind == "wrong":
            print(f"{brick}: {found}", flush=True)
        elif kind == "refused":
            reasons.setdefault(found, []).append(str(brick))
    for reason, bricks in sorted(reasons.items()):
        print(f"{len(bricks)} {reason} ({bricks[0]})")
    print(dict(counts))


if __name__ == "__main__":
    main()
