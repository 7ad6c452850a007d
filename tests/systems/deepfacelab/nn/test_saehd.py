import itertools

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from mpt.seams import DataSpec
from mpt.systems.deepfacelab.nn.saehd import CodeDiscriminator, Settings, build, units
from mpt.systems.deepfacelab.nn.shared.saehd_layers import KeepOutput, Upscale

NO_DATA = DataSpec({}, 0)
TINY = {"image_size": 64, "ae_dims": 8, "e_dims": 4, "d_dims": 4, "d_mask_dims": 2}
ARCHIS = [
    family + ("-" + "".join(letters) if letters else "")
    for family in ("df", "liae")
    for count in range(5)
    for letters in itertools.combinations("udtc", count)
]


def parameter_count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def build_on_meta(**changes):
    with torch.device("meta"):
        return build(Settings(**changes), NO_DATA)


def test_512_df_ud_has_the_published_count_part_by_part():
    settings = {
        "archi": "df-ud",
        "image_size": 512,
        "ae_dims": 320,
        "e_dims": 64,
        "d_dims": 72,
        "d_mask_dims": 22,
    }
    modules = build_on_meta(**settings, true_face_power=0.01)
    autoencoder = modules["autoencoder"]
    assert parameter_count(autoencoder) == 251_498_070
    assert parameter_count(autoencoder.encoder) == 4_306_560
    assert parameter_count(autoencoder.inter) == 197_756_480
    assert (
        parameter_count(autoencoder.decoder_src)
        == parameter_count(autoencoder.decoder_dst)
        == 24_717_515
    )
    assert parameter_count(modules["code_discriminator"]) == 63_840_001


def test_128_liae_ud_has_the_published_count():
    assert (
        parameter_count(build_on_meta(archi="liae-ud", image_size=128)["autoencoder"]) == 82_376_555
    )


@pytest.mark.parametrize("archi", ARCHIS)
def test_every_combination_of_options_draws_faces_of_the_input_size(archi):
    torch.manual_seed(0)
    settings = Settings(archi=archi, **TINY)
    faces = build(settings, NO_DATA)["autoencoder"]
    image = torch.rand(2, 3, 64, 64)
    for encode, draw in (("src", "src"), ("dst", "dst"), ("swap", "swap")):
        code = getattr(faces, f"encode_{encode}")(image)
        assert code.shape[-1] == settings.code_size
        face = getattr(faces, f"draw_{draw}")(code)
        assert face.image.shape == (2, 3, 64, 64)
        assert face.mask.shape == (2, 1, 64, 64)
        assert (face.image >= 0).all()
        assert (face.mask <= 1).all()


def test_a_liae_swap_uses_the_shared_code_twice_and_df_the_source_decoder():
    torch.manual_seed(0)
    image = torch.rand(1, 3, 64, 64)
    liae = build(Settings(archi="liae", **TINY), NO_DATA)["autoencoder"]
    first, second = liae.encode_swap(image).chunk(2, dim=1)
    assert torch.equal(first, second)
    assert not torch.equal(*liae.encode_dst(image).chunk(2, dim=1))
    df = build(Settings(archi="df", **TINY), NO_DATA)["autoencoder"]
    code = df.encode_swap(image)
    assert torch.equal(df.draw_swap(code).image, df.decoder_src(code).image)
    assert not torch.equal(df.draw_swap(code).image, df.draw_dst(code).image)


@pytest.mark.parametrize(
    ("archi", "size", "following"),
    [("df-ud", 500, 512), ("df", 72, 80), ("liae-t", 80, 96), ("df-d", 144, 160)],
)
def test_a_forbidden_size_is_refused_with_the_next_legal_one(archi, size, following):
    with pytest.raises(ValidationError, match=f"the next legal one is {following}"):
        Settings(archi=archi, image_size=size)
    Settings(archi=archi, image_size=following)


def test_sizes_that_only_d_and_t_forbid_are_legal_without_them():
    assert Settings(archi="df-u", image_size=80).lowest_size == 5


@pytest.mark.parametrize("archi", ["fd", "df-x", "df-uu", "df_ud", "", "DF-ud", "df-ud-t"])
def test_unknown_archis_are_refused_with_an_example(archi):
    with pytest.raises(ValidationError, match="for example df-ud"):
        Settings(archi=archi)


def test_true_face_needs_df():
    with pytest.raises(ValidationError, match="needs a df archi"):
        Settings(archi="liae-ud", true_face_power=0.1)


def test_the_rectifier_that_keeps_its_output_has_the_same_values_and_gradients():
    x = torch.randn(4, 5, requires_grad=True, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    expected = F.leaky_relu(x, 0.2)
    got = KeepOutput.apply(x, 0.2)
    assert torch.equal(got, expected)
    (first,) = torch.autograd.grad((expected * weight).sum(), x)
    (second,) = torch.autograd.grad((got * weight).sum(), x)
    assert torch.equal(first, second)


def test_an_upscale_keeps_its_input_and_its_output_and_nothing_else():
    kept = []
    layer = Upscale(4, 6, cosine=False)
    x = torch.rand(1, 4, 8, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.untyped_storage().data_ptr()) or t, lambda t: t
    ):
        y = layer(x)
    allowed = {x.data_ptr(), y.data_ptr(), layer.conv1.weight.data_ptr()}
    assert set(kept) == allowed


def test_pixel_norm_stays_finite_where_half_precision_would_overflow():
    encoder = build(Settings(archi="df-u", **TINY), NO_DATA)["autoencoder"].encoder
    image = torch.rand(1, 3, 64, 64) * 1e5
    flat = encoder(image)
    assert torch.isfinite(flat).all()
    assert flat.square().mean().sqrt().item() == pytest.approx(1, abs=1e-3)


def test_discriminators_exist_only_with_power():
    assert set(build_on_meta(**TINY)) == {"autoencoder"}
    names = set(build_on_meta(**TINY, true_face_power=0.01, gan_power=0.1))
    assert names == {"autoencoder", "code_discriminator", "patch_discriminator"}


def test_the_code_discriminator_judges_positions():
    assert CodeDiscriminator(8, 4, width=4)(torch.rand(2, 8, 4, 4)).shape == (2, 1, 3, 3)


def test_units_are_the_repeated_stages():
    names = [
        type(unit).__name__ for unit in units(build_on_meta(archi="df-ud", **TINY)["autoencoder"])
    ]
    assert names.count("Downscale") == 4
    assert names.count("Residual") == 6
    assert names.count("Upscale") == 1 + 2 * (3 + 4)
