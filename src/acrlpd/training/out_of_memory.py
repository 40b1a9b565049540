"""When the first step does not fit into memory: an error that says what would fit."""

import contextlib
import re
from collections.abc import Iterator

import jax

from acrlpd.config import RLTrainConfig
from acrlpd.config.plan.accelerators import is_on_cpu
from acrlpd.config.plan.memory import estimate_memory
from acrlpd.config.plan.plan import NO_ACCELERATOR, as_flags, larger_accumulations, smallest_change

# A change is worth a try if it brings the predicted peak below this share of the present peak.
_NOTICEABLE = 0.9
# GPUs and TPUs say RESOURCE_EXHAUSTED. A CPU says this, too, or INTERNAL if a running program asks for memory.
_SAYS_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|Out of memory")


class OutOfMemoryError(ValueError):
    """The first update did not fit into device memory; with `next_accumulation` micro-batches it may fit."""

    def __init__(self, message: str, next_accumulation: int | None) -> None:
        super().__init__(message)
        self.next_accumulation = next_accumulation


@contextlib.contextmanager
def answer_out_of_memory(rl_config: RLTrainConfig, is_first_step: bool) -> Iterator[None]:
    """Turns the runtime's error at the first step into an error that names the smallest change that helps.

    A later step that fails has used up the state, so nothing could be tried again.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        if not is_first_step or not _SAYS_OUT_OF_MEMORY.search(reason):
            raise
        num_devices, on_cpu = jax.device_count(), is_on_cpu()
        peak = estimate_memory(rl_config, num_devices, on_cpu=on_cpu).peak
        changes = smallest_change(rl_config, num_devices, _NOTICEABLE * peak, on_cpu=on_cpu)
        advice = "No change of layout saves much memory: use more or larger devices"
        if changes is not None:
            advice = f"Smallest change that helps, by the plan: {as_flags(changes)}"
        steps = next(larger_accumulations(rl_config, num_devices), None)
        if steps is not None:
            advice += "; --auto_batch raises gradient_accumulation_steps by itself"
        if on_cpu:
            advice += f"\n{NO_ACCELERATOR}"
        raise OutOfMemoryError(f"the first step does not fit into memory: {reason}\n{advice}", steps) from error
