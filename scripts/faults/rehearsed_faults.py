"""The faults that `scripts/faults/rehearse_faults.py` brings back: first those that were mended before a first GPU."""

from __future__ import annotations

from dataclasses import dataclass

FAULTS_FILE = "tests/cuda_rehearsal/test_mended_faults.py"
CONFIGS_FILE = "tests/cuda_rehearsal/test_shipped_configs.py"
COMMANDS_FILE = "tests/cuda_rehearsal/test_commands.py"
REPORT_FILE = "tests/cuda_rehearsal/test_out_of_memory_report.py"


@dataclass(frozen=True)
class Fault:
    """What went wrong on a GPU, how it comes back, and what notices it."""

    name: str
    words: str
    file: str
    mended: str
    """Stands in the file once."""
    broken: str
    test: str
    says: str = "AssertionError"
    """A regular expression of what the test prints if it notices: anything else is a run that is broken otherwise."""
    limit: str = ""
    """Why no test here can notice it, where none can: `test` is then the nearest one, which passes."""


MENDED = (
    Fault(
        "resume",
        "a checkpoint was read onto the GPU; random states belong on the CPU, so every resume and rollback failed",
        "mpt/run/checkpoints/checkpoint.py",
        "    state = unpack(structure, tensors)\n",
        '    tensors = {name: tensor.to("cuda") for name, tensor in tensors.items()}\n'
        "    state = unpack(structure, tensors)\n",
        f"{FAULTS_FILE}::test_a_resume_restores_the_devices_random_state",
    ),
    Fault(
        "bf16-pure",
        "CUDA has no unscaling kernel for bfloat16 gradients",
        "mpt/precision/shared/scaler.py",
        "            if dtype == torch.bfloat16:  # GradScaler's",
        "            if False:  # GradScaler's",
        f"{FAULTS_FILE}::test_bfloat16_weights_train_under_a_static_scale",
        "not implemented for 'BFloat16'",
    ),
    Fault(
        "libraries' refusals",
        "out of memory as driver, cuBLAS and cuDNN say it was a traceback",
        "mpt/engine/step/faults.py",
        "any(words in str(error) for words in REFUSALS)",
        "any(words in str(error) for words in ())",
        f"{FAULTS_FILE}::test_a_refusal_of_memory_that_is_not_adapted_to_is_no_traceback",
        "CUBLAS_STATUS_ALLOC_FAILED",
    ),
    Fault(
        "cuda:9",
        "a GPU that is not there was a traceback",
        "mpt/engine/building/devices.py",
        "    if (device.index or 0) >= (count := torch.accelerator.device_count()):",
        "    if (count := 0):",
        f"{FAULTS_FILE}::test_a_card_that_is_not_there_is_refused_in_words",
        "invalid device ordinal",
    ),
    Fault(
        "cuda:1",
        "a run on the second GPU opened a context on the first",
        "mpt/engine/building/devices.py",
        "    accelerator.select(device)\n",
        "",
        f"{FAULTS_FILE}::test_a_run_on_the_second_card_opens_no_context_on_the_first",
    ),
    Fault(
        "--exact",
        "another kind of GPU did not count among what makes a resume inexact",
        "mpt/engine/loop/saving.py",
        '{"gpu": accelerator.name_of(run.device)}',
        "{}",
        f"{FAULTS_FILE}::test_an_exact_resume_takes_no_other_card",
    ),
    Fault(
        "hooks on optimizers",
        "tricks that look for a network's optimizer found the one that another trick had replaced",
        "mpt/engine/building/build.py",
        "        optimizers = {name: new[old] for name, old in optimizers.items()}\n",
        "",
        f"{FAULTS_FILE}::test_gradients_are_released_where_another_trick_replaces_the_optimizers[cpu_optimizer: {{}}]",
        "StopIteration",
    ),
    Fault(
        "half's memory",
        "`infer --half` counted the float32 run's weights into half's peak",
        "mpt/inference/measurement.py",
        "        return own + accelerator.peaks(run.device)[0] - before\n",
        "        return accelerator.peaks(run.device)[0]\n",
        f"{FAULTS_FILE}::test_half_inference_counts_its_own_weights_alone",
    ),
    Fault(
        "half on a CPU",
        "`infer --half --device cpu` opened a context on the GPU",
        "mpt/workflows/inferring/half_compared.py",
        "    accelerator.synchronize(device)\n    accelerator.empty_cache(device)\n",
        '    accelerator.synchronize(torch.device("cuda"))\n    accelerator.empty_cache(torch.device("cuda"))\n',
        f"{FAULTS_FILE}::test_half_inference_on_a_cpu_touches_no_gpu",
    ),
    Fault(
        "compared memory",
        "modes were compared by the evaluation's peak, which is the same in every mode",
        "mpt/report/reading/run_record.py",
        '        return number(self.memory.get("steps_peak_bytes"), 0.0) or self.peak_bytes\n',
        "        return self.peak_bytes\n",
        f"{FAULTS_FILE}::test_a_comparison_compares_the_steps_memory_and_not_the_evaluations",
    ),
    Fault(
        "first NaN",
        "the search for the first NaN took memory that was not written yet for one",
        "mpt/engine/recovery/diagnosis.py",
        "is_computed = self.finding is None and func._overloadpacket not in WITHOUT_VALUES",
        "is_computed = self.finding is None",
        f"{FAULTS_FILE}::test_the_first_nan_is_not_looked_for_in_memory_that_was_not_written",
    ),
    Fault(
        "share of the memory",
        "the report of a run without memory asked for the process's share by a device without a number",
        "mpt/accelerator.py",
        "get_per_process_memory_fraction(index_of(device))",
        "get_per_process_memory_fraction(device)",
        f"{REPORT_FILE}::test_the_budget_is_what_others_leave_and_the_process_may_have",
        "with a specified index",
    ),
    Fault(
        "calibration",
        "a card that is not in the planner's table could not be calibrated",
        "mpt/planner/facts/calibration.py",
        "        if self.memory_bytes:\n",
        "        if False:\n",
        f"{COMMANDS_FILE}::test_a_card_that_is_not_in_the_table_is_calibrated",
    ),
    Fault(
        "what an evaluation left",
        "a cuBLAS workspace that an evaluation left was counted among the steps' memory",
        "mpt/engine/state/memory.py",
        "                torch._C._cuda_clearCublasWorkspaces()\n",
        "",
        f"{CONFIGS_FILE}::test_what_an_evaluation_takes_is_not_the_steps",
    ),
    Fault(
        "augmentation's copies",
        "StyleGAN2's augmentation made a matrix from a list, for which the host waits in every phase",
        "mpt/systems/stylegan2/nn/shared/adaptive_augment.py",
        "    cross = (identity.roll(1, 0) - identity.roll(2, 0)) / math.sqrt(3)\n",
        "    cross = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]], device=image.device) / math.sqrt(3)\n",
        f"{CONFIGS_FILE}::test_a_config_trains_as_planned_and_without_waiting[stylegan2_16]",
    ),
    Fault(
        "warping's corners",
        "DAIN's warping made its corners from a list, for which the host waits",
        "mpt/systems/dain/nn/operators/warping.py",
        "    corners = torch.arange(2, device=flow_b2hw.device, dtype=torch.int32)",
        "    corners = torch.tensor([0, 1], device=flow_b2hw.device, dtype=torch.int32)",
        f"{CONFIGS_FILE}::test_a_config_trains_as_planned_and_without_waiting[dain_demo]",
    ),
)
