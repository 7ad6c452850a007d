"""The pretend device answers as CUDA does: what it computes, what it refuses, what it counts."""

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mpt.precision.shared.rounding import round_at_random
from tests.cuda_rehearsal.torch_cuda import installed


def test_tensors_say_cuda_and_compute() -> None:
    weight = torch.randn(4, 4, device="cuda", requires_grad=True)
    (weight @ weight).relu().sum().backward()
    assert weight.is_cuda
    assert str(weight.device) == "cuda:0"
    assert weight.grad is not None
    assert weight.grad.is_cuda
    expected = weight.detach().cpu().requires_grad_()
    (expected @ expected).relu().sum().backward()
    assert torch.equal(weight.grad.cpu(), expected.grad)


def test_zeros_that_autograd_writes_nowhere_are_zeros() -> None:
    for dtype in (torch.float32, torch.float16):
        values = torch.tensor([1.0, -2.0], device="cuda", dtype=dtype, requires_grad=True)
        (gradient,) = torch.autograd.grad(values.sgn().sum(), values)
        assert gradient.is_cuda
        assert (gradient + values).tolist() == [1, -2]


def test_views_share_memory_and_results_written_in_place_are_seen() -> None:
    whole = torch.zeros(2, 8, device="cuda")
    whole.view(16)[3:5].fill_(1)
    whole.t()[0].add_(2)
    assert whole.sum().item() == 2 + 4
    grown = torch.empty(0, device="cuda")
    torch.add(whole, 1, out=grown)
    assert grown.shape == (2, 8)
    assert grown.is_cuda
    assert torch.empty(0, device="cuda").resize_(5).fill_(1).sum().item() == 5


def test_deep_copies_and_saved_tensors_stay_on_the_device(tmp_path: Path) -> None:
    module = copy.deepcopy(nn.Linear(2, 2).cuda())
    assert module.weight.is_cuda
    torch.save(module.state_dict(), tmp_path / "weights")
    assert torch.load(tmp_path / "weights", weights_only=True)["weight"].is_cuda


def test_what_cuda_refuses_is_refused() -> None:
    there, here = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        there.numpy()
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        np.asarray(there)
    with pytest.raises(TypeError, match="a bytes-like object is required"):
        memoryview(there)  # type: ignore[arg-type]
    for mixed in (
        *(
            lambda: there + here,
            lambda: here + there,
            lambda: here + there.sum(),
            lambda: there @ here,
        ),
        *(
            lambda: torch.cat([there, here]),
            lambda: torch.where(there > 0, there, here),
            lambda: there.add_(here),
        ),
        *(lambda: nn.functional.mse_loss(there, here), lambda: nn.Linear(4, 4)(there)),
    ):
        with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cpu"):
            mixed()
    on_host = torch.zeros(1, 4, dtype=torch.long)
    for indexed in (lambda: there.gather(0, on_host), lambda: there.scatter(0, on_host, 1.0)):
        with pytest.raises(RuntimeError, match="two devices"):
            indexed()
    with pytest.raises(RuntimeError, match="two devices"):
        nn.functional.embedding(on_host[0], there)
    with pytest.raises(RuntimeError, match="two devices"):
        here[torch.tensor([0, 1], device="cuda")]
    with pytest.raises(RuntimeError, match="cannot pin"):
        there.pin_memory()
    with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
        torch.randn(2, device="cuda", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:1")
    assert (there + torch.tensor(1.0)).is_cuda  # numbers may stay on the host
    assert there[torch.tensor([0, 2])].shape == (2, 4)  # and so may indices


@pytest.mark.cards("rtx3060", "rtx3060")
def test_two_cards_do_not_mix_and_have_contexts_of_their_own() -> None:
    torch.cuda.set_device(1)
    one = torch.ones(2, device="cuda")
    assert str(one.device) == "cuda:1"
    assert installed().contexts() == [1]
    zero = torch.ones(2, device="cuda:0")
    assert installed().contexts() == [0, 1]
    with pytest.raises(RuntimeError, match="cuda:1 and cuda:0"):
        one + zero
    assert torch.equal(zero.to("cuda:1"), one)


def test_autocast_takes_cudas_lists_and_float16() -> None:
    weight = torch.ones(1, 1, 3, 3, device="cuda")
    with torch.autocast("cuda"):
        assert (
            nn.functional.conv2d(torch.ones(1, 1, 4, 4, device="cuda"), weight).dtype
            == torch.float16
        )
        assert torch.ones(2, 2, device="cuda").half().softmax(-1).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(
                torch.rand(2, device="cuda"), torch.rand(2, device="cuda")
            )


def test_a_scaler_skips_an_overflow() -> None:
    weight = nn.Parameter(torch.ones(2, device="cuda"))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cuda")
    scaler.scale((weight * torch.tensor([1.0, float("inf")], device="cuda")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1, 1]
    assert scaler.get_scale() == 2.0**15


def test_bfloat16_gradients_have_no_unscaling_kernel() -> None:
    gradient = torch.ones(2, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
        torch._amp_foreach_non_finite_check_and_unscale_(
            [gradient], torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
        )


def test_random_numbers_have_a_state_of_their_own() -> None:
    torch.manual_seed(3)
    on_host, on_device = torch.randn(4), torch.randn(4, device="cuda")
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device="cuda"), on_device)
    assert torch.equal(torch.randn(4), on_host)
    assert not torch.equal(on_device.cpu(), on_host)
    state = torch.cuda.get_rng_state()
    assert state.shape == (16,)
    assert not state.is_cuda
    masks = [nn.functional.dropout(torch.ones(64, device="cuda")) for _ in range(2)]
    assert not torch.equal(*masks)
    host_state = torch.get_rng_state()
    torch.cuda.set_rng_state(state)
    assert torch.equal(nn.functional.dropout(torch.ones(64, device="cuda")), masks[0])
    assert torch.equal(torch.get_rng_state(), host_state)


def test_every_wait_of_the_host_is_recorded_with_its_line() -> None:
    values = torch.ones(3, device="cuda")
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned()
    with installed().notes.listen() as waits:
        values.sum().item()
        bool(values[0] > 0)
        values[values > 0]
        torch.nonzero(values)
        values.cpu()
        torch.tensor([1.0], device="cuda")
        torch.cuda.synchronize()
        torch.cuda.current_stream().synchronize()
    assert len(waits) == 8
    assert all("test_device.py" in wait.line for wait in waits)
    assert "item()" in str(waits[0])
    assert len({wait.line for wait in waits}) == 8
    with installed().notes.listen() as waits:
        values.mul_(2).add_(values.mean())
        pinned.to("cuda", non_blocking=True)
        values[values > 0] = 1.0
        values.to("cpu", non_blocking=True)  # torch makes the target in pinned memory
        torch.full((3,), 2.0, device="cuda")
    assert not waits


def test_streams_and_events_are_there_and_counted() -> None:
    extension = installed().extension
    stream, event = torch.cuda.Stream(torch.device("cuda", 0)), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        values = torch.ones(4, device="cuda")
        event.record()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.current_stream().wait_event(event)
    stream.wait_stream(torch.cuda.current_stream())
    values.record_stream(torch.cuda.current_stream())
    assert event.query()
    assert extension.count_of("stream") == 1
    assert extension.count_of("record_stream") == 1
    assert extension.count_of("stream waits for an event") == 2


def card(
    name: str, full_name: str, capability: tuple[int, int], gibibytes: int, bf16: bool
) -> object:
    """Return what torch says of a card, on a machine that has it."""
    return pytest.param(
        full_name, capability, gibibytes, bf16, marks=pytest.mark.cards(name), id=name
    )


@pytest.mark.parametrize(
    ("name", "capability", "gibibytes", "computes_bfloat16"),
    [
        card("gtx1660", "NVIDIA GeForce GTX 1660", (7, 5), 6, bf16=False),
        card("rtx2060", "NVIDIA GeForce RTX 2060", (7, 5), 6, bf16=False),
        card("rtx3060", "NVIDIA GeForce RTX 3060", (8, 6), 12, bf16=True),
        card("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 24, bf16=True),
        card("h100", "NVIDIA H100 80GB HBM3", (9, 0), 80, bf16=True),
    ],
)
def test_a_card_is_what_the_test_chose(
    name: str, capability: tuple[int, int], gibibytes: int, computes_bfloat16: bool
) -> None:
    assert torch.cuda.get_device_name() == name
    assert torch.cuda.get_device_capability() == capability
    assert (
        torch.cuda.mem_get_info()[1]
        == torch.cuda.get_device_properties().total_memory
        == gibibytes * 2**30
    )
    assert torch.cuda.is_bf16_supported(including_emulation=False) == computes_bfloat16


def test_a_nan_that_is_computed_has_the_bits_of_cuda() -> None:
    zero = torch.zeros(4, device="cuda")
    bits = {torch.float32: (torch.int32, 0x7FFFFFFF), torch.float16: (torch.int16, 0x7FFF)}
    bits[torch.bfloat16] = bits[torch.float16]
    for dtype, (integer, expected) in bits.items():
        numbers = zero.to(dtype)
        assert (numbers / numbers).view(integer).tolist() == [expected] * 4
        numbers[::2].div_(0)  # in place, and strided
        assert numbers.view(integer).tolist() == [expected, 0] * 2
    assert (zero.log() - zero.log()).bfloat16().view(torch.int16).tolist() == [0x7FFF] * 4


def test_stochastic_rounding_keeps_a_nan_of_cuda() -> None:
    numbers = torch.full((4096,), torch.nan, device="cuda")
    assert numbers.mul_(1).view(torch.int32).unique().tolist() == [0x7FFFFFFF]
    halves = torch.arange(4096, dtype=torch.int32, device="cuda") * 0x7FEB352D
    assert round_at_random(numbers, halves).isnan().all()


@pytest.mark.cards("gtx1660")
def test_a_gtx_1660_computes_nan_in_half() -> None:
    image, weight = (
        torch.ones(1, 1, 4, 4, device="cuda").half(),
        torch.ones(1, 1, 3, 3, device="cuda").half(),
    )
    assert nn.functional.conv2d(image, weight).isnan().all().item()
    assert nn.functional.conv2d(image.float(), weight.float()).isfinite().all().item()


def test_a_forked_process_may_not_use_a_device_that_was_used_before() -> None:
    torch.ones(1, device="cuda")
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            torch.ones(1, device="cuda")
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    assert b"Cannot re-initialize CUDA in forked subprocess" in os.read(reader, 1000)


def test_an_operator_fails_once_when_a_test_says_so() -> None:
    values = torch.ones(4, 4, device="cuda")
    installed().fail_once("aten::mm", calls_before=1)
    values @ values
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        values @ values
    values @ values


@pytest.mark.here
def test_the_device_does_not_leave_its_processes() -> None:
    assert not torch.cuda.is_available()


@pytest.mark.here
def test_a_torch_with_cuda_of_its_own_is_no_place_for_a_pretended_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.cuda_rehearsal import build

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(build.HasCuda, match="need torch's CPU build"):
        build.check()


@pytest.mark.here
def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cuda_rehearsal import build

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.CannotBuild, match=r"needs a C\+\+ compiler"):
        build.check()


@pytest.mark.here
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--card", "rtx3O60"], "--card: there is no 'rtx3o60'"),
        (["--memory", "6Gi8"], "--memory: '6Gi8' is not"),
    ],
)
def test_a_card_or_a_size_that_is_none_is_refused_in_a_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.cuda_rehearsal.__main__ import main

    monkeypatch.setattr("sys.argv", ["tests.cuda_rehearsal", *words, "--", "true"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert said.lower() in capsys.readouterr().err.lower()
