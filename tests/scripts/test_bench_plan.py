"""The benchmark of planning: which recipes it times, and what its table says of the seconds."""

from __future__ import annotations

from mpt.config.load import load_config
from mpt.planner.facts.gpus import find_gpu
from scripts.plans import bench_plan

CONFIG = {
    "model": {"name": "small_cnn", "image_size": 8},
    "dataset": "digits",
    "train": {"batch_size": 64},
}


def test_recipes_are_those_of_the_search_each_once() -> None:
    config = load_config({**CONFIG, "precision": "fp32"})
    recipes = [recipe.to_data() for recipe in bench_plan.all_recipes(config, find_gpu("rtx2060"))]
    assert len(recipes) > 40
    assert recipes[0] == config.to_data()
    assert all(one not in recipes[:index] for index, one in enumerate(recipes))
    assert {one["precision"]["mode"] for one in recipes} == {"fp32", "amp", "fp16-24bit"}
    assert [one["memory"].get("micro_batch") for one in recipes][-1] == {"size": 8}


def test_the_table_puts_processor_time_against_its_baseline() -> None:
    found = {
        "config": "c.yaml",
        "overrides": ["a=1"],
        "gpu": "rtx2060",
        "cores": 2,
        "load_before": 0.1,
        "workers": 2,
    }
    found |= {"traced": 10, "refused": 3}
    found |= {name: {"wall": 1.0, "processor": 2.0} for name in ("import", "lean")}
    found |= {
        name: {"wall": 2.0, "processor": 5.0} for name in ("plan", "large", "recipes", "torch")
    }
    lines = bench_plan.as_markdown(found).splitlines()
    assert lines[0].startswith("c.yaml a=1 for rtx2060, on 2 cores")
    assert "| `mpt plan`, whole process | 2.00 | 5.00 | ×2.50 importing torch |" in lines
    assert "| the same beyond importing torch | 1.00 | 3.00 | ×1.50 importing torch |" in lines
    assert (
        "| 10 recipes traced by 2 workers (3 more refused) | 2.00 | 5.00 | ×1.00 one plan |"
        in lines
    )
    assert "| a recipe of these | 0.20 | 0.50 |  |" in lines
    assert "| a trace, the shorter fake mode | 1.00 | 2.00 | ×0.40 torch's |" in lines
