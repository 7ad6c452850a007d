"""StyleGAN2: published sizes, and the four measures that keep float16 finite."""

from typing import Any

import pytest
import torch
from torch import nn

from mpt.errors import ConfigError, DataError
from mpt.seams import DataSpec, FieldSpec
from mpt.systems.stylegan2.nn.shared import stylegan2_layers
from mpt.systems.stylegan2.nn.stylegan2 import Discriminator, Generator, Settings, build

SMALL: dict[str, Any] = {
    "image_size": 32,
    "latent_size": 8,
    "style_size": 8,
    "mapping_layers": 2,
    "channel_base": 128,
    "channel_max": 16,
}


def small(**changes: Any) -> tuple[Generator, Discriminator]:
    torch.manual_seed(0)
    settings = Settings.model_validate({**SMALL, **changes})
    return Generator(settings), Discriminator(settings)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("size", "base", "generator", "discriminator"),
    [(1024, 32768, 30_370_060, 29_012_513), (256, 16384, 24_767_458, 24_001_089)],
)
def test_parameter_counts_equal_the_published_ones(
    size: int, base: int, generator: int, discriminator: int
) -> None:
    settings = Settings.model_validate({"image_size": size, "channel_base": base})
    with torch.device("meta"):
        assert count(Generator(settings)) == generator
        assert count(Discriminator(settings)) == discriminator


def test_images_have_the_size_asked_and_unit_order_of_magnitude() -> None:
    generator, discriminator = small()
    image = generator(torch.randn(4, 8))
    assert image.shape == (4, 3, 32, 32)
    assert 0.01 < image.std() < 10
    assert discriminator(image).shape == (4,)


def test_sizes_that_are_not_powers_of_two_are_refused_with_those_that_are() -> None:
    data = DataSpec({"image": FieldSpec((3, 48, 48), torch.float32)}, 10)
    with pytest.raises(
        ConfigError, match="cannot make 48 pixels; it can make 16, 32, 64, 128, 256, 512, 1024"
    ):
        build(Settings.model_validate({"image_size": 48}), data)
    with pytest.raises(DataError, match=r"32x32.*3x48x48"):
        build(Settings.model_validate({"image_size": 32}), data)


def test_style_mixing_changes_layers_from_the_crossover_on() -> None:
    generator, _ = small()
    first, second = torch.randn(2, 8), torch.randn(2, 8)
    mixed = generator.styles(first, second, torch.tensor([3, generator.synthesis.style_count]))
    alone = generator.styles(first)
    assert torch.equal(mixed[0, :3], alone[0, :3])
    assert not torch.equal(mixed[0, 3:], alone[0, 3:])
    assert torch.equal(mixed[1], alone[1])


def test_truncation_to_zero_gives_the_mean_image_and_to_one_changes_nothing() -> None:
    generator, _ = small()
    latent, mean = torch.randn(3, 8), generator.mean_style(64)
    flat = generator(latent, mean_style_d=mean, truncation=0.0)
    assert torch.allclose(flat[0], flat[2], atol=1e-5)
    assert torch.allclose(
        generator(latent, mean_style_d=mean, truncation=1.0), generator(latent), atol=1e-5
    )


def test_noise_acts_only_by_its_strength() -> None:
    generator, _ = small()
    latent = torch.randn(1, 8)
    noise = torch.randn(2, generator.synthesis.noise_size)
    assert torch.equal(generator(latent, noise[:1]), generator(latent, noise[1:]))
    for name, parameter in generator.named_parameters():
        if name.endswith("noise_strength"):
            nn.init.ones_(parameter)
    assert not torch.equal(generator(latent, noise[:1]), generator(latent, noise[1:]))


def dtypes_of_convolutions(module: nn.Module, *inputs: torch.Tensor) -> dict[str, torch.dtype]:
    seen: dict[str, torch.dtype] = {}
    hooks = [
        child.register_forward_hook(
            lambda _, __, output, name=name: seen.__setitem__(name, output.dtype)
        )
        for name, child in module.named_modules()
        if isinstance(
            child,
            stylegan2_layers.StyledConv | stylegan2_layers.EqualConv | stylegan2_layers.EqualLinear,
        )
    ]
    module(*inputs)
    for hook in hooks:
        hook.remove()
    return seen


def test_native_half_runs_the_highest_resolutions_in_half_and_the_rest_in_float32() -> None:
    generator, discriminator = small(num_fp16_res=2)
    assert generator.set_half(torch.bfloat16) == discriminator.set_half(torch.bfloat16) == 2
    seen = dtypes_of_convolutions(generator, torch.randn(2, 8))
    for resolution, block in zip((4, 8, 16, 32), range(4), strict=True):
        wanted = torch.bfloat16 if resolution >= 16 else torch.float32
        assert seen[f"synthesis.blocks.{block}.second"] == wanted
        assert seen[f"synthesis.blocks.{block}.second.affine"] == torch.float32
    assert seen["mapping.layers.0"] == torch.float32
    assert generator(torch.randn(2, 8)).dtype == torch.float32
    seen = dtypes_of_convolutions(discriminator, torch.randn(2, 3, 32, 32))
    assert (
        seen["from_image"] == seen["blocks.0.second"] == seen["blocks.1.second"] == torch.bfloat16
    )
    assert seen["blocks.2.second"] == seen["last"] == seen["score"] == torch.float32


def test_half_of_more_resolutions_than_there_are_spares_the_lowest() -> None:
    generator, _ = small(num_fp16_res=9)
    assert generator.set_half(torch.float16) == 3
    assert generator.synthesis.blocks[0].half_dtype == torch.float32


def test_every_convolution_but_those_around_a_block_is_clamped() -> None:
    """As in stylegan2-ada-pytorch, whose DiscriminatorBlock gives its layer `skip` no conv_clamp."""
    generator, discriminator = small(conv_clamp=0.25)
    image = 100 * torch.randn(2, 3, 32, 32)
    limits: dict[bool, list[float]] = {False: [], True: []}
    for name, child in [*generator.named_modules(), *discriminator.named_modules()]:
        if isinstance(child, stylegan2_layers.StyledConv | stylegan2_layers.EqualConv):
            seen = limits[name.endswith(".skip")]
            child.register_forward_hook(
                lambda _, __, output, seen=seen: seen.append(output.abs().max().item())
            )
    with torch.no_grad():
        for block in discriminator.blocks:
            block.skip.weight.mul_(100)
    generator(torch.randn(2, 8))
    discriminator(image)
    assert max(limits[False]) == 0.25  # reached, never exceeded
    assert len(limits[True]) == 3
    assert min(limits[True]) > 0.25 * 0.5**0.5


def test_demodulation_matches_a_kernel_per_sample() -> None:
    weight, style = torch.randn(5, 4, 3, 3), torch.randn(2, 4)
    per_sample = weight[None] * style[:, None, :, None, None]
    expected = (per_sample.square().sum((2, 3, 4)) + 1e-8).rsqrt()
    assert torch.allclose(stylegan2_layers.demodulate(weight, style), expected, rtol=1e-5)


@pytest.mark.parametrize("doubles", [False, True])
def test_huge_styles_overflow_float16_only_without_the_normalisation(
    doubles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = stylegan2_layers.StyledConv(8, 8, 4, doubles=doubles, clamp=None)
    with torch.no_grad():
        layer.affine.weight.mul_(1e4)
    x, style = torch.randn(2, 8, 8, 8), torch.randn(2, 4)
    exact = layer(x, style, None)
    half = layer(x.half(), style, None)
    assert half.dtype == torch.float16
    # Ten bits of mantissa through 72 products and a filter.
    assert torch.allclose(half.float(), exact, atol=0.02)
    monkeypatch.setattr(stylegan2_layers, "computes_in_float16", lambda x: False)
    assert not torch.allclose(layer(x.half(), style, None).float(), exact, atol=0.02)


def test_the_same_network_runs_under_autocast_with_the_image_in_float32() -> None:
    generator, discriminator = small()
    latent = torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        image = generator(latent)
        score = discriminator(image)
    assert image.dtype == torch.float32
    assert torch.isfinite(score).all()
    exact = generator(latent)
    assert (image - exact).norm() < 0.1 * exact.norm()  # bfloat16 through seven layers
    assert not torch.equal(image, exact)


def test_both_regularisers_can_be_differentiated_through_the_networks() -> None:
    generator, discriminator = small()
    image = torch.randn(4, 3, 32, 32, requires_grad=True)
    (slope,) = torch.autograd.grad(discriminator(image).sum(), image, create_graph=True)
    torch.autograd.backward(slope.square().sum())
    assert discriminator.from_image.weight.grad is not None
    assert discriminator.from_image.weight.grad.abs().sum() > 0
    styles = generator.styles(torch.randn(2, 8))
    (slope,) = torch.autograd.grad(
        generator.synthesis(styles).square().sum(), styles, create_graph=True
    )
    torch.autograd.backward(slope.square().sum())
    first = generator.mapping.layers[0]
    assert isinstance(first, stylegan2_layers.EqualLinear)
    assert first.weight.grad is not None
    assert first.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("batch", [1, 3, 4, 6, 8])
def test_the_deviation_over_the_batch_takes_any_batch_size(batch: int) -> None:
    x = torch.randn(batch, 2, 4, 4)
    joined = stylegan2_layers.batch_deviation(x)
    assert joined.shape == (batch, 3, 4, 4)
    same = stylegan2_layers.batch_deviation(torch.ones(batch, 2, 4, 4))
    assert same[:, 2].max() < 1e-3
    assert (joined[:, 2].max() > 0.1) == (batch > 1)


def test_a_part_of_a_batch_has_the_deviations_that_it_has_in_the_whole() -> None:
    """So a rank or a micro-batch of a multiple of four samples computes what one process does with all of them."""
    x = torch.randn(16, 2, 4, 4)
    parts = [stylegan2_layers.batch_deviation(part) for part in (x[:4], x[4:8], x[8:])]
    torch.testing.assert_close(torch.cat(parts), stylegan2_layers.batch_deviation(x))


def plainly(x: torch.Tensor, limit: float | None, gain: float) -> torch.Tensor:
    return stylegan2_layers.clamp(stylegan2_layers.activate(x) * gain, limit, gain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gain", [1.0, 0.5**0.5])
@pytest.mark.parametrize("limit", [None, 1.5])  # in float16 the product of both is rounded down
def test_the_activation_that_keeps_its_result_alone_has_the_same_bits(
    dtype: torch.dtype, gain: float, limit: float | None
) -> None:
    torch.manual_seed(0)
    values, weights = torch.randn(2, 3, 4, 7, 7).to(dtype)
    found = []
    for function in (plainly, stylegan2_layers.activate_and_clamp):
        x = values.clone().requires_grad_()
        y = function(x, limit, gain)
        (gradient,) = torch.autograd.grad((y * y * weights).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.float().square().sum(), x)
        found.append((y, gradient, second))
    (y, gradient, second), (own_y, own_gradient, own_second) = found
    assert torch.equal(y, own_y)
    assert torch.equal(gradient, own_gradient)
    assert torch.allclose(
        second.float(), own_second.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-3
    )
    if limit is not None:
        reached = y.abs() == y.abs().max()
        assert int(reached.sum()) > 10
        assert not own_gradient[reached].any()


def test_the_activation_keeps_nothing_but_its_result() -> None:
    def kept(function: Any) -> set[int]:
        found = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            found.add(tensor.untyped_storage().data_ptr())
            return tensor

        x = torch.randn(2, 3, 4, 4).requires_grad_() + 1
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results.append(function(x, 256.0, 1.0))
        return found

    results: list[torch.Tensor] = []
    assert len(kept(plainly)) == 2
    assert kept(stylegan2_layers.activate_and_clamp) == {results[-1].untyped_storage().data_ptr()}
