"""O1 where casts meet torch's own machinery: checkpointing, custom functions, reparametrisation, mixed dtypes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from mpt.precision import o1
from mpt.vision_ops import import_torchvision

half, single = torch.float16, torch.float32


def random(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Mixed(nn.Module):
    """A half product, a float32 function, a half product: recomputed without casts, its dtypes would be others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.softmax(self.first(x).relu(), -1).float().exp())


def gradients_of(module: nn.Module, x: Tensor, run: Any) -> list[Tensor]:
    module.zero_grad()
    x.grad = None
    run().float().square().sum().backward()
    return [p.grad.clone() for p in (*module.parameters(), x) if p.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "inside", [False, True], ids=["backward after the block", "backward in the block"]
)
def test_a_checkpoint_that_knows_nothing_of_the_casts_recomputes_in_them(
    reentrant: bool, inside: bool
) -> None:
    torch.manual_seed(0)
    module, x = Mixed(), random(5, 4).requires_grad_()

    def run(checkpointed: bool) -> list[Tensor]:
        module.zero_grad()
        x.grad = None
        with o1.casts(half):
            out = checkpoint(module, x, use_reentrant=reentrant) if checkpointed else module(x)
            assert out.dtype == half
            loss = out.float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [p.grad.clone() for p in (*module.parameters(), x)]  # type: ignore[union-attr]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_a_suspended_region_recomputes_in_float32(reentrant: bool) -> None:
    module, x = Mixed(), random(5, 4).requires_grad_()
    seen: list[torch.dtype] = []
    module.first.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    with o1.casts(half):
        with o1.suspended():
            loss = checkpoint(module, x, use_reentrant=reentrant).sum()
        loss.backward()
    assert seen == [single, single]


def test_nothing_of_torch_stays_changed_after_the_block() -> None:
    import torch.utils.checkpoint as checkpointing
    from torch.autograd.function import BackwardCFunction

    def state() -> list[Any]:
        return [
            getattr(checkpointing, "_checkpoint_without_reentrant_generator_impl", None),
            checkpointing._checkpoint_without_reentrant_generator,
            BackwardCFunction.__dict__.get("__init__"),
            nn.RNNBase.check_input,
            torch.jit.RecursiveScriptModule.__dict__.get("__call__"),
        ]

    before = state()
    with pytest.raises(ZeroDivisionError), o1.casts(half):
        raise ZeroDivisionError
    assert state() == before


@pytest.mark.parametrize("name", ["densenet", "timm"])
def test_published_networks_with_their_own_checkpointing_train(name: str) -> None:
    import_torchvision()
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    net: Any
    if name == "timm":
        net = timm.create_model(
            "vit_tiny_patch16_224", img_size=16, patch_size=8, depth=2, embed_dim=12, num_heads=2
        )
        net.set_grad_checkpointing(True)
    else:
        densenet = pytest.importorskip("torchvision.models.densenet")
        net = densenet.DenseNet(4, (2,), 4, memory_efficient=True, num_classes=3)
    x = random(2, 3, 16, 16).requires_grad_()
    with o1.casts(torch.bfloat16):
        out = net(x)
    out.float().square().sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in net.parameters() if p.requires_grad
    )


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class AmpProduct(Product):
    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))


@pytest.mark.parametrize("function", [Product, AmpProduct])
def test_a_function_with_its_own_backward_multiplies_in_half_both_ways(function: Any) -> None:
    apply = function.apply  # bound before the block, as modules do at import
    weight, x = random(4, 3).requires_grad_(), random(2, 4).requires_grad_()
    with o1.casts(half):
        out = apply(x, weight)
        assert out.dtype == half
        loss = out.float().square().sum()
    loss.backward()
    assert weight.grad is not None
    assert x.grad is not None
    assert weight.grad.dtype == x.grad.dtype == single
    got = weight.grad.clone(), x.grad.clone()
    weight.grad = x.grad = None
    with o1.casts(half):
        loss = (x @ weight).float().square().sum()
    loss.backward()
    assert torch.equal(got[0], weight.grad)
    assert torch.equal(got[1], x.grad)


def test_a_function_called_outside_the_casts_stays_outside_in_its_backward() -> None:
    weight, x = random(4, 3).requires_grad_(), random(2, 4).requires_grad_()
    loss = Product.apply(x, weight).square().sum()
    with o1.casts(half):
        loss.backward()
    got = weight.grad
    weight.grad = None
    (x @ weight).square().sum().backward()
    assert torch.equal(got, weight.grad)


@pytest.mark.parametrize("training", [True, False])
def test_spectral_norm_as_a_parametrisation_runs(training: bool) -> None:
    layer = parametrizations.spectral_norm(nn.Linear(4, 3)).train(training)
    with o1.casts(half):
        out = layer(random(2, 4))
    assert out.dtype == half
    out.float().sum().backward()
    assert layer.parametrizations.weight.original.grad.isfinite().all()


def test_products_on_mixed_dtypes_run_where_apex_would_crash_and_follow_their_input_where_it_would_not() -> (
    None
):
    x, h = random(2, 3, 4), random(2, 3, 4).half()
    attention = functional.scaled_dot_product_attention
    with o1.casts(half):
        assert torch.einsum("bij,bkj->bik", x, h).dtype == half
        assert torch.einsum("bij,bkj->bik", x, x).dtype == single
        assert torch.einsum("bij,bkj->bik", [h, h]).dtype == half
        assert attention(x, h, h).dtype == half
        assert attention(x, x, x).dtype == single
        assert attention(h, h, h, attn_mask=torch.zeros(3, 3)).dtype == half
        assert torch.tensordot(x, h, dims=([2], [2])).dtype == single
        assert torch.inner(x, h).dtype == single
        assert torch.vdot(x[0, 0], h[0, 0]).dtype == single
        assert torch.linalg.vecdot(x, h).dtype == half
        assert torch.linalg.multi_dot([x[0], h[0].t()]).dtype == half
        assert (
            x.new_zeros(2, 3, 4).scatter_add(0, torch.zeros(1, 3, 4, dtype=torch.long), h[:1]).dtype
            == single
        )


@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.inv,
        torch.linalg.det,
        torch.linalg.svd,
        torch.linalg.eigh,
        torch.linalg.qr,
        torch.linalg.pinv,
        torch.linalg.matrix_exp,
        torch.inverse,
        torch.fft.fft,
        torch.fft.rfft2,
        lambda h: torch.cdist(h, h),
        lambda h: torch.linalg.solve(h, h),
        lambda h: functional.pdist(h),
        lambda h: h.det(),
        lambda h: h.inverse(),
        lambda h: torch.stft(h[0].repeat(4), 4, window=torch.ones(4), return_complex=True),
    ],
)
def test_functions_without_a_half_kernel_run_in_float32(function: Any) -> None:
    matrix = (random(4, 4) + torch.eye(4) * 4).half()
    matrix = (matrix + matrix.t()) / 2
    with o1.casts(half):
        result = function(matrix)
    for tensor in [result] if isinstance(result, Tensor) else result:
        assert tensor.dtype in (single, torch.complex64)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_take_half_input_by_keyword(kind: Any) -> None:
    layer, x = kind(3, 2), random(4, 2, 3).half()
    with o1.casts(half):
        assert layer(input=x)[0].dtype == half
        assert layer(input=pack_sequence([x[:, 0], x[:2, 1]]))[0].data.dtype == half


def test_a_module_compiled_to_torchscript_says_that_the_casts_do_not_reach_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(4, 3))
    with o1.casts(half), pytest.warns(UserWarning, match="TorchScript.*float32"):
        assert scripted(random(2, 4)).dtype == single
    assert scripted(random(2, 4)).dtype == single  # and outside nothing is said


def test_a_copy_to_the_host_is_float32_as_in_apex() -> None:
    with o1.casts(half):
        assert random(2).half().cpu().dtype == single
