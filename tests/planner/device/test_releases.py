"""Plans as earlier releases of torch would: each route's bytes by hand, and the answer that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mpt.config.load import load_config
from mpt.errors import ConfigError
from mpt.planner.answers.plan import AsTorch
from mpt.planner.client.session import Session
from mpt.planner.device import releases
from mpt.planner.device.release_routes import composite_rms_norm, early_softmax, plain_attention

ROWS = 256 * 16 * 16 * 4
"""Bytes of what goes through eight operators of `ByRelease`, in float32."""
WEIGHTS = 11_264
"""Bytes of its parameters, each in blocks of 512."""
WIDE = 2**20
LOGSUMEXP = 256 * 32 * 4 + 2 * 512
"""What memory-efficient attention keeps beside inputs and output: padded rows, and a seed and an offset."""


def plan(
    session: Session, release: str, of: str = "", mode: str = "fp32", wide: int = 0, **adam: Any
) -> dict[str, Any]:
    if tuple(map(int, release.split("."))) > releases.installed_release():
        pytest.skip(f"torch {release} is newer than the installed one")
    config = load_config(
        {
            "model": {
                "name": "tests.planner.models:ByRelease",
                "image_size": 16,
                "channels": 1,
                "options": {"of": of, "wide": wide},
            },
            "precision": mode,
            "optimizer": {"name": "adam", **adam},
            "train": {"batch_size": 1 if wide else 256},
        },
        allow=["tests"],
    )
    return session.plan([config], torch=release)[0].get()


def grown(session: Session, before: str, since: str, *args: Any, **named: Any) -> int:
    old, new = (plan(session, release, *args, **named) for release in (before, since))
    return int(old.allocated - new.allocated)


@pytest.mark.parametrize(
    ("of", "mode", "before", "since", "expected"),
    [
        ("softmax", "fp32", "1.10", "1.11", 8 * ROWS),  # each one's input
        ("", "fp32", "1.13", "2.0", WEIGHTS),  # gradients, during the forward
        ("attention", "fp32", "1.13", "2.0", 8 * (2 * ROWS - LOGSUMEXP) + WEIGHTS),  # scaled queries and softmax
        ("rms_norm", "fp32", "2.8", "2.9", 8 * ROWS),  # the product with the reciprocal root
        ("rms_norm", "amp", "2.8", "2.12", 8 * ROWS),
        ("rms_norm in half", "amp", "2.8", "2.9", 0),  # composite in both, since the weight is in float32
        # ... and fused in float32 since: then the last result and the head's input are in float32, and a cast is kept.
        ("rms_norm in half", "amp", "2.11", "2.12", 8 * ROWS - 3 * ROWS // 2),
    ],
)
def test_a_release_keeps_what_is_computed_by_hand(
    session: Session, of: str, mode: str, before: str, since: str, expected: int
) -> None:
    assert grown(session, before, since, of, mode) == expected


def test_adam_made_a_second_temporary_and_held_decayed_gradients_before_2_1(session: Session) -> None:
    all_weights = WIDE * 4 + WEIGHTS
    assert grown(session, "2.0", "2.1", wide=WIDE) == all_weights
    assert grown(session, "2.0", "2.1", wide=WIDE, weight_decay=0.1) == 2 * all_weights
    assert grown(session, "2.0", "2.1", wide=WIDE, weight_decay=0.1, decoupled=True) == all_weights
    assert grown(session, "2.0", "2.1", wide=WIDE, amsgrad=True) == all_weights
    assert grown(session, "2.0", "2.1", wide=WIDE, foreach=False) == 0


def test_optimizers_took_a_tensor_at_a_time_before_2_0(session: Session) -> None:
    loop = plan(session, "1.13", wide=WIDE)
    assert loop.by_category["temporaries"] == pytest.approx(2 * 4 * WIDE, abs=2048)  # the root and the divisor
    assert plan(session, "1.13", wide=WIDE, foreach=True).allocated > loop.allocated


def test_an_answer_names_the_routes_that_made_a_difference_and_their_sources(session: Session) -> None:
    found = plan(session, "2.8", "rms_norm").as_torch
    assert found.release == "2.8"
    assert [route.words.split()[0] for route in found.routes] == ["RMSNorm"]
    assert "153666" in found.routes[0].source
    assert plan(session, "2.8.0").as_torch == AsTorch("2.8", [])


def test_what_the_configuration_says_of_gradients_stands(session: Session) -> None:
    config = {
        "model": {"name": "tests.planner.models:ByRelease", "image_size": 16, "channels": 1},
        "memory": {"optimizer_in_backward": True},
        "precision": "fp32",
    }
    found = session.plan([load_config(config, allow=["tests"])], torch="1.13")[0].get()
    assert not any("zero_grad" in route.words for route in found.as_torch.routes)


@pytest.mark.parametrize("text", ["1.9", "1.14", "2.99", "3.0", "newest", "2", "2.8.0.1"])
def test_releases_that_are_not_known_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--torch: .* is no release that can be planned; there are 1\.10 to 1\.13"):
        releases.parse_release(text)


def test_the_documentation_lists_every_route() -> None:
    text = (Path(__file__).parents[3] / "docs" / "plan.md").read_text("utf-8")
    assert [route.name for route in releases.ROUTES if route.words not in text] == []


def saved_by(function: Any, *given: Any) -> list[tuple[torch.dtype, torch.Size]]:
    """Return dtype and shape of what autograd keeps of a call, each storage once."""
    seen: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        seen[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*given)
    return sorted(((tensor.dtype, tensor.shape) for tensor in seen.values()), key=str)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(("half", "half_weight"), [(False, False), (True, False), (True, True)])
def test_the_composite_rms_norm_keeps_what_torchs_own_keeps_on_a_cpu(half: bool, half_weight: bool) -> None:
    tensor = torch.randn(3, 5, 8, dtype=torch.bfloat16 if half else torch.float32, requires_grad=True)
    weight = torch.randn(8, dtype=torch.bfloat16 if half_weight else torch.float32, requires_grad=True)
    given = tensor, [8], weight, None
    assert saved_by(composite_rms_norm, *given) == saved_by(functional.rms_norm, *given)
    assert torch.equal(composite_rms_norm(*given), functional.rms_norm(*given))


def test_early_softmax_and_plain_attention_compute_what_todays_do() -> None:
    scores = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    for operator, today in (("_softmax", torch.softmax), ("_log_softmax", torch.log_softmax)):
        early = early_softmax(getattr(torch.ops.aten, operator).default, scores, -1, False)
        ours, theirs = (torch.autograd.grad(result.square().sum(), scores)[0] for result in (early, today(scores, -1)))
        assert torch.allclose(ours, theirs)
    query, key, value = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    mask = torch.rand(5, 5) > 0.3
    mask.fill_diagonal_(True)
    for named in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.2}):
        expected = functional.scaled_dot_product_attention(query, key, value, **named)
        assert torch.allclose(plain_attention(query, key, value, **named), expected)
    shared = key[:, :2], value[:, :2]
    expected = functional.scaled_dot_product_attention(query, *shared, enable_gqa=True)
    assert torch.allclose(plain_attention(query, *shared, enable_gqa=True), expected)
