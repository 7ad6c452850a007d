"""Weights as a network pickle that NVIDIA's programs load.

Their loader executes a text that is in the file. No text of theirs is here: a new file holds a few lines of our own
which make the network by the classes of the program that loads it, and take the weights. With a pickle of the same
architecture as a pattern, only its numbers are exchanged, and its text stays as it is.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpt.errors import ConfigError
from mpt.systems.stylegan2.nn.stylegan2 import Discriminator, Generator, Settings
from mpt.systems.stylegan2.nn.weights.names import noise_names, to_theirs
from mpt.systems.stylegan2.nn.weights.network_pickle import (
    NETWORKS,
    PERSISTENT,
    file_bytes,
    read_network_pickle,
)

PROTOCOL = 3
TEXT = '''"""Written by mpt: networks are made by the classes of the program that loads this file."""
try:
    from training import networks
    NESTED = True
except ImportError:
    from training import networks_stylegan2 as networks
    NESTED = False


def restore(network, kind, state):
    given = dict(state["_init_kwargs"])
    if not NESTED:
        given.update(given.pop("synthesis_kwargs", {}))
    kind.__init__(network, **given)
    own = network.state_dict()
    own.update({**state["_parameters"], **state["_buffers"]})
    network.load_state_dict(own)
    network.eval().requires_grad_(False)


class Generator(networks.Generator):
    def __setstate__(self, state):
        restore(self, networks.Generator, state)


class Discriminator(networks.Discriminator):
    def __setstate__(self, state):
        restore(self, networks.Discriminator, state)
'''
"""Ours; the loader of NVIDIA's programs executes it."""
NOISE_SEED = 0


def generator_arguments(settings: Settings) -> dict[str, Any]:
    """Return the arguments with which the original makes this generator."""
    sizes = {"channel_base": settings.channel_base, "channel_max": settings.channel_max}
    half = {"num_fp16_res": settings.num_fp16_res, "conv_clamp": settings.conv_clamp}
    return {
        "z_dim": settings.latent_size,
        "c_dim": settings.classes,
        "w_dim": settings.style_size,
        "img_resolution": settings.image_size,
        "img_channels": settings.channels,
        "mapping_kwargs": {"num_layers": settings.mapping_layers},
        "synthesis_kwargs": {**sizes, **half},
    }


def discriminator_arguments(settings: Settings) -> dict[str, Any]:
    """Return the arguments with which the original makes this discriminator."""
    return {
        "c_dim": settings.classes,
        "img_resolution": settings.image_size,
        "img_channels": settings.channels,
        "channel_base": settings.channel_base,
        "channel_max": settings.channel_max,
        "num_fp16_res": settings.num_fp16_res,
        "conv_clamp": settings.conv_clamp,
        "epilogue_kwargs": {"mbstd_group_size": settings.deviation_group},
    }


def published_tensors(
    settings: Settings, gen: Generator, twin: Generator, disc: Discriminator
) -> dict[str, Tensor]:
    """Return the tensors of G, D and G_ema under their names.

    The mean style and the fixed noise are the networks' own if they keep them; else the mean is computed, and the
    noise drawn from one seed.
    """
    found: dict[str, Tensor] = {}
    for name, network in (("G", gen), ("G_ema", twin)):
        state = {
            f"gen.{key}": value.detach().float().cpu()
            for key, value in network.state_dict().items()
        }
        state.setdefault("gen.mapping.average", network.mean_style().float().cpu())
        noise = torch.randn(
            network.synthesis.noise_size, generator=torch.Generator().manual_seed(NOISE_SEED)
        )
        state.setdefault("gen.synthesis.fixed_noise", noise)
        theirs = to_theirs(settings.resolutions(), state)
        found |= {f"{name}{key[1:]}": value for key, value in theirs.items()}
    state = {
        f"disc.{key}": value.detach().float().cpu() for key, value in disc.state_dict().items()
    }
    return found | to_theirs(settings.resolutions(), state)


def network_bytes(settings: Settings, tensors: Mapping[str, Tensor]) -> bytes:
    """Return a network pickle with these tensors of G, D and G_ema."""
    buffers = {f"G{name[1:]}" for name in (*noise_names(settings.resolutions()), "G.mapping.w_avg")}
    parts = [fragment("training_set_kwargs"), fragment({})]
    for name in NETWORKS:
        kind = "Discriminator" if name == "D" else "Generator"
        own = {
            key.removeprefix(f"{name}."): value
            for key, value in tensors.items()
            if key.startswith(f"{name}.")
        }
        kept = {key: value.contiguous().clone() for key, value in own.items()}
        state = {
            "_init_args": (),
            "_init_kwargs": discriminator_arguments(settings)
            if name == "D"
            else generator_arguments(settings),
            "_parameters": {
                key: value
                for key, value in kept.items()
                if f"G.{key}" not in buffers or name == "D"
            },
            "_buffers": {
                key: value for key, value in kept.items() if f"G.{key}" in buffers and name != "D"
            },
            "_modules": {},
        }
        meta = {
            "type": "class",
            "version": 6,
            "module_src": TEXT,
            "class_name": kind,
            "state": state,
        }
        module, attribute = PERSISTENT.split()
        called = (
            pickle.GLOBAL
            + f"{module}\n{attribute}\n".encode()
            + fragment(meta)
            + pickle.TUPLE1
            + pickle.REDUCE
        )
        parts += [fragment(name), called]
    parts += [fragment("augment_pipe"), fragment(None)]
    head = pickle.PROTO + bytes([PROTOCOL]) + pickle.EMPTY_DICT + pickle.MARK
    return head + b"".join(parts) + pickle.SETITEMS + pickle.STOP


def fragment(value: Any) -> bytes:
    """Return the operations that put a value on the stack; each fragment refers to its own memo alone."""
    return pickle.dumps(value, PROTOCOL)[2:-1]


def like_pattern(pattern: Path, settings: Settings, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a network pickle with other numbers.

    Raises ConfigError for a pattern of another architecture, CheckpointError for one that is no network pickle.
    """
    opened = read_network_pickle(pattern)
    if set(opened.networks) != set(NETWORKS):
        raise ConfigError(f"--like: {pattern} does not hold G, D and G_ema; leave --like out")
    theirs = opened.networks["G_ema"].arguments.get("img_resolution")
    if theirs != settings.image_size:
        raise ConfigError(
            f"--like: {pattern} makes {theirs} pixels, and this network {settings.image_size}"
        )
    return opened.rewritten(file_bytes(pattern), tensors)
