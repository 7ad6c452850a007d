"""Layouts are checked against a forward pass in NumPy, written from the definitions and sharing no code with ours."""

import io

import numpy as np
import pytest
import torch

from mpt.errors import CheckpointError
from mpt.seams import DataSpec
from mpt.systems.deepfacelab.data.leras.leras_pickle import write_arrays
from mpt.systems.deepfacelab.data.leras.restricted_pickle import read_pickle
from mpt.systems.deepfacelab.nn.saehd import CodeDiscriminator, Settings, build
from mpt.systems.deepfacelab.nn.shared.patch_discriminator import PatchDiscriminator
from mpt.systems.deepfacelab.nn.weights.leras_weights import (
    network_from_leras,
    network_to_leras,
    optimizer_from_leras,
    optimizer_to_leras,
    recognize,
)

TINY = {"image_size": 64, "ae_dims": 6, "e_dims": 4, "d_dims": 4, "d_mask_dims": 2}


def convolve(x, weights, path, stride=1):
    """leras Conv2D on NHWC: weights HWIO, half the kernel of zeros around, then VALID."""
    kernel, bias = weights[f"{path}/weight:0"], weights[f"{path}/bias:0"]
    size = kernel.shape[0]
    x = np.pad(x, ((0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))
    side = (x.shape[1] - size) // stride + 1
    out = np.zeros((len(x), side, side, kernel.shape[3])) + bias
    for row in range(size):
        for column in range(size):
            patch = x[
                :, row : row + side * stride : stride, column : column + side * stride : stride
            ][:, :side, :side]
            out += patch @ kernel[row, column]
    return out


def depth_to_space(x):
    batch, height, width, channels = x.shape
    c = channels // 4
    out = np.zeros((batch, height * 2, width * 2, c))
    for i in range(2):
        for j in range(2):
            out[:, i::2, j::2] = x[..., (i * 2 + j) * c : (i * 2 + j + 1) * c]
    return out


def lrelu(x, slope):
    return np.where(x > 0, x, x * slope)


def upscale(x, weights, path, act):
    return depth_to_space(act(convolve(x, weights, f"{path}/conv1"), 0.1))


def residual(x, weights, path, act):
    return act(
        x + convolve(act(convolve(x, weights, f"{path}/conv1"), 0.2), weights, f"{path}/conv2"), 0.2
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def encode(x, w, options, act):
    if "t" in options:
        x = residual(act(convolve(x, w, "down1/conv1", 2), 0.1), w, "res1", act)
        for stage in range(2, 6):
            x = act(convolve(x, w, f"down{stage}/conv1", 2), 0.1)
        x = residual(x, w, "res5", act)
    else:
        for stage in range(4):
            x = act(convolve(x, w, f"down1/downs_{stage}/conv1", 2), 0.1)
    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    return x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6) if "u" in options else x


def inter(x, w, options, low, act):
    for layer in ("dense1", "dense2"):
        x = x @ w[f"{layer}/weight:0"] + w[f"{layer}/bias:0"]
    x = x.reshape(len(x), -1, low, low).transpose(0, 2, 3, 1)
    return x if "t" in options else upscale(x, w, "upscale1", act)


def decode(z, w, options, act):
    x = m = z
    for stage in range(4 if "t" in options else 3):
        x = residual(upscale(x, w, f"upscale{stage}", act), w, f"res{stage}", act)
        m = upscale(m, w, f"upscalem{stage}", act)
    if "d" in options:
        m = upscale(m, w, "upscalem4" if "t" in options else "upscalem3", act)
        x = depth_to_space(
            np.concatenate([convolve(x, w, f"out_conv{k}") for k in ("", 1, 2, 3)], axis=3)
        )
    else:
        x = convolve(x, w, "out_conv")
    return sigmoid(x), sigmoid(convolve(m, w, "out_convm"))


def random_network(settings, seed=0):
    torch.manual_seed(seed)
    network = build(settings, DataSpec({}, 0))["autoencoder"]
    for parameter in network.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return network


@pytest.mark.parametrize("archi", ["df-ud", "df", "df-t", "df-udtc", "df-uc", "liae-ud", "liae-t"])
def test_a_numpy_pass_over_converted_weights_draws_the_same_face(archi):
    settings = Settings(archi=archi, **TINY)
    network = random_network(settings).double()
    options, low = settings.options, settings.lowest_size
    act = (lambda x, _: x * np.cos(x)) if "c" in options else lrelu
    weights = {}
    for name, part in network.named_children():
        state = {key: value.double() for key, value in part.state_dict().items()}
        weights[name] = {
            key: value.astype(np.float64) for key, value in network_to_leras(part, state).items()
        }
    image = torch.rand(
        2, 3, 64, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    with torch.no_grad():
        face = network.float().draw_dst(network.encode_dst(image.float()))
    bgr = image.numpy().transpose(0, 2, 3, 1)[..., ::-1]
    flat = encode(bgr, weights["encoder"], options, act)
    if settings.family == "df":
        code, decoder = inter(flat, weights["inter"], options, low, act), weights["decoder_dst"]
    else:
        codes = [inter(flat, weights[name], options, low, act) for name in ("inter_B", "inter_AB")]
        code, decoder = np.concatenate(codes, axis=3), weights["decoder"]
    drawn, mask = decode(code, decoder, options, act)
    np.testing.assert_allclose(
        face.image.numpy(), drawn[..., ::-1].transpose(0, 3, 1, 2), atol=1e-5
    )
    np.testing.assert_allclose(face.mask.numpy(), mask.transpose(0, 3, 1, 2), atol=1e-5)


@pytest.mark.parametrize(
    "make", [lambda: CodeDiscriminator(6, 8, width=4), lambda: PatchDiscriminator(16, 3, 4)]
)
def test_discriminators_draw_the_same_logits_from_converted_weights(make):
    torch.manual_seed(1)
    network = make()
    w = network_to_leras(network, network.state_dict())
    if isinstance(network, CodeDiscriminator):
        x = torch.rand(1, 6, 8, 8)
        y = x.numpy().transpose(0, 2, 3, 1)
        for stage in range(2):
            y = lrelu(convolve(y, w, f"convs_{stage}", 2), 0.1)
        np.testing.assert_allclose(
            network(x).detach().numpy()[:, 0], convolve(y, w, "out_conv")[..., 0], atol=1e-5
        )
    else:
        x = torch.rand(1, 3, 32, 32)
        y = lrelu(convolve(x.numpy().transpose(0, 2, 3, 1)[..., ::-1], w, "in_conv"), 0.2)
        for stage, layer in enumerate(network.convs):
            y = lrelu(convolve(y, w, f"convs_{stage}", layer.stride[0]), 0.2)
        np.testing.assert_allclose(
            network(x)[0].detach().numpy()[:, 0], convolve(y, w, "center_out")[..., 0], atol=1e-5
        )
        upward = network.upconvs[0].weight
        np.testing.assert_array_equal(
            w["upconvs_0/weight:0"], upward.detach().permute(2, 3, 1, 0).numpy()
        )


@pytest.mark.parametrize("archi", ["df-ud", "liae-udtc"])
def test_the_round_trip_through_a_file_is_bit_exact(archi):
    network = random_network(Settings(archi=archi, **TINY))
    for name, part in network.named_children():
        file = io.BytesIO()
        write_arrays(file, network_to_leras(part, part.state_dict()))
        arrays = read_pickle(file.getvalue(), name)
        assert all(array.dtype == np.float32 for array in arrays.values())
        back = network_from_leras(part, arrays, name)
        assert set(back) == set(part.state_dict())
        assert all(torch.equal(back[key], value) for key, value in part.state_dict().items())


def test_keys_are_leras():
    network = random_network(Settings(archi="df-ud", **TINY))
    keys = network_to_leras(network.encoder, network.encoder.state_dict())
    assert keys["down1/downs_0/conv1/weight:0"].shape == (5, 5, 3, 4)
    assert network_to_leras(network.inter, network.inter.state_dict())["dense1/weight:0"].shape == (
        512,
        6,
    )
    decoder = network_to_leras(network.decoder_src, network.decoder_src.state_dict())
    assert {
        "upscalem3/conv1/bias:0",
        "out_conv3/weight:0",
        "res2/conv2/weight:0",
        "out_convm/weight:0",
    } <= set(decoder)


def test_optimizer_state_has_leras_keys_and_comes_back_bit_for_bit():
    network = random_network(Settings(archi="df-ud", **TINY))
    parts = dict(network.named_children())
    states = {
        scope: {
            name: {"ms": torch.randn_like(p), "vs": torch.rand_like(p)}
            for name, p in part.named_parameters()
        }
        for scope, part in parts.items()
    }
    arrays = optimizer_to_leras(parts, states, 1234)
    assert arrays["iters:0"].dtype == np.int64
    assert arrays["iters:0"].shape == ()
    assert arrays["ms_encoder/down1/downs_0/conv1/weight_0:0"].shape == (5, 5, 3, 4)
    back, iterations = optimizer_from_leras(parts, arrays, "src_dst_opt")
    assert iterations == 1234
    for scope, part in parts.items():
        for name, _ in part.named_parameters():
            assert all(
                torch.equal(back[scope][name][kind], states[scope][name][kind])
                for kind in ("ms", "vs")
            )


def test_weights_of_another_architecture_are_refused_with_what_is_missing():
    small = random_network(Settings(archi="df-ud", **TINY))
    large = random_network(Settings(archi="df-ud", **{**TINY, "e_dims": 6}))
    deep = random_network(Settings(archi="df-udt", **TINY))
    arrays = network_to_leras(small.encoder, small.encoder.state_dict())
    with pytest.raises(
        CheckpointError,
        match=r"encoder.npy: .* has shape \(5, 5, 3, 4\); this architecture wants \(5, 5, 3, 6\)",
    ):
        network_from_leras(large.encoder, arrays, "encoder.npy")
    with pytest.raises(CheckpointError, match=r"missing, such as .* another architecture"):
        network_from_leras(deep.encoder, arrays, "encoder.npy")


@pytest.mark.parametrize("archi", ["df-ud", "df", "df-t", "liae-dt", "liae"])
def test_the_architecture_is_recognised_from_weights(archi):
    settings = Settings(archi=archi, **TINY)
    network = random_network(settings)
    files = {
        name: network_to_leras(part, part.state_dict()) for name, part in network.named_children()
    }
    found = Settings(**recognize(files))
    assert found.family == settings.family
    assert set(found.options) == set(settings.options) - set("uc")
    assert {name: getattr(found, name) for name in TINY} == TINY
