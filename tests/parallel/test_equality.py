"""Two ranks train what one process trains: same samples, same random inputs, same scales, equal within rounding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mpt.config.load import load_config
from mpt.data.loading.loader import Loader
from mpt.engine.building.build import build_run
from mpt.engine.state.moving_averages import follow_step
from mpt.engine.step.rank_inputs import draw_own, inputs_of
from mpt.engine.step.step import update
from mpt.parallel.local import full
from mpt.parallel.ranks import Ranks
from mpt.parallel.start import joined
from mpt.parallel.world import ALONE, World
from mpt.seams import Batch, Dataset, DataSpec, FieldSpec, Phase, Task, loss_scales
from tests.engine.parts import DIGITS, batch

from .forked import run_ranks

STEPS = 5
F16 = {"mode": "amp", "dtype": "float16", "init_scale": 2.0**40, "max_scale": 2.0**40}
"""Begins with overflows, so that steps are skipped and the scale falls."""
CLASSIFIER = {"name": "small_cnn", "features": 4, "image_size": 16}
TASKS: dict[str, dict[str, Any]] = {
    "classifier": {"model": CLASSIFIER, "parallel": {"sync_batchnorm": True}},
    "mixed": {"model": CLASSIFIER, "task": {"mixup": 0.4}, "parallel": {"sync_batchnorm": True}},
    "lsgan": {"model": {"name": "lsgan", "hidden": 16, "image_size": 16}},
    "wgan_gp": {"model": {"name": "wgan_gp", "hidden": 16, "image_size": 16}},
}


class Few(Dataset):
    """64 random samples."""

    spec = DIGITS
    samples = batch(7, 64)

    def __len__(self) -> int:
        return 64

    def fetch(self, indices: Any, epoch: int) -> Any:
        return {name: value[list(indices)] for name, value in self.samples.items()}


def settings(task: str, precision: Any, **sections: Any) -> dict[str, Any]:
    own = {
        key: {**TASKS[task].get(key, {}), **sections.pop(key, {})}
        for key in ("model", "task", "parallel")
    }
    return {
        **own,
        "dataset": "digits",
        "precision": precision,
        "optimizer": {"name": "sgd", "lr": 0.01},
        "train": {"steps": STEPS, "batch_size": 10},
        **sections,
    }


def steps(world: World, config: Any) -> dict[str, Any]:
    """Perform some steps as the loop does, and return what they came to."""
    data = Few()
    run = build_run(config, torch.device("cpu"), data.spec, world=world)
    count = config.train.batch_size
    stream = Loader(data, count, 0, place=world.place).batches()
    skipped, losses, in_backward, exchanged = [], [], 0, count_exchanged(world)
    for step in range(STEPS):
        inputs = inputs_of(run, next(stream), count)
        for phase in (phase for phase in run.phases if phase.is_due(step)):
            done = update(run, phase, inputs)
            skipped.append((step, phase.name, done.stats.skipped, done.finite))
            losses.append({name: float(value) for name, value in world.add(done.losses).items()})
            if world.size > 1:
                in_backward += world.exchange(phase.name, []).sent_in_backward
        follow_step(run, step)
    weights = [
        full(p).detach().float().flatten()
        for m in run.task.modules.values()
        for p in m.parameters()
    ]
    return {
        "weights": torch.cat(weights).tolist(),
        "skipped": skipped,
        "losses": losses,
        "scales": loss_scales(run.precision),
        "in_backward": in_backward,
        "exchanged": exchanged,
        "random": torch.get_rng_state().tolist(),
    }


def count_exchanged(world: World) -> list[int]:
    """Return a list that gets the bytes of every batch that ranks gather from now on."""
    found: list[int] = []
    if isinstance(world, Ranks):
        gather = world._gather_bytes

        def counting(received: torch.Tensor, sent: torch.Tensor) -> None:
            found.append(received.nbytes)
            gather(received, sent)

        world._gather_bytes = counting  # type: ignore[method-assign]
    return found


def on_rank(rank: int, data: dict[str, Any]) -> dict[str, Any]:
    config = load_config(data)
    with joined(config) as world:
        return steps(world, config)


def compare(
    data: dict[str, Any], size: int = 2
) -> tuple[dict[str, Any], list[dict[str, Any]], float]:
    """Return one process's result, the ranks', and how far their weights are from it."""
    ranks = run_ranks(size, on_rank, data)
    torch.set_num_threads(1)
    alone = steps(ALONE, load_config({**data, "parallel": {}}))
    assert all(isinstance(one, dict) for one in ranks), ranks
    assert all(one["weights"] == ranks[0]["weights"] for one in ranks), "the ranks' weights differ"
    difference = torch.tensor(ranks[0]["weights"]) - torch.tensor(alone["weights"])
    return alone, ranks, float(difference.abs().max())


@pytest.mark.parametrize("task", TASKS)
def test_two_ranks_train_what_one_process_trains_in_float32(task: str) -> None:
    alone, ranks, difference = compare(settings(task, "fp32"))
    assert difference < 2e-6  # float32 sums in another order
    assert ranks[0]["skipped"] == ranks[1]["skipped"] == alone["skipped"]
    for of_rank, of_one in zip(ranks[0]["losses"], alone["losses"], strict=True):
        assert of_rank == pytest.approx(of_one, rel=1e-4, abs=1e-5)
    assert ranks[0]["random"] == ranks[1]["random"] == alone["random"]
    assert ranks[0]["in_backward"] > 0, "no bucket left beside the backward"
    samples = settings(task, "fp32")["train"]["batch_size"]
    whole = samples * sum(value[0].nbytes for value in Few.samples.values())
    assert ranks[0]["exchanged"] == ([whole] * STEPS if task == "mixed" else [])


class Looking(Task):
    """A task that draws from what is in its samples, and says nothing of that."""

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        return batch


class Boasting(Looking):
    """One that says it does not, and does."""

    draws_by_shape = True  # type: ignore[assignment]

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        return {**batch, "image": batch["image"].flip(3)}


class Cutting(Looking):
    draws_by_shape = True  # type: ignore[assignment]

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        return {"latent": torch.randn(4, 2), **batch}


class Peeking(Looking):
    draws_by_shape = True  # type: ignore[assignment]

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        return {**batch, "first": batch["image"][:, 0]}


def test_a_draw_of_ones_own_is_given_the_whole_batch_unless_its_class_says_otherwise() -> None:
    assert not Looking().draws_by_shape
    assert not type("Below", (Looking,), {})().draws_by_shape
    assert Boasting().draws_by_shape
    assert not type("Below", (Boasting,), {"draw": Looking.draw})().draws_by_shape


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Cutting, "image has 10 samples, and what was drawn 4"), (Peeking, "looks into a field")],
)
def test_a_draw_that_looks_into_samples_that_are_not_there_is_found(
    kind: type[Task], said: str
) -> None:
    run, phase = looked_into(kind)
    with pytest.raises(AssertionError, match=said):
        draw_own(run, phase, {"image": torch.zeros(5, 1, 4, 4)})


def test_what_is_computed_from_samples_that_are_not_there_is_no_number() -> None:
    run, phase = looked_into(Boasting)
    drawn, _ = draw_own(run, phase, {"image": torch.zeros(5, 1, 4, 4)})
    assert drawn["image"].isnan().all()


def looked_into(kind: type[Task]) -> tuple[Any, Any]:
    config = load_config(settings("classifier", "fp32"))
    return SimpleNamespace(task=kind(), config=config, world=World()), SimpleNamespace(
        name="net", prepare=None
    )


def gather_one(rank: int) -> dict[str, Any]:
    """Gather a batch of one sample, of which the second rank has none."""
    with joined(load_config(settings("classifier", "fp32"))) as world:
        image = torch.arange(6.0).view(1, 2, 3)[: 1 - rank]
        return {name: value.tolist() for name, value in world.whole({"image": image}, 1).items()}


def test_a_rank_without_samples_gathers_those_of_the_others() -> None:
    assert run_ranks(2, gather_one) == [{"image": [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]]}] * 2


def gather_ragged(rank: int) -> dict[str, Any]:
    """Gather two samples whose ranks padded them to their own needs, 2 rows and 3 of the 5 that there may be."""
    spec = DataSpec({"boxes": FieldSpec((5, 1), torch.float32)}, 2)
    with joined(load_config(settings("classifier", "fp32"))) as world:
        run = SimpleNamespace(
            world=world, data=spec, task=SimpleNamespace(draws_by_shape=False), phases=[]
        )
        boxes = torch.full((1, 2 + rank, 1), 7.0 + rank)
        return {
            "boxes": inputs_of(cast("Any", run), {"boxes": boxes}, 2)["boxes"].flatten(1).tolist()
        }


def test_ranks_that_padded_to_different_lengths_gather_whole_samples() -> None:
    assert (
        run_ranks(2, gather_ragged)
        == [{"boxes": [[7.0, 7.0, 0.0, 0.0, 0.0], [8.0, 8.0, 8.0, 0.0, 0.0]]}] * 2
    )


@pytest.mark.parametrize(
    ("task", "precision", "rounding"),
    [
        ("lsgan", F16, 2e-3),
        ("wgan_gp", F16, 2e-3),
        ("lsgan", {**F16, "mode": "O2"}, 2e-3),
        ("lsgan", {**F16, "mode": "O1"}, 2e-3),
        ("lsgan", "bf16", 1e-2),
        ("wgan_gp", {"mode": "amp", "dtype": "bfloat16"}, 1e-2),
    ],
    ids=lambda value: value["mode"] if isinstance(value, dict) else None,
)
def test_scales_and_skipped_steps_are_those_of_one_process(
    task: str, precision: Any, rounding: float
) -> None:
    alone, ranks, difference = compare(settings(task, precision))
    assert ranks[0]["skipped"] == ranks[1]["skipped"] == alone["skipped"]
    assert ranks[0]["scales"] == ranks[1]["scales"] == alone["scales"]
    if precision != "bf16" and precision.get("dtype") == "float16":
        assert any(skipped for _, _, skipped, _ in alone["skipped"]), (
            "the scale did not overflow: a test of nothing"
        )
    assert difference < rounding
