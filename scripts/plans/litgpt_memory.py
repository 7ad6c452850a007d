#!/usr/bin/env python
"""Language models that litgpt fine-tunes, planned from its own code, against the memory it publishes.

    git clone https://github.com/Lightning-AI/litgpt CLONE
    pip install lightning bitsandbytes
    python scripts/plans/litgpt_memory.py CLONE ROWS.json -o docs/benchmarks/plan_litgpt.md

Published is `torch.cuda.max_memory_allocated()`, in tables of the clone: `tutorials/resource-tables.md` (one A100, the
longest example of Alpaca, whose tokens the page states) and `config_hub/finetune/README.md` (one A10G, 512 tokens).
Each row is planned with the code of the commit that published it and the settings of its configuration: the network,
Lightning's Fabric, its layers for bitsandbytes, optimizers and loss as they stand, a loop of two micro-batches around.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import yaml

from mpt.errors import MptError
from mpt.planner.facts.verdict import judge
from scripts.plans.published_steps import (
    clone_and_rows,
    error,
    import_from,
    plan_as_worker,
    plan_at_commits,
    plan_of,
    summary,
)
from scripts.provenance import made

GB = 10**9
RESOURCES, HUB = "tutorials/resource-tables.md", "config_hub/finetune/README.md"
PUBLISHED_AT = {"lora": "0cc02afa", "adapter": "0f021f3a", "adapter_v2": "0f021f3a"}
"""Method -> the commit that published the rows of the resource tables which it names.

The page names an older commit, at which RMSNorm was computed in bfloat16; with that code Llama 2 takes 3 to 4 % less.
"""
HUB_AT = {
    "gemma2": "2b195c7f",
    "llama-3.1": "fd71063c",
    "llama-3.2": "00af8b0d",
    "phi-3": "f247be87",
}
HUB_AT_ALL = "5895df10"
MODELS = {
    "phi-1.5": ("phi-1_5", "phi1.5"),
    "StableLM Alpha": ("stablelm-base-alpha-3b", "StableLM Alpha"),
    "Llama 2": ("Llama-2-{size}-hf", "Llama 2"),
    "Falcon": ("falcon-{size}", "Falcon"),
}
"""Name in the resource tables -> litgpt's, and that of the list of tokens."""
LORA = {"r": 8, "alpha": 16, "dropout": 0.05, "to_query": True, "to_value": True}
"""As in `finetune/lora.py` of that time."""
SHORTER = {RESOURCES: 4, HUB: 1}
"""Table -> how many times as short the micro-batch after the longest one is.

The longest example of Alpaca is followed by a usual one, but of examples that are cut at 512 tokens many are as long.
Layers of bitsandbytes keep what they kept until the next loss.
"""
PACKED = (
    "Layers of 4 bits kept their input until bitsandbytes 0.44, for a gradient that they do not have "
    "([#1270](https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1270)), and made a weight in float16 and "
    "its copy in bfloat16 for each product; litgpt asked for 0.42, so the planned layers do so as well. What they keep "
    "lives until the next loss, so the lengths of two micro-batches in a row count, which nobody published: after the "
    f"longest example of Alpaca one {SHORTER[RESOURCES]} times as short is planned, in `config_hub`, where examples "
    "are cut at 512 tokens, one as long. The states of the paged optimizer are not in PyTorch's allocator, and left "
    "out. Today's bitsandbytes, the last column, keeps no inputs and makes no copy in the forward pass."
)


@dataclass
class Row:
    """A published run, and what was planned for it."""

    name: str
    commit: str
    method: str
    model: str
    quantize: str | None
    micro_batch: int
    length: int
    gpu: str
    published: float | None
    """GB, None if the run was out of memory."""
    shorter: int
    """How many times as short the micro-batch after the longest one is."""
    lora: dict[str, Any] = field(default_factory=dict)
    planned: int = 0
    """Bytes of PyTorch's allocator: without the states of a paged optimizer."""
    today: int = 0
    """Bytes that are planned with today's bitsandbytes."""
    verdict: str = ""
    error: str = ""


def build(
    method: str,
    model: str,
    quantize: str | None,
    micro_batch: int,
    length: int,
    shorter: int,
    lora: dict[str, Any],
    before: bool = False,
) -> Any:
    """Return a step of litgpt's fine-tuning scripts."""
    import lightning
    from lightning.fabric.plugins import BitsandbytesPrecision

    root = "litgpt" if Path("litgpt/model.py").is_file() else "lit_gpt"
    module = importlib.import_module(f"{root}.{method}")
    config = module.Config.from_name(model, **lora)
    loss_of = importlib.import_module(f"{root}.utils").chunked_cross_entropy
    plugins = BitsandbytesPrecision(quantize, torch.bfloat16) if quantize else None  # type: ignore[arg-type]
    precision = None if quantize else "bf16-true"
    fabric = lightning.Fabric(accelerator="cuda", devices=1, precision=precision, plugins=plugins)  # type: ignore[arg-type]
    with fabric.init_module(empty_init=False):
        network = module.GPT(config)
    getattr(module, f"mark_only_{method}_as_trainable")(network)
    network = fabric.setup_module(network)
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    if quantize:
        import bitsandbytes

        optimizer: Any = bitsandbytes.optim.PagedAdamW(weights, lr=3e-4)
        compute_as_before(before)
    else:
        optimizer = torch.optim.AdamW(weights, lr=3e-4)
    optimizer = fabric.setup_optimizers(optimizer)
    network.max_seq_length = length
    tokens, targets = torch.randint(0, 100, (2, micro_batch, length), device="cuda").unbind()
    with torch.no_grad():  # validation comes first, and adapters keep its keys and values
        network(tokens[:, : length // shorter])

    def step() -> None:
        for part, count in enumerate((length, length // shorter)):
            with fabric.no_backward_sync(network, enabled=part == 0):
                logits = network(tokens[:, :count], lm_head_chunk_size=128)
                logits[-1] = logits[-1][..., :-1, :]
                fabric.backward(loss_of(logits, targets[:, 1:count]) / 2)
        optimizer.step()
        optimizer.zero_grad()

    return network, optimizer, tokens, step


def compute_as_before(before: bool) -> None:
    """Let bitsandbytes' layers of 4 bits compute as before 0.44, or as today."""
    from bitsandbytes import functional
    from bitsandbytes.autograd._functions import MatMul4Bit

    todays = vars(MatMul4Bit).get("todays", MatMul4Bit.forward)

    def forward(
        context: Any, values: Any, packed: Any, out: Any = None, bias: Any = None, state: Any = None
    ) -> Any:
        weight = functional.dequantize_4bit(packed.view(-1, 1), state).to(values.dtype)
        context.is_empty, context.state = False, state
        context.dtype_A, context.dtype_B = values.dtype, packed.dtype
        context.dtype_bias = None if bias is None else bias.dtype
        context.tensors = (values, packed.view(-1, 1))
        return torch.nn.functional.linear(values, weight, bias)

    MatMul4Bit.todays = todays
    MatMul4Bit.forward = staticmethod(forward if before else todays)


def cells(line: str) -> list[str]:
    """Return the texts of a row of a table in Markdown."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def number(text: str) -> float | None:
    """Return the GB of a cell, None for a run that was out of memory."""
    return None if "OOM" in text else float(text.removesuffix("GB"))


def of_resources(text: str) -> Iterator[Row]:
    """Yield the rows of one GPU that train."""
    longest, _, _ = text.partition("does not affect")
    tokens = dict(re.findall(r"^- ([\w. ]+?):? (\d+) tokens", longest, re.M))
    method = ""
    for line in text.splitlines():
        found = re.search(r"`litgpt finetune_(lora|adapter_v2|adapter)` command", line)
        method = "" if line.startswith("## ") else found[1] if found else method
        if "multiple A100" in line:
            method = ""
        parts = cells(line)
        if not method or len(parts) != 7 or not parts[3].isdigit():
            continue
        size, model, quantize, micro_batch, _, memory, _ = parts
        name, listed = MODELS[model]
        quantize = None if quantize == "None" else quantize.removeprefix("bnb.")
        yield Row(
            f"{model} {size}, {method}, {quantize or 'bf16'}, {micro_batch} x {tokens[listed]}",
            PUBLISHED_AT[method],
            method,
            name.format(size=size.replace(" ", "").lower()),
            quantize,
            int(micro_batch),
            int(tokens[listed]),
            "a100",
            number(memory),
            SHORTER[RESOURCES],
            LORA if method == "lora" else {},
        )


def of_hub(text: str, show: Any) -> Iterator[Row]:
    """Yield the rows of one A10G but full fine-tuning, whose peak memory is that of several."""
    for line in text.splitlines():
        parts = cells(line)
        if len(parts) < 9 or parts[5] != "1xA10G" or "full" in parts[0]:
            continue
        file = parts[0].replace("gemma2b/", "gemma2-2b/")
        if "llama-3.2" in file:
            file = file.replace("b/", "B/")
        commit = next((at for name, at in HUB_AT.items() if name in file), HUB_AT_ALL)
        settings = yaml.safe_load(show(commit, f"config_hub/finetune/{file}"))
        targets = ("query", "key", "value", "projection", "mlp", "head")
        asked = ("r", "alpha", "dropout", *targets)
        lora = {f"lora_{name}": settings[f"lora_{name}"] for name in asked}
        quantize = (settings["quantize"] or "").removeprefix("bnb.") or None
        yield Row(
            f"{file}, {settings['train']['micro_batch_size']} x {settings['train']['max_seq_length']}",
            commit,
            "lora",
            Path(settings["checkpoint_dir"]).name,
            quantize,
            settings["train"]["micro_batch_size"],
            settings["train"]["max_seq_length"],
            "a10g",
            number(parts[8]),
            SHORTER[HUB],
            lora,
        )


def plan_row(row: Row) -> None:
    """Fill in what is not planned yet, from the code in the working directory."""
    names = ("method", "model", "quantize", "micro_batch", "length", "shorter", "lora")
    arguments = {name: getattr(row, name) for name in names}
    asked = {"planned": bool(row.quantize)}
    if row.quantize and row.published:
        asked["today"] = False
    try:
        for name, before in asked.items():
            if getattr(row, name):
                continue
            plan = plan_of(build, arguments | {"before": before}, row.gpu)
            paged = plan.by_category.get("optimizer state", 0) if row.quantize else 0
            setattr(row, name, plan.allocated - (0 if name == "today" else paged))
            if name == "planned":
                row.verdict = getattr(judge(plan), "kind", "")
    except MptError as refused:
        row.error = str(refused)


def show_of(clone: Path) -> Any:
    """Return the function that reads a file of a commit."""

    def show(commit: str, path: str) -> str:
        call = ["git", "-C", str(clone), "show", f"{commit}:{path}"]
        return subprocess.run(call, check=True, capture_output=True, text=True).stdout

    return show


def known(file: Path, rows: Sequence[Row]) -> list[Row]:
    """Return rows with what a file of them has planned already."""
    kept = json.loads(file.read_text("utf-8")) if file.is_file() else []
    names = ("planned", "today", "verdict")
    planned = {
        (one["name"], one["commit"], one["shorter"]): {name: one[name] for name in names}
        for one in kept
        if one["verdict"]
    }
    return [
        Row(**asdict(row) | planned.get((row.name, row.commit, row.shorter), {})) for row in rows
    ]


def off(planned: int, row: Row) -> str:
    """Return by how much more or less was planned than published, for people."""
    return f"{error(planned / GB, row.published or 0):+.1%}"


def counted(rows: Sequence[Row]) -> str:
    """Return the cells of a row that sums up."""
    return summary([error(row.planned / GB, row.published or 0) for row in rows])


def page(rows: Sequence[Row]) -> str:
    """Return the page."""
    ran = [row for row in rows if row.published and row.planned]
    plain = [row for row in ran if not row.quantize]
    packed = [row for row in ran if row.quantize]
    failed = [row for row in rows if row.published is None]
    refused = [f"Not planned: {row.name}: {row.error}" for row in rows if row.error]
    excluded = sum(row.verdict == "does not fit" for row in failed)
    sure, wrong = (sum(row.verdict == kind for row in ran) for kind in ("fits", "does not fit"))
    return "\n".join(
        [
            "# Fine-tuning language models, planned from litgpt's code",
            "",
            "Written by `python scripts/plans/litgpt_memory.py CLONE ROWS.json -o docs/benchmarks/plan_litgpt.md`"
            f", {made()}, torch {torch.__version__}, on a CPU. Nothing is fitted. Published are {len(ran)} runs of one "
            f"GPU and {len(failed)} that were out of memory, in [litgpt's](https://github.com/Lightning-AI/litgpt) "
            "`tutorials/resource-tables.md` (A100 of 40 GB, torch 2.1, the longest example of Alpaca) and "
            "`config_hub/finetune/README.md` (A10G of 24 GB, 512 tokens), as `torch.cuda.max_memory_allocated()` in GB "
            "of one billion bytes. Planned are the same bytes, with the code and the settings of the commit that "
            "published a row: networks, Lightning's Fabric, its layers of 4 bits, optimizers and losses as they stand, "
            "as a step of one's own. Full fine-tuning is left out, whose peaks are those of several cards.",
            "",
            "| Runs | Count | Median error | Nine in ten within | Lowest | Highest |",
            "|---|---:|---:|---:|---:|---:|",
            f"| bfloat16 | {counted(plain)} |",
            f"| 4 bits | {counted(packed)} |",
            "",
            f"Of the {len(failed)} runs that were out of memory {excluded} were said not to fit; of the {len(ran)} "
            f"that ran {sure} to fit and {wrong} not to.",
            "",
            PACKED,
            "",
            "| Run | Published GB | Planned | Error |",
            "|---|---:|---:|---:|",
            *(
                f"| {row.name} | {row.published:.2f} | {row.planned / GB:.2f} | {off(row.planned, row)} |"
                for row in plain
            ),
            *(
                f"| {row.name} | out of memory | {row.planned / GB:.2f} | {row.verdict} |"
                for row in failed
            ),
            "",
            "| Run in 4 bits | Published GB | Planned | Error | Today |",
            "|---|---:|---:|---:|---:|",
            *(
                f"| {row.name} | {row.published:.2f} | {row.planned / GB:.2f} | {off(row.planned, row)} | "
                f"{row.today / GB:.2f} |"
                for row in packed
            ),
            "",
            *refused,
            *[""] * bool(refused),
        ]
    )


def main() -> None:
    """Plan the rows of litgpt's tables."""
    options = clone_and_rows(__doc__).parse_args()
    if options.worker:
        import_from(options.clone)
        plan_as_worker(Row, options.rows, plan_row)
        return
    show = show_of(options.clone)
    published = [*of_resources(show("HEAD", RESOURCES)), *of_hub(show("HEAD", HUB), show)]
    order = [row.name for row in published]
    rows = plan_at_commits(__file__, known(options.rows, published), options.clone)
    rows.sort(key=lambda row: order.index(row.name))
    options.rows.write_text(json.dumps([asdict(row) for row in rows]), "utf-8")
    if options.output:
        options.output.write_text(page(rows), "utf-8")


if __name__ == "__main__":
    main()
