#!/usr/bin/env python
"""Fine-tuning by some ninety methods of PEFT, planned with its own code, against the memory that it publishes.

    git clone https://github.com/huggingface/peft CLONE
    pip install transformers diffusers accelerate
    python scripts/plans/peft_memory.py CLONE ROWS.json -o docs/benchmarks/plan_peft.md

`method_comparison` of the clone has a result for each method: Llama 3.2 with three billion weights on MetaMathQA, and
FLUX.2 klein with four billion on pictures of 512 pixels with checkpoints, each on one L40S. Networks are made from the
numbers of their configurations, with random weights; methods, optimizers and their settings are those of the commit
that a result names, so the clone needs its history.

The longest batch of MetaMathQA is not published. It is the same for all methods, so its tokens are found from one of
them, LoRA of rank 32, whose row then says nothing.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from mpt.errors import MptError
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
CARD = "l40s"
MOST_SECONDS = 240
LANGUAGE, PICTURES = "MetaMathQA", "image-gen"
FOUND_FROM = "lora/llama-3.2-3B-rank32"
SHORTEST, LONGEST = 512, 768
"""Tokens; the longest is the settings' limit."""
LLAMA: dict[str, Any] = {
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
FLUX: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 128,
    "num_layers": 5,
    "num_single_layers": 20,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (32, 32, 32, 32),
    "rope_theta": 2000,
    "guidance_embeds": False,
}
TEXTS, PROMPT, SIDE, AT_ONCE = 14, 512, 32, 2
"""Of FLUX: pictures with their texts, tokens of a text, tokens along a side of a picture, pictures of a batch."""


@dataclass
class Row:
    """A method's result, and what was planned for it."""

    task: str
    name: str
    weights: int
    """That train, as published."""
    published: int
    """Bytes, the most that were reserved."""
    commit: str
    """Whose code was measured, or which added the settings of it."""
    length: int = 0
    """Tokens of the longest batch; 0: none, or not found yet."""
    planned: int = 0
    workspace: int = 0
    """Bytes that the plan's total has in addition for cuDNN's workspaces."""
    in_building: bool = False
    """Whether the plan's peak lies before the first step."""
    error: str = ""


def settings_of(tree: str, task: str, name: str) -> dict[str, Any]:
    """Return a method's settings of training."""
    folder = Path(tree, "method_comparison", task)
    found = json.loads(Path(folder, "default_training_params.json").read_text("utf-8"))
    own = Path(folder, "experiments", name, "training_params.json")
    return found | (json.loads(own.read_text("utf-8")) if own.is_file() else {})


def with_method(network: Any, tree: str, task: str, name: str) -> tuple[Any, str]:
    """Return a network with a method's adapters, and the kind of the method, empty for fine-tuning all weights."""
    from peft import PeftConfig, get_peft_model

    folder = Path(tree, "method_comparison", task, "experiments", name)
    if not Path(folder, "adapter_config.json").is_file():
        return network, ""
    config = PeftConfig.from_pretrained(str(folder))
    cast = settings_of(tree, task, name)["autocast_adapter_dtype"]
    return get_peft_model(network, config, autocast_adapter_dtype=cast), str(config.peft_type)


def optimizer_of(network: Any, settings: dict[str, Any]) -> Any:
    """Return the optimizer of a method."""
    from peft import optimizers

    kind, options = settings["optimizer_type"], settings["optimizer_kwargs"]
    if kind == "lora-fa":
        return optimizers.create_lorafa_optimizer(network, **options)
    return getattr(torch.optim, kind)(network.parameters(), **options)


def language_step(tree: str, name: str, length: int) -> Any:
    """Return a step of the fine-tuning of Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = settings_of(tree, LANGUAGE, name)
    network: Any = LlamaForCausalLM(LlamaConfig(**LLAMA)).to(torch.bfloat16).to("cuda")
    network, kind = with_method(network, tree, LANGUAGE, name)
    network.train()
    optimizer = optimizer_of(network, settings)
    tokens = torch.randint(0, 1000, (settings["batch_size"], length), device="cuda")
    mask = torch.ones_like(tokens)
    if kind:  # the loss without the adapters, after which more of them train than before
        with network.disable_adapter(), torch.no_grad():
            network(input_ids=tokens)
    torch.cuda.empty_cache()  # as after each tenth step, after which the longest batches come

    def step() -> Any:
        labels = tokens.clone()
        optimizer.zero_grad()
        count = settings["batch_size"] * length
        found = network(
            input_ids=tokens, attention_mask=mask, labels=labels, num_items_in_batch=count
        )
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), settings["grad_norm_clip"])
        optimizer.step()
        if kind.endswith("ADALORA"):
            network.base_model.update_and_allocate(1)
        return found  # the loop's variable lives until the next step has found another

    return network, optimizer, (tokens, mask), step


def picture_step(tree: str, name: str) -> Any:
    """Return a step of the fine-tuning of FLUX, beside what its script keeps on the card."""
    from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
    from transformers import Dinov2Config, Dinov2Model

    settings = settings_of(tree, PICTURES, name)
    network: Any = Flux2Transformer2DModel(**FLUX).to(torch.bfloat16)
    network.enable_gradient_checkpointing()
    network, kind = with_method(network.to("cuda"), tree, PICTURES, name)
    network.train()
    judge = Dinov2Model(Dinov2Config()).to("cuda").eval()
    optimizer = optimizer_of(network, settings)
    width = FLUX["joint_attention_dim"]
    texts = torch.zeros(TEXTS, PROMPT, width, dtype=torch.bfloat16, device="cuda")
    places = torch.zeros(TEXTS, PROMPT, 4, dtype=torch.int64, device="cuda")
    pictures = torch.zeros(TEXTS, 128, SIDE, SIDE, dtype=torch.bfloat16, device="cuda")
    torch.cuda.empty_cache()

    def step() -> None:
        chosen = torch.zeros(AT_ONCE, dtype=torch.long, device="cuda")
        latents = pictures.index_select(0, chosen)
        noise = torch.randn_like(latents)
        share = torch.rand(AT_ONCE, 1, 1, 1).to(latents.dtype).to("cuda")
        packed = Flux2KleinPipeline._pack_latents((1.0 - share) * latents + share * noise)
        optimizer.zero_grad(set_to_none=True)
        found = network(
            hidden_states=packed,
            timestep=torch.rand(AT_ONCE).to("cuda"),
            guidance=None,
            encoder_hidden_states=texts.index_select(0, chosen),
            txt_ids=places.index_select(0, chosen),
            img_ids=Flux2KleinPipeline._prepare_latent_ids(latents).to("cuda"),
            return_dict=False,
        )[0]
        found = found.transpose(1, 2).reshape(latents.shape)
        weighting, target = torch.ones_like(share), noise - latents
        squares = weighting.float() * (found.float() - target.float()) ** 2
        torch.mean(squares.reshape(AT_ONCE, -1), 1).mean().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), settings["grad_norm_clip"])
        optimizer.step()
        if kind.endswith("ADALORA"):
            network.base_model.update_and_allocate(1)

    return network, optimizer, (texts, judge), step


def results(clone: Path) -> list[Row]:
    """Return the clone's results."""
    found = []
    for task in (LANGUAGE, PICTURES):
        for file in sorted(Path(clone, "method_comparison", task, "results").glob("*.json")):
            result = json.loads(file.read_text("utf-8"))
            name, trained = result["run_info"]["experiment_name"], result["train_info"]
            commit = result["meta_info"]["package_info"]["peft-commit-hash"]
            commit = with_settings(clone, commit, f"method_comparison/{task}/experiments/{name}")
            most = trained["accelerator_memory_max"]
            found.append(Row(task, name, trained["num_trainable_params"], most, commit))
    return found


def with_settings(clone: Path, commit: str, folder: str) -> str:
    """Return a commit, or the one that added a folder where that was later."""
    call = ["git", "-C", str(clone), "log", "--format=%H", "--diff-filter=A", "--", folder]
    added = subprocess.run(call, check=True, capture_output=True, text=True).stdout.split()
    call = ["git", "-C", str(clone), "cat-file", "-e", f"{commit}:{folder}"]
    return added[0] if subprocess.run(call, capture_output=True).returncode else commit


def plan_row(row: Row) -> None:
    """Fill in what is planned for a row that is not yet, from the code in the working directory."""
    if row.planned:
        return
    arguments = {"tree": str(Path.cwd()), "name": row.name}
    signal.alarm(MOST_SECONDS)
    try:
        if row.task == LANGUAGE:
            plan = plan_of(language_step, arguments | {"length": row.length}, CARD)
        else:
            plan = plan_of(picture_step, arguments, CARD)
    except (MptError, TimeoutError) as refused:
        row.error = str(refused)
        return
    finally:
        signal.alarm(0)
    row.planned, row.workspace, row.error = plan.reserved, plan.assumed_workspace, ""
    row.in_building = plan.moment.startswith("build")


def give_up(*_: Any) -> None:
    """End a plan that takes too long."""
    raise TimeoutError(f"not planned within {MOST_SECONDS} s")


def found_length(rows: Sequence[Row], clone: Path) -> int:
    """Return the tokens with which the plan of one method takes what is published, by bisection."""
    low, high = SHORTEST, LONGEST
    off: dict[int, float] = {}
    while high - low > 1:
        middle = (low + high) // 2
        asked = replace(next(row for row in rows if row.name == FOUND_FROM), length=middle)
        row = plan_at_commits(__file__, [asked], clone)[0]
        off[middle] = abs(error(row.planned, row.published))
        low, high = (middle, high) if row.planned < row.published else (low, middle)
    return min(off, key=lambda length: off[length])


def known(file: Path, rows: Iterable[Row]) -> list[Row]:
    """Return rows with what a file of them has planned already."""
    kept = json.loads(file.read_text("utf-8")) if file.is_file() else []
    planned = {(one["task"], one["name"], one["commit"]): Row(**one) for one in kept}
    return [planned.get((row.task, row.name, row.commit), row) for row in rows]


def page(rows: Sequence[Row]) -> str:
    """Return the page."""
    tokens = max(row.length for row in rows)
    lines = [
        "# Fine-tuning by PEFT's methods, planned",
        "",
        f"Written by `python scripts/plans/peft_memory.py CLONE ROWS.json -o docs/benchmarks/plan_peft.md`, {made()}, "
        f"torch {torch.__version__}, on a CPU. Published are the results of [PEFT's comparison of methods]"
        "(https://github.com/huggingface/peft/tree/main/method_comparison), each measured on one L40S with torch 2.12 "
        "or 2.13: the most that the caching allocator reserved while training, in GB of one billion bytes. Planned is "
        "the same, on the same card where there is room, with PEFT's code and settings of the commit that a result "
        "names, as a step of one's own.",
        "",
        "One number is fitted. The tokens of the longest batch of MetaMathQA are not published, and were found from "
        f"LoRA of rank 32 ({tokens}), whose row does not count. All batches are as long; with others around the "
        "longest the allocator's blocks of logits would lie otherwise. Plans whose peak lies in building the network "
        "do not count either, which FLUX's results leave out.",
        "",
        "| Results | Count | Median error | Nine in ten within | Lowest | Highest |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    parts = []
    for task, what in (
        (LANGUAGE, "Llama 3.2 3B, MetaMathQA"),
        (PICTURES, "FLUX.2 klein 4B, 512 pixels"),
    ):
        some = [row for row in rows if row.task == task and row.planned]
        counted = [row for row in some if row.name != FOUND_FROM and not row.in_building]
        errors = [error(row.planned + row.workspace, row.published) for row in counted]
        lines.append(f"| {what} | {summary(errors)} |")
        parts += ["", f"## {what}", ""]
        parts.append(
            "| Method | Weights that train | Published GB | Planned | With workspaces | Error |"
        )
        parts.append("|---|---:|---:|---:|---:|---:|")
        for row in some:
            why = " (in building)" if row.in_building else ""
            why = " (the tokens are from it)" if row.name == FOUND_FROM else why
            total = row.planned + row.workspace
            parts.append(
                f"| {row.name} | {row.weights:,} | {row.published / GB:.2f} | {row.planned / GB:.2f}{why} | "
                f"{total / GB:.2f} | {error(total, row.published):+.1%} |"
            )
    refused = [row for row in rows if row.error]
    parts += ["", "Not planned:", ""] if refused else []
    parts += [f"- {row.task}, {row.name}: {re.split(', at |; a', row.error)[0]}" for row in refused]
    return "\n".join([*lines, *parts, ""])


def work(file: Path) -> None:
    """Plan the rows of a file with the code in the working directory."""
    sys.modules["torchao"] = None  # type: ignore[assignment]  # PEFT asks for names of another release
    signal.signal(signal.SIGALRM, give_up)
    import_from(Path.cwd() / "src")
    plan_as_worker(Row, file, plan_row)


def main() -> None:
    """Plan the results and write the page."""
    parser = clone_and_rows(__doc__)
    parser.add_argument("--task", choices=(LANGUAGE, PICTURES), help="plan the rows of one")
    options = parser.parse_args()
    if options.worker:
        work(options.rows)
        return
    clone = options.clone.resolve()
    rows = known(options.rows, results(clone))
    tasks = (options.task,) if options.task else (LANGUAGE, PICTURES)
    language = [row for row in rows if row.task == LANGUAGE]
    length = max(row.length for row in language)
    if not length and LANGUAGE in tasks:
        length = found_length(language, clone)
    for row in language:
        row.length = length
    asked = [row for row in rows if row.task in tasks]
    planned = {(row.task, row.name): row for row in plan_at_commits(__file__, asked, clone)}
    rows = [planned.get((row.task, row.name), row) for row in rows]
    options.rows.write_text(json.dumps([asdict(row) for row in rows]), "utf-8")
    if options.output:
        options.output.write_text(page(rows), "utf-8")


if __name__ == "__main__":
    main()
