"""What stands in for `torch.cuda` while a step of somebody else is planned."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import trace_rules
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer
from torch.utils import _foreach_utils

from mpt.planner.device.cuda_stand_in import cuda_stands_in
from mpt.planner.facts.gpus import find_gpu


def test_the_compiler_s_table_of_functions_can_be_made_meanwhile() -> None:
    """peft and diffusers import what makes it; a function under two names was refused there as a duplicate."""
    with cuda_stands_in(find_gpu("rtx3060"), torch.device("cpu")):
        assert trace_rules.get_torch_obj_rule_map.__wrapped__()


@pytest.mark.parametrize("number", [((), {"index": 0}), ((0,), {}), ((), {})])
def test_a_card_by_its_number_is_the_device_in_its_place(
    number: tuple[tuple[int, ...], dict[str, int]],
) -> None:
    place, named = number
    with cuda_stands_in(find_gpu("rtx3060"), torch.device("meta")):
        assert torch.device("cuda", *place, **named).type == "meta"
        assert torch.device("cpu", *place, **named).type == "cpu"


def test_a_script_can_limit_watch_and_record_the_card_s_memory() -> None:
    """Each of these ended a plan."""
    with cuda_stands_in(find_gpu("rtx3060"), torch.device("meta")):
        torch.cuda.set_per_process_memory_fraction(0.9)
        torch.cuda.memory._record_memory_history(max_entries=10)
        torch.cuda.memory._dump_snapshot("memory.pickle")
        torch.cuda.reset_max_memory_allocated()
        torch.cuda.memory.reset_accumulated_memory_stats()
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        assert torch.cuda.memory.mem_get_info() == torch.cuda.mem_get_info()
        assert torch.cuda.utilization() == torch.cuda.memory_usage() == 0
        torch.cuda.profiler.start()
        with torch.cuda.device_of(torch.empty(2, device="cuda")):
            torch.cuda.set_stream(torch.cuda.Stream())
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):
        torch.cuda.set_per_process_memory_fraction(0.9)


def test_optimizers_and_clipping_take_the_path_that_they_take_on_a_card() -> None:
    """They look at the types of tensors, and held temporaries of all weights that a plan did not see."""
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(3, device="cuda"))
    with cuda_stands_in(find_gpu("rtx3060"), torch.device("cpu")):
        assert optimizer._default_to_fused_or_foreach([weight], differentiable=False) == (
            False,
            True,
        )
        assert _foreach_utils._has_foreach_support([weight], weight.device)
    assert optimizer._default_to_fused_or_foreach([weight], differentiable=False) == (False, False)


def test_an_optimizer_steps_on_the_cpu_in_a_build_for_cuda_without_a_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's check of recorded graphs asks for the accelerator's stream, which needs a driver."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: cuda)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with cuda_stands_in(find_gpu("rtx3060"), torch.device("cpu")):
        torch.optim.AdamW([weight]).step()
    assert (weight < 1).all()


def test_a_script_sees_the_card_inside_a_block_that_makes_tensors_there() -> None:
    """Lightning's layers for bitsandbytes ask so, and refused a device of another name."""
    with cuda_stands_in(find_gpu("rtx3060"), torch.device("cpu")), torch.device("cuda"):
        assert torch.device("cuda").type == torch.zeros(1).device.type == "cuda"
