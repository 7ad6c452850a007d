"""What a compiled network holds is planned: what fusion never writes is left out, and real compiled steps agree."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mpt.planner.client.session import Session
from mpt.planner.step.compiled import GraphRun, find_fused
from mpt.planner.trace.allocator import MIB
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.unseen import Unseen
from tests.planner.configs import UNET, make
from tests.programs import run_program


def test_only_what_elementwise_operators_and_reductions_read_is_fused_away() -> None:
    def network(tensor: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = torch.sin(tensor) * 2
        return torch.mm(torch.exp(scaled).sum(1, keepdim=True) + scaled, weight), torch.cos(weight)

    graph = make_fx(network)(torch.ones(4, 4), torch.ones(4, 4))
    names = {node.name for node in find_fused(list(graph.graph.nodes))}
    # not sum, a reduction; not add, read by mm; not cos, which leaves the graph
    assert names == {"sin", "mul", "exp"}


def test_what_decompositions_make_of_a_softmax_is_fused_away_too() -> None:
    def backward(gradient: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        product = gradient * weights
        summed = product.sum(-1, keepdim=True)
        return torch.mm(
            torch.ops.prims.fma.default(-weights, summed.expand(4, 4), product), weights
        )

    graph = make_fx(backward)(torch.ones(4, 4), torch.ones(4, 4))
    assert {node.name for node in find_fused(list(graph.graph.nodes))} >= {"mul", "neg"}


def test_nothing_is_written_over_what_a_scatter_wrote_into() -> None:
    def backward(
        index: torch.Tensor, gradient: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scattered = torch.zeros(4, 4).scatter_add(1, index, gradient).view(2, 8)
        return torch.where(mask, scattered, 0), torch.mm(gradient, gradient).cos()

    given = (
        torch.zeros(4, 4, dtype=torch.int64),
        torch.ones(4, 4),
        torch.ones(2, 8, dtype=torch.bool),
    )
    graph = make_fx(backward, tracing_mode="fake")(*given)
    names = {node.name for node in GraphRun(graph, Recorder("cpu"), fuses=True).in_place}
    # not where: torch's scheduler leaves buffers that were changed alone
    assert names == {"scatter_add", "cos"}


@pytest.mark.parametrize(("fuses", "scratch"), [(True, []), (False, [64 * 128 * 128 * 4])])
def test_a_compilers_own_kernels_take_no_scratch(fuses: bool, scratch: list[int]) -> None:
    rows = torch.ones(4096, 128)
    graph = make_fx(lambda given: given.sum(0), tracing_mode="fake")(rows)
    recorder = Recorder("cpu", Unseen((8, 6), multiprocessors=28))
    with recorder.recording() as trace:
        GraphRun(graph, recorder, fuses)([rows])
    found = [one.size for one in trace.storages if one.category == "workspace"]
    assert found == scratch
    assert not recorder.in_written_kernels


@pytest.mark.slow
def test_a_compiled_plan_holds_less_and_says_how_it_was_made(session: Session) -> None:
    settings = ({}, {"compile": True}, {"compile": "reduce-overhead"})
    plans = session.plan([make(UNET, "fp32", 16, **one) for one in settings])
    eager, compiled, recorded = plans
    kept = [plan.get().by_category["activations"] for plan in (eager, compiled)]
    # 2.11 keeps two quotients more
    assert kept[1] < (0.9 if torch.__version__ >= "2.13" else 0.98) * kept[0]
    assert compiled.get().allocated < eager.get().allocated
    notes = [note for note in compiled.get().notes if "memory.compile" in note]
    assert len(notes) == 1
    assert "AOTAutograd" in notes[0]
    assert compiled.get().allocated < recorded.get().allocated  # each graph copies what it is given
    # and shares no block with the rest
    assert compiled.get().reserved + MIB < recorded.get().reserved
    assert any("pool of their own" in note for note in recorded.get().notes)
    # graphs are launched as one
    paced = [any("the pace of the step" in note for note in plan.get().notes) for plan in plans]
    assert paced[0]
    assert not paced[2]


@pytest.mark.slow
def test_compiled_plans_agree_with_a_few_real_compiled_steps() -> None:
    lines = run_program("tests.planner.compiled_against_real", "few")
    errors = [float(line.split("|")[-2].strip(" %")) for line in lines if "aot_eager" in line]
    assert len(errors) == 2
    assert max(map(abs, errors)) < 1.5
