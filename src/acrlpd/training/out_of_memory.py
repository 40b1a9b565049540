"""When the first step does not fit: say what would, instead of a page of allocator output."""

import contextlib
from collections.abc import Iterator

import jax

from acrlpd.config import RLTrainConfig


class OutOfMemoryError(ValueError):
    """The first update did not fit into device memory. `next_accumulation` may."""

    def __init__(self, message: str, next_accumulation: int | None) -> None:
        super().__init__(message)
        self.next_accumulation = next_accumulation


@contextlib.contextmanager
def answer_out_of_memory(rl_config: RLTrainConfig, is_first_step: bool) -> Iterator[None]:
    """Turns the runtime's error into one that names the smallest change that helps.

    Only at the first step: later on the state is gone with the step that failed.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_first_step or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        steps = next_accumulation(rl_config, jax.device_count())
        reason = str(error).partition("\n")[0]
        if steps is None:
            advice = (
                "Micro-batches cannot get smaller: shard over more devices (fsdp.fsdp_devices), recompute "
                "more (model.remat_policy=full) or lower batch_size. `acrlpd plan` shows what each saves"
            )
        else:
            advice = (
                f"Smallest change with the same updates: --gradient_accumulation_steps {steps} (now "
                f"{rl_config.training.gradient_accumulation_steps}); --auto_batch does it by itself"
            )
        raise OutOfMemoryError(f"the first step does not fit into memory: {reason}\n{advice}", steps) from error


def next_accumulation(rl_config: RLTrainConfig, num_devices: int) -> int | None:
    """The next larger number of micro-batches that leaves whole samples on every device."""
    most = rl_config.batch_size // num_devices
    for steps in range(rl_config.training.gradient_accumulation_steps + 1, most + 1):
        if rl_config.batch_size % (steps * num_devices) == 0:
            return steps
    return None
