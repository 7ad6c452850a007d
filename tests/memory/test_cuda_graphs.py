"""`memory.cuda_graphs` without a card and on a real one; tests/cuda_rehearsal/test_graphs.py has a pretend one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mpt.engine.building.build import build_run
from mpt.errors import ConfigError
from mpt.memory.capturing.rates import Rates, why_not
from mpt.seams import Run
from tests.engine import parts
from tests.memory import mechanism

pytestmark = pytest.mark.tier("fast")


def test_on_a_cpu_nothing_is_done_and_it_is_said() -> None:
    run = parts.classifier(memory={"cuda_graphs": True})
    assert run.notes == ["memory.cuda_graphs: cpu has no CUDA graphs; nothing is done"]
    assert not run.tricks[0].has_graphs


def test_rates_are_tensors_inside_the_block_and_numbers_outside() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=0.5)
    rates = Rates(optimizer, torch.device("cpu"))
    rates.write()
    (group,) = optimizer.param_groups
    with rates.in_place():
        assert isinstance(group["lr"], torch.Tensor)
        assert (float(group["lr"]), group["capturable"]) == (0.5, True)
    assert (group["lr"], group["capturable"]) == (0.5, False)
    assert not rates.is_stale
    optimizer.load_state_dict(optimizer.state_dict())
    assert rates.is_stale


def test_sgd_takes_the_kernel_that_reads_the_rate_whatever_was_asked() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5, foreach=True)
    rates = Rates(optimizer, torch.device("cpu"))
    (group,) = optimizer.param_groups
    with rates.in_place():
        assert (group["fused"], group["foreach"]) == (True, False)
    assert (group["fused"], group["foreach"]) == (None, True)


def test_counts_that_an_update_adds_to_groups_are_added_by_a_repetition() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["iterations"] = 3
    rates = Rates(optimizer, torch.device("cpu"))
    before = rates.counts()
    optimizer.param_groups[0]["iterations"] = 5
    rates.learn(before)
    rates.count()
    assert optimizer.param_groups[0]["iterations"] == 7


def test_an_optimizer_of_the_hosts_numbers_is_named() -> None:
    weight = [torch.nn.Parameter(torch.ones(2, 2))]
    assert why_not(torch.optim.RMSprop(weight)) == ""
    assert why_not(torch.optim.LBFGS(weight)) == "LBFGS computes its steps from numbers of the host"


def test_conflicts_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be combined with recompute: .*leave one of the two out"
    ):
        parts.classifier(memory={"cuda_graphs": True, "recompute": "sqrt"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", [parts.classifier, parts.gan])
@pytest.mark.parametrize("mode", ["fp32", "amp"])
def test_recorded_updates_train_the_weights_of_the_same_updates_operator_by_operator(
    make: Callable[..., Run], mode: str
) -> None:
    device = torch.device("cuda")
    batches = [
        {name: value.to(device) for name, value in parts.batch(seed).items()} for seed in range(12)
    ]
    states = []
    for value in (True, {"warmup": 100}):
        run = build_run(
            make(memory={"cuda_graphs": value}, precision=mode).config, device, parts.DIGITS
        )
        mechanism.train(run, batches)
        states.append(mechanism.state(run))
        assert bool(run.tricks[0].news) == (value is True)  # what was recorded is said
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        # cuDNN may choose other kernels
        torch.testing.assert_close(tensor, states[1][name], rtol=1e-4, atol=1e-5)
