"""The types at the seams between a task, a precision mode, a memory trick and a data set.

One function performs a training step (`mpt.engine.step.step`). `mpt train` runs it on real tensors, `mpt plan` runs it
on fake ones and watches the allocations. So nothing behind these seams may look at a tensor's values on the way to or
inside a step (no `.item()`, no `if tensor:`), and the device is always an argument, never a global.

A part needs this one module: all types are named here.
"""

from mpt.seams.logged import log as log
from mpt.seams.phases import NOTHING as NOTHING
from mpt.seams.phases import Loss as Loss
from mpt.seams.phases import Phase as Phase
from mpt.seams.phases import StepStats as StepStats
from mpt.seams.precision import Numerics as Numerics
from mpt.seams.precision import Precision as Precision
from mpt.seams.precision import Scaler as Scaler
from mpt.seams.precision import has_dynamic_scale as has_dynamic_scale
from mpt.seams.precision import loss_scales as loss_scales
from mpt.seams.run import Adaptation as Adaptation
from mpt.seams.run import MemoryTrick as MemoryTrick
from mpt.seams.run import Run as Run
from mpt.seams.samples import IGNORED as IGNORED
from mpt.seams.samples import Batch as Batch
from mpt.seams.samples import Dataset as Dataset
from mpt.seams.samples import DataSpec as DataSpec
from mpt.seams.samples import FieldKind as FieldKind
from mpt.seams.samples import FieldSpec as FieldSpec
from mpt.seams.task import Evidence as Evidence
from mpt.seams.task import Inference as Inference
from mpt.seams.task import Task as Task
from mpt.seams.task import gather as gather
from mpt.seams.task_kinds import Exports as Exports
from mpt.seams.task_kinds import Game as Game
from mpt.seams.task_kinds import Legend as Legend
from mpt.seams.task_kinds import Plateau as Plateau
from mpt.seams.task_kinds import Samples as Samples
from mpt.seams.task_kinds import SecondOrder as SecondOrder
from mpt.seams.task_kinds import Tiles as Tiles
from mpt.seams.trick_kinds import BetweenSteps as BetweenSteps
from mpt.seams.trick_kinds import HoldsWeights as HoldsWeights
from mpt.seams.trick_kinds import TakesUpdates as TakesUpdates
