"""The checks of a card see the faults that they are for; all of them run in the slow rehearsal of the GPU check."""

import pytest
import torch

import mpt.engine.step.step
from mpt.doctor.card import agreement, updates

CARD = torch.device("cuda", 0)


def test_losses_on_the_card_are_the_cpus_and_a_wrong_kernel_is_named() -> None:
    assert "wrong" not in agreement.compare_losses("vae", CARD)
    linear = torch.nn.functional.linear

    def off(inputs: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        found = linear(inputs, *rest)
        return found * 1.05 if found.is_cuda else found

    torch.nn.functional.linear = off
    found = agreement.compare_losses("vae", CARD)
    torch.nn.functional.linear = linear
    assert "fp32: " in found["wrong"]


def test_a_gradient_of_nan_is_skipped_or_shows_and_one_that_is_lost_is_named() -> None:
    found = updates.poison(CARD)
    assert "skipped in amp, O1, O2" in found["said"]
    assert "wrong" not in found
    update = mpt.engine.step.step.update

    def losing(run, phase, batch):  # type: ignore[no-untyped-def]
        done = update(run, phase, batch)
        for weight in phase.module.parameters():
            weight.data.nan_to_num_(0.0)
        return done

    updates.update = losing
    assert "fp32: a gradient of NaN left finite weights" in updates.poison(CARD)["wrong"]
    updates.update = update


def test_a_wait_in_a_step_is_named_with_its_line() -> None:
    found = updates.find_waits("vae", CARD)
    assert found == {"said": found["said"]}
    assert "questions.py" in found["said"]
    follow_step = updates.follow_step

    def asking(built, step):  # type: ignore[no-untyped-def]
        follow_step(built, step)
        float(next(built.phases[0].module.parameters()).detach().sum())

    updates.follow_step = asking
    assert "a step waits at test_card_checks.py:" in updates.find_waits("vae", CARD)["wrong"]


def test_twenty_steps_of_offloading_do_not_grow() -> None:
    found = updates.offload_for_long(CARD, small=True)
    assert "reserved memory grew by 0.0% in 20 steps" in found["said"]


@pytest.mark.parametrize("draw", ["randn", "rand", "dropout", "normal_"])
def test_draws_for_a_card_are_those_for_the_cpu(draw: str) -> None:
    def drawn(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        with agreement.DrawnOnHost():
            if draw == "dropout":
                return torch.nn.functional.dropout(torch.ones(50, device=device), 0.4)
            if draw == "normal_":
                return torch.empty(50, device=device).normal_()
            return getattr(torch, draw)(50, device=device)

    on_card = drawn("cuda")
    assert on_card.is_cuda
    assert torch.equal(on_card.cpu(), drawn("cpu"))
