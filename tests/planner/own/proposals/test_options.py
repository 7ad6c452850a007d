"""Options of a script's own command line as changes that are proposed."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction
from pathlib import Path

import pytest

from mpt.planner.client.session import Session
from mpt.planner.own.proposals.accumulation import find_accumulation
from mpt.planner.own.proposals.options import find_words
from mpt.planner.own.text.command_lines import Parsed, noting_options
from tests.planner.own.test_scripts import planned, script_of

SCRIPT = """
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--data", nargs="+")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--grad-checkpointing", type=int, default=0)
parser.add_argument("--use_8bit_adam", action="store_true")
args = parser.parse_args()
if args.use_8bit_adam:
    raise ImportError("the library for it is not here")
linear = torch.nn.Linear
layers = [torch.nn.Sequential(linear(64, 256), torch.nn.GELU(), linear(256, 64)) for _ in range(6)]
network = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(network.parameters())
for _ in range(4):
    batch = torch.rand(args.batch_size * 512, 64, device="cuda")
    with torch.autocast("cuda", enabled=args.amp):
        found = batch
        if args.grad_checkpointing:
            for layer in network:
                found = torch.utils.checkpoint.checkpoint(layer, found, use_reentrant=False)
        else:
            found = network(batch)
        loss = found.float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_script_is_proposed_the_options_that_its_author_provided(
    session: Session, tmp_path: Path
) -> None:
    script = script_of(tmp_path, SCRIPT)
    given = ("--data", "one", "two", "--batch-size", "32")
    found = planned(session, script, *given)
    recomputed, half = {"recompute": "--grad-checkpointing 1"}, {"autocast": "--amp"}
    ways = {tuple(way.words.values()): way for way in found.ways if way.words and not way.lines}
    assert [way.words for way in ways.values() if way.exact] == [recomputed]
    assert {(*half.values(),), (*recomputed.values(), *half.values())} <= ways.keys()
    for words, way in ways.items():
        written = {"where": str(script), "words": [*given, *" ".join(words).split()]}
        same = session.plan_own(written, {}, with_changes=False).get()
        assert same.plan.reserved == way.plan.reserved < found.plan.reserved
        assert same.plan.step_seconds == way.plan.step_seconds
    (changed,) = {one for way in ways.values() for one in way.changes if one[0] == "autocast"}
    assert changed[1] == (("an option of its own, for its command line", ("--amp",)),)


def test_an_option_that_cannot_be_taken_is_written_into_the_text_instead(
    session: Session, tmp_path: Path
) -> None:
    found = planned(session, script_of(tmp_path, SCRIPT), "--amp", "--grad-checkpointing", "1")
    assert not any(way.words for way in found.ways)  # switched on already, or refused


def test_an_autocast_that_is_off_is_named_by_its_line(session: Session, tmp_path: Path) -> None:
    text = SCRIPT.replace('parser.add_argument("--amp", action="store_true")\n', "")
    line = text.splitlines().index('    with torch.autocast("cuda", enabled=args.amp):') + 1
    text = text.replace("enabled=args.amp", "enabled=False")
    notes = planned(session, script_of(tmp_path, text)).plan.notes
    assert any(f"its autocast is off at train.py:{line};" in one for one in notes)
    assert not any(
        "autocast" in one for one in planned(session, script_of(tmp_path, SCRIPT)).plan.notes
    )


OTHERWISE_NAMED = """
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--use-checkpoint", action="store_true", help="a network that is trained already")
parser.add_argument("--half", action="store_true", help="keep the data in half")
args = parser.parse_args()
width = 16 if args.use_checkpoint else 512
network = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.Linear(width, 8)).cuda()
optimizer = torch.optim.SGD(network.parameters(), 0.1)
data = torch.rand(2**20, 64, device="cuda", dtype=torch.half if args.half else torch.float)
for batch in data.split(1024):
    optimizer.zero_grad()
    network(batch.float()).square().mean().backward()
    optimizer.step()
"""


def test_an_option_that_means_something_else_than_its_name_is_not_proposed(
    session: Session, tmp_path: Path
) -> None:
    found = planned(session, script_of(tmp_path, OTHERWISE_NAMED))
    assert [way.words for way in found.ways if way.words] == []


def test_what_torch_switches_off_when_it_recomputes_is_no_autocast_of_the_script(
    session: Session, tmp_path: Path
) -> None:
    text = SCRIPT.replace('    with torch.autocast("cuda", enabled=args.amp):', "    if True:")
    text = text.replace('parser.add_argument("--amp", action="store_true")\n', "")
    found = planned(session, script_of(tmp_path, text), "--grad-checkpointing", "1")
    assert not any("autocast is off" in one for one in found.plan.notes)


def parser_of(**options: object) -> ArgumentParser:
    parser = ArgumentParser()
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)  # type: ignore[arg-type]
    return parser


CHOICES = {"choices": ["no", "fp16", "bf16"], "default": "no"}
OPTIM = {"choices": ["adamw_torch", "adamw_bnb_8bit"], "default": "adamw_torch"}


@pytest.mark.parametrize(
    ("options", "given", "bfloat16", "float16"),
    [
        (
            {"fp16": {"action": "store_true"}, "bf16": {"action": "store_true"}},
            [],
            "--bf16",
            "--fp16",
        ),
        (
            {"fp16": {"action": "store_true"}, "bf16": {"action": "store_true"}},
            ["--fp16"],
            "",
            "",
        ),
        ({"mixed_precision": CHOICES}, [], "--mixed_precision bf16", "--mixed_precision fp16"),
        ({"mixed_precision": CHOICES}, ["--mixed_precision", "fp16"], "", ""),
        ({"amp": {"action": BooleanOptionalAction}}, [], "--amp", "--amp"),
        ({"amp": {"type": bool, "default": False}}, [], "--amp True", "--amp True"),
        ({"bf16": {"nargs": "?", "const": True, "type": bool}}, [], "--bf16", ""),
        ({"precision": {"default": "fp32"}}, [], "--precision bf16", "--precision fp16"),
        ({"precision": {"default": 32, "type": int}}, [], "", ""),
        ({"precision": {"default": "bf16"}}, [], "", ""),
        ({"optim": OPTIM}, [], "--optim adamw_bnb_8bit", "--optim adamw_bnb_8bit"),
        ({"optim": {**OPTIM, "default": "sgd"}}, [], "", ""),
        ({"checkpoint": {"default": None}, "resume": {"action": "store_true"}}, [], "", ""),
        ({"use-checkpoint": {"action": "store_true"}}, [], "--use-checkpoint", "--use-checkpoint"),
        ({"no-amp": {"action": "store_false"}}, [], "", ""),
    ],
)
def test_options_are_known_by_their_names(
    options: dict[str, object], given: list[str], bfloat16: str, float16: str
) -> None:
    parser = parser_of(**options)
    parsed = [Parsed(parser, parser.parse_args(given))]
    for half, words in (("bfloat16", bfloat16), ("float16", float16)):
        assert [" ".join(one) for one in find_words(parsed, half).values()] == [words] * bool(words)


def test_options_of_click_are_known_too() -> None:
    click = pytest.importorskip("click")
    command = click.Command(
        "train",
        params=[
            click.Argument(["folder"]),
            click.Option(["--fp16/--no-fp16"], default=False),
            click.Option(["--optim"], type=click.Choice(["adam", "adam8bit"]), default="adam"),
            click.Option(["--use-checkpoint"], type=bool, default=False),
            click.Option(["--epochs"], type=int, default=3),
        ],
    )
    noted: list[Parsed] = []
    with noting_options((), noted):
        command.make_context("train", ["here"])
        command.make_context("train", ["here", "--fp16"])
    first, second = (find_words([one], "float16") for one in noted)
    assert first == {
        "recompute": ("--use-checkpoint", "True"),
        "autocast": ("--fp16",),
        "optimizer": ("--optim", "adam8bit"),
    }
    assert "autocast" not in second


NETWORK = """
import torch

def train(amp, checkpointing=0, size=64):
    linear = torch.nn.Linear
    layers = [torch.nn.Sequential(linear(64, 256), torch.nn.GELU(), linear(256, 64)) for _ in range(6)]
    network = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for _ in range(4):
        found = torch.rand(size * 64, 64, device="cuda")
        with torch.autocast("cuda", enabled=bool(amp)):
            for layer in network:
                if checkpointing:
                    found = torch.utils.checkpoint.checkpoint(layer, found, use_reentrant=False)
                else:
                    found = layer(found)
            loss = found.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
TYPER = """
import typer

def main(folder: str, amp: bool = False, gradient_checkpointing: bool = False):
    train(amp, gradient_checkpointing)

typer.run(main)
"""
FIRE = """
import fire

class Trainer:
    def __init__(self, size=64):
        self.size = size

    def fit(self, folder, amp=False, gradient_checkpointing=0):
        train(amp, gradient_checkpointing, self.size)

fire.Fire(Trainer)
"""
HYDRA = """
import hydra
from omegaconf import OmegaConf

OmegaConf.register_new_resolver("double", lambda x: 2 * x)

@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    train(cfg.trainer.precision != 32, cfg.model.use_checkpoint, cfg.size)

main()
"""
HYDRA_CONFIG = """
size: ${double:32}
trainer:
  precision: 32
model:
  use_checkpoint: false
"""
JSONARGPARSE = """
from typing import Literal

import jsonargparse

def main(folder: str, precision: Literal["32", "bf16-mixed"] = "32", use_checkpoint: bool = False):
    train(precision != "32", use_checkpoint)

jsonargparse.auto_cli(main, as_positional=True)
"""


@pytest.mark.parametrize(
    ("library", "text", "given", "autocast", "recompute"),
    [
        ("typer", TYPER, ["here"], "--amp", "--gradient-checkpointing"),
        ("fire", FIRE, ["--size=32", "fit", "here"], "--amp True", "--gradient_checkpointing 1"),
        (
            "hydra",
            HYDRA,
            [],
            "trainer.precision=bf16-mixed",
            "model.use_checkpoint=True",
        ),
        (
            "jsonargparse",
            JSONARGPARSE,
            ["here"],
            "--precision bf16-mixed",
            "--use_checkpoint True",
        ),
    ],
)
def test_other_ways_to_read_a_command_line_are_known(
    session: Session,
    tmp_path: Path,
    library: str,
    text: str,
    given: list[str],
    autocast: str,
    recompute: str,
) -> None:
    pytest.importorskip(library)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(HYDRA_CONFIG, encoding="utf-8")
    found = planned(session, script_of(tmp_path, NETWORK + text), *given)
    words = [way.words for way in found.ways]
    assert {"autocast": autocast} in words
    assert {"recompute": recompute} in words


ACCUMULATING = """
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int, default=64)
parser.add_argument("--accum_iter", type=int, default=2)
parser.add_argument("--divides", action="store_true", help="the batch among the parts that are accumulated")
args = parser.parse_args()
linear = torch.nn.Linear
network = torch.nn.Sequential(linear(64, 256), torch.nn.BatchNorm1d(256), linear(256, 64)).cuda()
optimizer = torch.optim.SGD(network.parameters(), 0.1)
size = args.batch_size // args.accum_iter if args.divides else args.batch_size
args.batch_size //= 2  # as many do, for each of several processes
for step in range(100):
    network(torch.rand(size * 1024, 64, device="cuda")).square().mean().backward()
    if (step + 1) % args.accum_iter == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_batch_that_does_not_fit_is_divided_and_accumulated_by_the_options_of_the_script(
    session: Session, tmp_path: Path
) -> None:
    script = script_of(tmp_path, ACCUMULATING)
    source = {"where": str(script), "words": ["-b", "32"]}
    budget = 580 * 2**20
    found = session.plan_own(source, {}, budget_bytes=budget).get()
    (way,) = [one for one in found.ways if "accumulate" in one.words]
    assert found.plan.fits is False
    assert way.plan.fits
    assert way.words == {"accumulate": "-b 16 --accum_iter 4"}
    assert way.note == "the same samples, of which BatchNorm sees fewer at a time"
    written = {"where": str(script), "words": ["-b", "32", *way.words["accumulate"].split()]}
    same = session.plan_own(written, {}, with_changes=False, budget_bytes=budget).get()
    assert same.plan.reserved == way.plan.reserved
    assert not any("accumulate" in one.words for one in planned(session, script).ways)
    source["words"] += ["--divides"]
    found = session.plan_own(source, {}, budget_bytes=500 * 2**20).get()
    assert not any("accumulate" in one.words for one in found.ways)


@pytest.mark.parametrize(
    ("options", "given", "words"),
    [
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
            [],
            "--per_device_train_batch_size 4 --gradient_accumulation_steps 2",
        ),
        ({"bs": 8, "batch_size": 6, "accumulate": None}, ["--bs=8"], "--bs 4 --accumulate 2"),
        ({"data.bs": 8, "trainer.accumulate_grad_batches": 2}, [], "--data.bs 4 --trainer.accumulate_grad_batches 4"),
        ({"batch_size": 7, "update_freq": 1}, [], None),
        ({"batch_size": 8, "accuracy": 1, "acc": 1, "accumulator": 1}, [], None),
    ],
)  # fmt: skip
def test_options_for_smaller_batches_are_known_by_their_names(
    options: dict[str, int | None], given: list[str], words: str | None
) -> None:
    found = find_accumulation([Parsed.of(options)], given)
    changed = None if found is None else found.words(2)
    assert (changed and " ".join(changed)) == words
