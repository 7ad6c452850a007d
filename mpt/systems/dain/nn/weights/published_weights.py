"""Weights to and from baowenbo/DAIN and the two networks it starts from, and back to RIFE's programs.

A whole `best.pth` or `flownet.pkl` needs nothing of this: `model.weights=best.pth` loads it, for names are the same.
All files are read by the restricted reader, which runs nothing in them.
"""

from __future__ import annotations

import io
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from mpt.config.checking.precision_names import FLOAT32
from mpt.engine.building.initial_weights import load_initial_weights
from mpt.errors import ConfigError, InputOutputError
from mpt.inference.half import rebuild
from mpt.inference.trained import open_trained
from mpt.run.process.files import write_atomically
from mpt.systems.dain.nn.dain import Dain
from mpt.systems.dain.nn.networks.depth_net import DepthNet
from mpt.systems.dain.nn.networks.flow_net import FlowNet
from mpt.systems.dain.nn.rife_published.networks import PublishedRife
from mpt.systems.dain.nn.rife_published.versions import WRAPPER


def join_parts(output: Path, flow: Path | None, depth: Path | None) -> None:
    """Write the parts that are given under DAIN's names. Raises CheckpointError for a file of another network."""
    if flow is None and depth is None:
        raise ConfigError("give --flow, --depth, or both")
    refuse_existing(output)
    state: dict[str, Tensor] = {}
    made: dict[str, tuple[Path | None, type[nn.Module]]] = {
        "flownets": (flow, FlowNet),
        "depthNet": (depth, DepthNet),
    }
    for name, (path, kind) in made.items():
        if path is None:
            continue
        part = kind()
        print(
            load_initial_weights({name: part}, path).message.replace("model.weights: ", f"{name}: ")
        )
        state |= {f"{name}.{key}": value.contiguous() for key, value in part.state_dict().items()}
    write_atomically(output, save(state))
    print(f"wrote {output}: start with model.weights={output}")


def publish(run: str, output: Path, runs: Path) -> None:
    """Write the evaluated network's float32 state under the published names. Raises ConfigError for other models."""
    refuse_existing(output)
    trained = open_trained(run, runs, "cpu")
    if "prune" in trained.config.memory.tricks:
        raise ConfigError(
            "RUN: it is pruned (memory.prune), and the original programs have no network of its widths"
        )
    # adapters go into the weights, which the original programs know alone
    modules = rebuild(trained, FLOAT32).task.modules
    name = "net_ema" if "net_ema" in modules else "net"
    net = modules[name]
    prefix = ""
    if isinstance(net, PublishedRife):
        prefix = WRAPPER
    elif not isinstance(net, Dain) or net.multiple != 64:
        raise ConfigError(
            "RUN: only a run of model dain at size full, or of rife with a version, has published shapes"
        )
    state = {
        f"{prefix}{key}": value.float() if value.is_floating_point() else value
        for key, value in net.state_dict().items()
    }
    content = io.BytesIO()
    torch.save(state, content)
    write_atomically(output, content.getvalue())
    print(f"wrote {len(state)} tensors of {name} to {output}")


def refuse_existing(output: Path) -> None:
    """Raise InputOutputError if a file would be replaced."""
    if output.exists():
        raise InputOutputError(f"{output} is there already; remove it or choose another name")
