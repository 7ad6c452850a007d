#!/usr/bin/env python
"""Small errors put into the code one at a time: which of them do the tests notice?

    nice -n 19 python scripts/mutations/mutations.py [--jobs 2] [--only rollback] [--again] [--write]

`scripts/mutations/mutations.yaml` has a mutation per entry: a file, a text that occurs in it once, what stands there
instead, and why anyone would want to know. Each is applied in a copy of the tree; the tests that reach the file by
imports run nearest first, up to the first that fails, within a limit of processor time. Mutations of code inside
functions are tried in groups on test files that are imported once (`scripts.mutations.mutations_group`), before the
rest and the survivors get a process of their own. A test counts as a kill only if it passes without the mutation. What
changes nothing that can be observed is marked `equivalent`, with the reason, and not run.

Results are kept below `--state`, so that a run goes on where it was stopped: a kill stands while the mutated file and
the test's are the same, a survivor of all chosen tests while their files are. `--write` writes the table of the page.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.command_line import described
from scripts.mutations.mutations_group import Trial, try_group
from scripts.mutations.mutations_swap import changed_functions
from scripts.mutations.mutations_tests import TestsOf

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "scripts" / "mutations" / "mutations.yaml"
PAGE = ROOT / "docs" / "benchmarks" / "mutations.md"
WARM = (
    *(
        "torch",
        "torch.export",
        "torch._decomp",
        "torch._meta_registrations",
        "numpy",
        "pydantic.json_schema",
        "yaml",
    ),
    *("PIL.Image", "typer.testing", "rich.console", "scipy", "matplotlib"),
)
"""What forks have imported already."""
PATTERNS = {
    "recovery": "recovery: its bounds, what holds after it, two in a row",
    "durability": "durability: order of writes, syncs and renames",
    "minority": "the minority case: the other class, the other direction, the other rank",
    "number": "defaults, bounds and published constants",
}
GROUP_FILES = 3
"""Test files that are tried on a mutation in a process with the others, before it gets one of its own."""


class MutationError(ValueError):
    """An entry of the list that does not fit the code."""


@dataclass(frozen=True)
class Mutation:
    """One small error."""

    file: str
    text: str
    becomes: str
    why: str
    """What a user would meet."""
    tests: tuple[str, ...] = ()
    """Test files to run before all others."""
    equivalent: str = ""
    """Why nothing that can be observed changes."""
    kind: str = "number"
    """What tests tend not to see of it, a word of `PATTERNS`."""

    @property
    def name(self) -> str:
        """A name that stays while the entry does."""
        return hashlib.sha256("\0".join((self.file, self.text, self.becomes)).encode()).hexdigest()[
            :12
        ]

    def apply(self, source: str) -> str:
        """Return the mutated source. Raises MutationError unless the text occurs exactly once."""
        count = source.count(self.text)
        if count != 1:
            raise MutationError(
                f"{self.file}: {self.text!r} occurs {count} times; it must occur once"
            )
        if self.becomes == self.text:
            raise MutationError(f"{self.file}: {self.text!r} is not changed")
        return source.replace(self.text, self.becomes)

    def line(self, source: str) -> int:
        """Return the line of the first character that changes."""
        pairs = zip(self.text, self.becomes)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return source.count("\n", 0, source.index(self.text) + same) + 1


def read_list(path: Path = LIST) -> list[Mutation]:
    """Return the mutations of a list. Raises MutationError for one that is there twice."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries: dict[str, list[dict[str, Any]]] = yaml.load(path.read_text("utf-8"), loader)
    found = [
        Mutation(file, **{**entry, "tests": tuple(entry.get("tests", ()))})
        for file, of_file in entries.items()
        for entry in of_file
    ]
    if len({one.name for one in found}) != len(found):
        raise MutationError("a mutation is listed twice")
    return found


def check_list(mutations: list[Mutation], root: Path = ROOT) -> list[str]:
    """Return the faults of the list: texts that have moved, files and tests that are gone.

    A system that is gone as a whole takes its mutations with it.
    """
    problems = []
    for one in mutations:
        if is_of_removed_system(one.file, root):
            continue
        try:
            one.apply((root / one.file).read_text("utf-8"))
        except (OSError, MutationError) as error:
            problems.append(str(error))
        problems += [
            f"{one.file}: {test} is gone" for test in one.tests if not is_there(test, root)
        ]
    return problems


def is_of_removed_system(file: str, root: Path) -> bool:
    """Return whether a file is one of a system whose folder is not there."""
    path = Path(file)
    is_of_system = path.is_relative_to("mpt/systems") and len(path.parts) > 3
    return is_of_system and not root.joinpath(*path.parts[:3]).is_dir()


@dataclass
class Result:
    """What became of a mutation, and of which files."""

    verdict: str
    """killed or survived."""
    by: str = ""
    """The test that failed."""
    files: int = 0
    tests: int = 0
    seconds: float = 0.0
    complete: bool = True
    """Whether all chosen tests ran."""
    hashes: dict[str, str] = field(default_factory=dict)

    def holds(self, root: Path) -> bool:
        """Return whether the files are still those that it was found with."""
        return all(digest_of(root / name) == digest for name, digest in self.hashes.items())


def digest_of(path: Path) -> str:
    """Return a short hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


class Campaign:
    """All mutations, run in copies of the tree."""

    def __init__(self, mutations: list[Mutation], state: Path, jobs: int, limit: float) -> None:
        from scripts.mutations.mutations_run import Lane

        self.mutations, self.state = mutations, state
        self.graph = TestsOf(ROOT)
        self.lanes = [Lane(state / f"lane-{number}", limit) for number in range(jobs)]
        self.sound: dict[str, str] = {}
        """Test -> the hash of its file with which it passes without any mutation."""
        self.took: dict[str, float] = {}
        """Test -> processor seconds."""
        for lane in self.lanes:
            lane.took = self.took
        self.tried: dict[str, str] = {}
        """Mutation and test file -> the hashes with which `is_tried` holds."""
        self.broken: list[str] = []
        """Tests that fail without any mutation."""
        self.results: dict[str, Result] = {}
        self.killers = killers_of(PAGE.read_text("utf-8")) if PAGE.exists() else {}
        """File and change -> the test that noticed it when the page was written."""
        self.read()

    @property
    def path(self) -> Path:
        """The file of results."""
        return self.state / "results.json"

    def read(self) -> None:
        """Take up what an earlier run has found."""
        if self.path.exists():
            kept = json.loads(self.path.read_text())
            self.results = {name: Result(**one) for name, one in kept["results"].items()}
            self.sound = kept["sound"]
            self.took.update(kept.get("took", {}))
            self.tried.update(kept.get("tried", {}))

    def save(self) -> None:
        """Keep what was found."""
        results = {name: asdict(one) for name, one in self.results.items()}
        text = json.dumps(
            {"results": results, "sound": self.sound, "took": self.took, "tried": self.tried}
        )
        self.path.with_suffix(".new").write_text(text)
        self.path.with_suffix(".new").replace(self.path)

    def pending(self) -> list[Mutation]:
        """Return the mutations without a result that still holds, those that nothing is known of first."""
        open_ones = [one for one in self.mutations if not one.equivalent and not self.stands(one)]
        return sorted(open_ones, key=lambda one: bool(self.killer_of(one)))

    def stands(self, mutation: Mutation) -> bool:
        """Return whether a result is known of these files; a survivor's of every test file that is chosen now.

        A survivor of the time limit is run again: other tests may come first by now.
        """
        result = self.results.get(mutation.name)
        if result is None or not result.holds(ROOT):
            return False
        if result.verdict == "killed":
            return True
        return result.complete and set(files_of(self.chosen(mutation))) <= result.hashes.keys()

    def killer_of(self, mutation: Mutation) -> str:
        """Return the test that noticed it last, here or when the page was written; "" if none is known."""
        if (before := self.results.get(mutation.name)) is not None:
            return name_of(before.by)
        return name_of(self.killers.get((mutation.file, change_of(mutation)), ""))

    def chosen(self, mutation: Mutation) -> list[str]:
        """Return the tests to run: what killed it last, what the entry names, then the nearest files."""
        wanted = [self.killer_of(mutation), *mutation.tests, *self.graph.nearest(mutation.file)]
        found = [name for name in dict.fromkeys(wanted) if is_there(name, ROOT)]
        return sorted(found, key=lambda name: self.is_tried(mutation, name.split("::")[0]))

    def run(self) -> None:
        """Run what is pending, and again what was noticed by a test that fails without any mutation too."""
        for name in WARM:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        import torch

        torch.set_num_threads(1)
        for lane in self.lanes:
            lane.fill(ROOT)
        self.run_group()
        self.run_all(self.pending())
        while self.doubted():
            self.run_all(self.pending())

    def run_group(self) -> None:
        """Try mutations on the test files that are likeliest to notice them, imported once for all of them."""
        trials = []
        for one in self.pending():
            source, tests = (ROOT / one.file).read_text("utf-8"), self.chosen(one)
            files = [file for file in files_of(tests) if not self.is_tried(one, file)][:GROUP_FILES]
            if files and changed_functions(source, one.apply(source), one.file) is not None:
                trials.append(
                    Trial(one.name, one.file, source, one.apply(source), tuple(files), tests[0])
                )
        by_name = {trial.name: (self.named(trial.name), trial) for trial in trials}
        for name, report in try_group(self.lanes[0], trials) if trials else ():
            mutation, trial = by_name[name]
            if report.failed or report.ended == "died":
                self.note(mutation, report)
                print(self.describe(mutation), flush=True)
            elif report.ended == "all":
                for file in trial.files:
                    digest = digest_of(ROOT / mutation.file) + digest_of(ROOT / file)
                    self.tried[f"{name} {file}"] = digest
        self.save()

    def named(self, name: str) -> Mutation:
        """Return a mutation by its name."""
        return next(one for one in self.mutations if one.name == name)

    def is_tried(self, mutation: Mutation, test_file: str) -> bool:
        """Return whether a file's tests have not noticed a mutation, in a process that had imported the code before."""
        digest = digest_of(ROOT / mutation.file) + digest_of(ROOT / test_file)
        return self.tried.get(f"{mutation.name} {test_file}") == digest

    def run_all(self, waiting: list[Mutation]) -> None:
        """Run mutations, as many at a time as there are lanes."""
        under_way: dict[int, tuple[Any, Mutation, str]] = {}
        free, done, total = list(self.lanes), 0, len(waiting)
        while waiting or under_way:
            while free and waiting:
                lane, mutation = free.pop(), waiting.pop(0)
                source = (ROOT / mutation.file).read_text("utf-8")
                lane.write(mutation.file, mutation.apply(source))
                lane.start(self.chosen(mutation), self.broken)
                under_way[lane.child] = lane, mutation, source
            ended = self.wait(under_way)
            lane, mutation, source = under_way.pop(ended)
            report = lane.end()
            lane.write(mutation.file, source)
            if report.running is None and report.failed is None:
                sys.exit(f"no test of {mutation.file} could begin; see {lane.folder / 'log'}")
            done += 1
            self.note(mutation, report)
            print(f"{done}/{total} {self.describe(mutation)}", flush=True)
            free.append(lane)

    def doubted(self) -> list[str]:
        """Run the tests that have noticed something without any mutation; forget what those that fail have noticed."""
        noticed = {
            name_of(one.by)
            for one in self.results.values()
            if one.by and not one.by.endswith("(collection)")
        }
        unproved = sorted(
            test
            for test in noticed
            if self.sound.get(test) != digest_of(ROOT / test.split("::")[0])
        )
        if not unproved:
            return []
        lane = self.lanes[0]
        lane.start(unproved, [], to_the_end=True)
        self.wait({lane.child: (lane, None, "")})
        report = lane.end()
        failed = [test for test in unproved if test in report.failures or test not in report.took]
        self.sound.update(
            {test: digest_of(ROOT / test.split("::")[0]) for test in unproved if test not in failed}
        )
        self.broken += failed
        self.results = {
            name: one for name, one in self.results.items() if name_of(one.by) not in failed
        }
        self.save()
        print(
            f"{len(unproved) - len(failed)} tests pass without any mutation, {len(failed)} do not",
            *failed,
            flush=True,
        )
        return failed

    def wait(self, under_way: dict[int, Any]) -> int:
        """Return the fork that has ended, or that hangs and was ended."""
        while True:
            for child, (lane, _, _) in under_way.items():
                if os.waitpid(child, os.WNOHANG)[0]:
                    return child
                if lane.is_hanging():
                    lane.end()
                    os.waitpid(child, 0)
                    lane.child = child
                    return child
            time.sleep(0.2)

    def note(self, mutation: Mutation, report: Any) -> None:
        """Keep a result."""
        files = self.chosen(mutation)
        by = report.failed or ""
        if report.ended == "died":
            by = f"{report.running} (does not end)"
        killer = name_of(by).split("::")[0]
        relevant = (
            [mutation.file, killer]
            if by
            else [mutation.file, *(name.split("::")[0] for name in files)]
        )
        self.results[mutation.name] = Result(
            "killed" if by else "survived",
            by,
            report.files,
            report.tests,
            round(report.seconds, 1),
            report.ended == "all" or bool(by),
            {name: digest_of(ROOT / name) for name in relevant},
        )
        self.save()

    def describe(self, mutation: Mutation) -> str:
        """Return a line about a result."""
        result = self.results[mutation.name]
        line = mutation.line((ROOT / mutation.file).read_text("utf-8"))
        tail = f"by {result.by}" if result.by else f"{result.tests} tests of {result.files} files"
        return f"{result.verdict:8} {mutation.file}:{line} {result.seconds:5.1f} s, {tail}"


def page_of(
    mutations: list[Mutation], results: dict[str, Result], command: str, root: Path = ROOT
) -> str:
    """Return the page of the docs."""
    rows = {kind: [one for one in mutations if kind_of(one, results) == kind] for kind in KINDS}
    told = ", ".join(f"{len(rows[kind])} {words}" for kind, words in KINDS.items() if rows[kind])
    seconds = sum(results[one.name].seconds for one in mutations if one.name in results)
    lines = [
        "# Mutations",
        "",
        f"Written by `{command}`, {datetime.date.today()}, commit {commit_of(root)}, torch {torch_version()}, "
        f"Python {platform.python_version()}, {platform.machine()}; no device is involved.",
        "",
        "Each row is a small error put into the code, alone. The tests that reach the file by imports were run,",
        "nearest first, up to the first that failed; it is named, and passes without the error. A survivor is an error",
        "that these let pass in time.",
        "",
        f"**{len(mutations)} mutations: {told}**, {seconds / 60:.0f} minutes of processor time.",
    ]
    lines += [
        "",
        "| what tests tend not to see | " + " | ".join(KINDS.values()) + " |",
        "|---|" + "---|" * len(KINDS),
    ]
    for pattern, words in PATTERNS.items():
        counts = [sum(one.kind == pattern for one in rows[kind]) for kind in KINDS]
        lines.append(f"| {words} | " + " | ".join(map(str, counts)) + " |")
    if rows["survived"]:
        lines += [
            "",
            "## Survived",
            "",
            "| line | change | what a user would meet | tests run |",
            "|---|---|---|---|",
        ]
        lines += [row(one, results, root) for one in rows["survived"]]
    if rows["equivalent"]:
        lines += [
            "",
            "## Equivalent",
            "",
            "| line | change | why nothing changes |",
            "|---|---|---|",
        ]
        lines += [row(one, results, root) for one in rows["equivalent"]]
    lines += [
        "",
        "## Killed",
        "",
        "| line | change | what a user would meet | by |",
        "|---|---|---|---|",
    ]
    lines += [row(one, results, root) for one in rows["killed"]]
    if rows["open"]:
        lines += [
            "",
            "## Not run",
            "",
            "| line | change | what a user would meet | |",
            "|---|---|---|---|",
        ]
        lines += [row(one, results, root) for one in rows["open"]]
    return "\n".join(lines) + "\n"


KINDS = {"killed": "killed", "survived": "survived", "equivalent": "equivalent", "open": "not run"}


def kind_of(mutation: Mutation, results: dict[str, Result]) -> str:
    """Return the part of the table that a mutation is in."""
    if mutation.equivalent:
        return "equivalent"
    return results[mutation.name].verdict if mutation.name in results else "open"


def killers_of(page: str) -> dict[tuple[str, str], str]:
    """Return the tests of a page's table of what was killed, by file and change."""
    found = {}
    for line in page.partition("## Killed")[2].splitlines():
        cells = [cell.replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip("| "))]
        if len(cells) == 4 and "tests/" not in cells[3] and "::" in cells[3]:
            found[cells[0].strip().rpartition(":")[0], cells[1].strip()] = "tests/" + cells[
                3
            ].strip(" `")
    return found


def name_of(by: str) -> str:
    """Return a test's name, or a file's, without what a report adds."""
    return by.removesuffix(" (does not end)").removesuffix(" (collection)")


def files_of(tests: list[str]) -> list[str]:
    """Return the files of tests, each once."""
    return list(dict.fromkeys(test.split("::")[0] for test in tests))


def is_there(test: str, root: Path) -> bool:
    """Return whether a test's file is there, and a function of its name in it."""
    file, _, name = test.partition("::")
    if not test or not (root / file).exists():
        return False
    return not name or f"def {name.partition('[')[0].rpartition('::')[2]}(" in (
        root / file
    ).read_text("utf-8")


def row(mutation: Mutation, results: dict[str, Result], root: Path) -> str:
    """Return a mutation's line of the table."""
    line = mutation.line((root / mutation.file).read_text("utf-8"))
    cells = [f"{mutation.file}:{line}", change_of(mutation)]
    kind = kind_of(mutation, results)
    if kind == "equivalent":
        cells.append(mutation.equivalent)
    else:
        cells.append(mutation.why)
        cells.append(tail_of(results.get(mutation.name)))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def tail_of(result: Result | None) -> str:
    """Return the test that has noticed, or how many have not."""
    if result is None:
        return ""
    if result.by:
        return f"`{result.by.removeprefix('tests/')}`"
    return f"{result.tests}" + ("" if result.complete else " (time limit)")


def change_of(mutation: Mutation) -> str:
    """Return both texts on a line, without what they have in common at the ends of lines."""
    ours, theirs = (text.strip("\n").splitlines() for text in (mutation.text, mutation.becomes))
    while ours and theirs and ours[0] == theirs[0]:
        ours, theirs = ours[1:], theirs[1:]
    while ours and theirs and ours[-1] == theirs[-1]:
        ours, theirs = ours[:-1], theirs[:-1]
    before, after = (" ⏎ ".join(part.strip() for part in lines) for lines in (ours, theirs))
    return f"`{before}` → `{after}`" if after else f"`{before}` dropped"


def commit_of(root: Path) -> str:
    """Return the commit, and whether files differ from it."""
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty=+changes"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    return run.stdout.strip() or "unknown"


def torch_version() -> str:
    """Return torch's version."""
    from importlib.metadata import version

    return version("torch")


def main() -> None:
    """Run, and print or write the table."""
    parser = described(__doc__)
    parser.add_argument(
        "--jobs", type=int, default=1, help="mutations that are tested at the same time"
    )
    parser.add_argument(
        "--limit", type=float, default=90.0, help="processor seconds of tests for each"
    )
    parser.add_argument("--only", default="", help="files whose path has this text")
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    parser.add_argument(
        "--state",
        type=Path,
        default=Path.home() / ".cache" / "mpt-mutations",
        help="results and copies",
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    mutations = read_list()
    problems = check_list(mutations)
    if problems:
        sys.exit("\n".join(problems))
    arguments.state.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.again:
        (arguments.state / "results.json").unlink(missing_ok=True)
    wanted = [one for one in mutations if arguments.only in one.file]
    campaign = Campaign(wanted, arguments.state, arguments.jobs, arguments.limit)
    campaign.run()
    campaign.results = {name: one for name, one in campaign.results.items() if one.holds(ROOT)}
    for one in wanted:
        if kind_of(one, campaign.results) == "survived":
            print(campaign.describe(one), "\n   ", one.why)
    counts = {kind: sum(kind_of(one, campaign.results) == kind for one in wanted) for kind in KINDS}
    print(", ".join(f"{count} {KINDS[kind]}" for kind, count in counts.items()))
    if arguments.write:
        command = f"python scripts/mutations/mutations.py --limit {arguments.limit:g} --write"
        PAGE.write_text(page_of(mutations, campaign.results, command), "utf-8")


if __name__ == "__main__":
    main()
