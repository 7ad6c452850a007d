"""Run as a program: combinations of `crossed_steps.DIMENSIONS` in real PyTorch, on fake tensors and on a fake GPU.

A line of JSON on standard input is a combination; the line of its answer says what is wrong, or nothing. One process
takes many: scripts that follow each other leave nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
import warnings
from collections.abc import Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpt.planner.facts.gpus import find_gpu
from mpt.planner.own.execution.source import Source
from mpt.planner.own.proposals.changes import Changes
from mpt.planner.own.trace import trace_on_cpu, trace_own
from mpt.planner.trace.trace import Trace
from mpt.run.process.storage_trace import tensors_in
from tests.planner.own import crossed_steps

FILE = Path(crossed_steps.__file__)
SOURCE = Source(str(FILE), "build", str(FILE.parents[3]))
GPU = find_gpu("a100")
KINDS = ("parameters", "gradients", "optimizer state")
ON_CARD = ("adamw_fused", "capturable", "asgd", "lbfgs", "line_search")
"""Optimizers that keep their numbers of steps on the card too."""
GROWING = ("lbfgs", "line_search", "asgd")
"""Planned as in a long training, and as if a search took long; `ASGD` of a CPU averages after a million steps."""
ASKED = ("evaluate", "infer")
"""`nn.TransformerEncoderLayer` has a kernel of its own for that, which is not followed."""
PASSES = ("accumulated", "backward_twice", "sharpened", "adversarial")
REPLACING = ("gradients_taken", "function_gradients", "gradients_of_each")
NUMBERS = 64
"""Weights of a network, at most."""
Combination = Mapping[str, str]


def bytes_of(tensors: Any) -> int:
    """Return the bytes of the storages of tensors, each once."""
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}
    return sum(one.nbytes() for one in storages.values())


def parts_of(tensor: Tensor) -> list[Tensor]:
    return [tensor._values()] if tensor.is_sparse else [tensor]


def run_really(combination: Combination) -> dict[str, int]:
    """Perform the steps in plain PyTorch; return the bytes of each kind of tensor after them."""
    step = crossed_steps.build(**combination, device="cpu")
    largest = 0
    for _ in range(2):
        step()
        gradients = [one.grad for one in step.own.model.parameters() if one.grad is not None]
        largest = max(largest, bytes_of(chain.from_iterable(map(parts_of, gradients))))
    states = [tensors_in(dict(one.state)) for one in step.own.optimizers]
    followers = [getattr(step.own, name, None) for name in ("follower", "mean")]
    networks = [step.own.model, *(one for one in followers if one is not None)]
    weights = chain.from_iterable(one.parameters() for one in networks)
    numbers_too = combination.get("optimizer") in ON_CARD
    on_card = [
        part
        for one in chain.from_iterable(states)
        for part in parts_of(one)
        if one.dim() or numbers_too
    ]
    return dict(zip(KINDS, (bytes_of(weights), largest, bytes_of(on_card)), strict=True))


def moments(trace: Trace) -> list[tuple[int, str, int]]:
    """Return step, moment and most live bytes of each span."""
    live, found = 0, []
    ends = [*[span.start for span in trace.spans], len(trace.events)]
    for span, (start, end) in zip(trace.spans, pairwise(ends), strict=True):
        highest = live
        for entry in trace.events[start:end]:
            live += trace.storages[entry].size if entry >= 0 else -trace.storages[~entry].size
            highest = max(highest, live)
        if found and found[-1][:2] == (span.step, span.moment):
            highest = max(highest, found.pop()[2])
        found.append((span.step, span.moment, highest))
    return found


def held(trace: Trace) -> dict[str, int]:
    """Return the bytes of each kind after the steps; of gradients the most that were alive at once."""
    live, most = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for entry in trace.events:
        storage = trace.storages[entry if entry >= 0 else ~entry]
        if storage.category in live:
            live[storage.category] += storage.size if entry >= 0 else -storage.size
            most[storage.category] = max(most[storage.category], live[storage.category])
    end = trace.spans[-1].start - 1
    left = [trace.storages[index] for index in trace.live_at(end)]
    sums = {kind: sum(one.size for one in left if one.category == kind) for kind in KINDS}
    return {**sums, "gradients": most["gradients"]}


SUMMED = ("by_hand", "norm", "largest")


def is_planned_larger(combination: Combination) -> bool:
    """Return whether a plan may be larger.

    The tokens of two passes over a sparse table are taken to differ. A temporary that is an argument of a function
    which torch wrote in Python (`gaussian_nll_loss(x, y, z.exp())`) lives as long as the call. The places of a
    sparse gradient that torch 2.15 scales with others are made anew where nothing sees it.
    """
    is_asked = combination.get("network") == "encoder" and combination.get("afterwards") in ASKED
    is_sparse = combination.get("network") == "looked_up"
    is_summed = combination.get("trick") in PASSES or combination.get("clip") in SUMMED
    return is_asked or (is_sparse and is_summed) or combination.get("loss") == "gaussian"


def is_as_planned(kind: str, expected: int, planned: int, combination: Combination) -> bool:
    """Return whether a kind of tensor takes as much on a card as its tensors do on a CPU."""
    optimizer = combination.get("optimizer")
    if kind == "optimizer state":  # numbers that are made on the card, or loaded elsewhere
        expected -= 4 * NUMBERS if optimizer in GROWING else 0
        most = float("inf") if optimizer in GROWING else expected + 16 * NUMBERS
    elif kind == "parameters" and combination.get("network") == "old_weight_norm":
        most = 2 * expected  # a weight that a checkpoint computed again keeps what it was made of
    elif kind == "gradients" and optimizer == "in_backward":  # none is left for the next weight
        return planned > 0
    elif kind == "gradients" and combination.get("trick") in (*REPLACING, *PASSES):  # two
        most = 2 * expected
    elif kind == "gradients" and optimizer in GROWING:  # whose closure may freeze others
        most = float("inf")
    else:
        most = expected
    return expected <= planned <= most


def restore() -> None:
    """Take back what a script sets for its process."""
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.clear_autocast_cache()


def differences(combination: Combination) -> dict[str, Any]:
    """Return what is different between a combination's plans and its real steps, by name."""
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            on_cpu = dict(combination)
            if combination.get("optimizer") == "capturable":  # which is for cards alone
                on_cpu["optimizer"] = "adamw_fused"
            expected = run_really(on_cpu)
        except Exception as error:
            return {"raises": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        finally:
            restore()
        try:
            given = {**on_cpu, "device": "cpu"}
            try:
                real = moments(trace_on_cpu(SOURCE, given, is_fake=False))
            except Exception as error:
                found["unmeasured"] = why(error)
                raise
            fake = moments(trace_on_cpu(SOURCE, given, is_fake=True))
            if combination.get("optimizer") in GROWING:
                most, planned = (max(one[2] for one in each) for each in (real, fake))
                if planned < 0.99 * most:
                    found["cpu"] = most, planned
            elif is_planned_larger(combination):
                if any(one > another for one, another in zip(real, fake, strict=True)):
                    found["cpu"] = real, fake
            elif real != fake:
                found["cpu"] = [pair for pair in zip(real, fake) if pair[0] != pair[1]][:4] or [
                    len(real),
                    len(fake),
                ]
        except Exception as error:
            if "unmeasured" not in found:
                found["cpu refused"] = why(error)
        finally:
            restore()
        try:
            trace = trace_own(SOURCE, combination, GPU, None, Changes()).fake.trace
            planned = held(trace)
            different = {
                kind: (most, planned[kind])
                for kind, most in expected.items()
                if not is_as_planned(kind, most, planned[kind], combination)
            }
            if different:
                found["gpu"] = different
        except Exception as error:
            found["gpu refused"] = why(error)
        finally:
            restore()
    return found


def why(error: Exception) -> str:
    """Return an error, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "crossed" in frame.filename and frame.name != "differences"]
    place = own[-1] if own else frames[-1]
    last = frames[-1]
    lines = f"{Path(place.filename).name}:{place.lineno} {Path(last.filename).name}:{last.lineno}"
    return f"{type(error).__name__}: {error} ({lines})"[:600]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # the first one of a process holds a little more, in oneDNN
    trace_on_cpu(SOURCE, {"network": "lstm", "device": "cpu"}, is_fake=False)
    for line in sys.stdin:
        print(json.dumps(differences(json.loads(line))), flush=True)
