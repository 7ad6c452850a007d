"""A training that compiles nothing does not import torch's compiler, and takes the same steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import torch

usual = {name: getattr(torch.optim, name).step for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adamax")}
assert all(step.__code__.co_name == "_use_grad" for step in usual.values()), "torch has changed"

from mpt.cli import main
words = ["train.steps=3", "train.batch_size=64", "train.log_every=1", "train.device=cpu", "optimizer.weight_decay=0.1"]
try:
    main(["train", sys.argv[1], *words, "--runs", sys.argv[2], "--quiet", "--no-report"])
except SystemExit as ended:
    assert not ended.code
assert "torch._dynamo" not in sys.modules

def trained(kind, step):
    kind.step = step
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3)
    optimizer = kind(net.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        assert all(p.requires_grad and p.grad_fn is None for p in net.parameters())
    return torch.cat([p.detach().flatten() for p in net.parameters()])

kinds = {name: (getattr(torch.optim, name), getattr(torch.optim, name).step) for name in usual}
ours = {name: trained(*pair) for name, pair in kinds.items()}
assert "torch._dynamo" not in sys.modules
for name, (kind, step) in kinds.items():
    assert torch.equal(ours[name], trained(kind, usual[name])), name
    assert torch.equal(ours[name], trained(kind, step)), name
inner = torch.optim.Optimizer.zero_grad.__wrapped__
assert "dynamo" in getattr(inner, "__dynamo_disable").__module__
compiled = torch.compile(torch.nn.Linear(5, 3), backend="eager")
optimizer = torch.optim.Adam(compiled.parameters())
compiled(torch.ones(2, 5)).sum().backward()
optimizer.step()
"""
CONFIG = "{model: {name: small_cnn, features: 4, image_size: 8}, dataset: digits, precision: fp32, name: run}"


def test_a_run_that_compiles_nothing_starts_without_the_compiler(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    command = [sys.executable, "-c", PROGRAM, str(config), str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "run" / "summary.json").is_file()
