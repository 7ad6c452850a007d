"""What the forks of `fault_battery.py` have done already when they begin: all that is read and not tried.

Imports, templates, the declared commands and the YAML of the runs are four fifths of a command that trains four steps.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import sys
import traceback
import warnings
from collections.abc import Iterable

import yaml

from scripts.faults import fault_battery_runs as runs


def import_everything() -> None:
    """Import what commands import, so that their forks need not."""
    import torch
    import torch._dynamo
    import typer.main

    import mpt.cli
    import mpt.commands.convert
    import mpt.commands.infer
    import mpt.commands.report
    import mpt.commands.train
    import mpt.engine.loop.assembly
    import mpt.engine.loop.loop
    import mpt.memory.recomputing.dry_run
    import mpt.nn.small_cnn
    import mpt.optim.adam
    import mpt.parallel.ranks
    import mpt.parallel.start
    import mpt.planner.server.beside
    import mpt.report.run_page.classification
    import mpt.report.run_page.evaluation_section
    import mpt.report.run_page.page
    from mpt.config.load import load_config

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mpt.report.run_page.page.draw_run = lambda record: {}
    # torch notes the place of every seed for a GPU that is not there
    traceback.format_stack = lambda *_, **__: []
    mpt.report.run_page.classification.draw_svg = (
        mpt.report.run_page.evaluation_section.draw_svg
    ) = lambda *_, **__: ""
    # What a process reads once is read here: the parts' sources, the templates, the declared commands.
    load_config(yaml.safe_load(runs.CONFIG))
    for name in mpt.report.run_page.page.environment().list_templates():
        mpt.report.run_page.page.environment().get_template(name)
    mpt.cli.make_app = functools.cache(mpt.cli.make_app)
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(mpt.cli.make_app())
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page it marks


def import_again(names: Iterable[str]) -> None:
    """Import what a command had imported when it ended, so that the next ones need not."""
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # a name that its package made up
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def parse_beforehand(texts: Iterable[str]) -> None:
    """Parse the YAML texts that commands are going to read, of which any other text is parsed when it is met."""
    parse = yaml.parse
    known = {text: tuple(parse(text, Loader=yaml.SafeLoader)) for text in texts}
    yaml.parse = lambda text, **options: known[text] if text in known else parse(text, **options)
