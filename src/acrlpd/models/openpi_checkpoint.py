"""Reads and writes openpi's parameter directories.

A directory is an Orbax PyTree item (OCDBT over zarr v2) whose tree is {"params": ...}. openpi's trainer
writes each leaf under one more key, "value". Both forms are read; the form with "value" is written. Arrays go
from the files straight into the sharding of the model that receives them.
"""

import contextlib
import logging
import pathlib
import re
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from acrlpd.checksums import CHECKSUMS_FILE, verified
from acrlpd.installation import install_command
from acrlpd.models.families.base import PolicyConfig

logger = logging.getLogger(__name__)

LORA = ".*lora.*"


class OpenPICheckpointError(ValueError):
    """A parameter directory cannot be used; the message says why."""


def load_pi0_weights_from_openpi(
    path: epath.PathLike, params: nnx.State, *, missing_regex: str | None = LORA
) -> nnx.State:
    """Returns `params` with its values replaced by those of an openpi checkpoint.

    `path` is a `params` directory or the step directory around it. Every leaf keeps the dtype and the
    sharding that it has in `params`. The leaves of `params` may be arrays; leaves that the checkpoint has may be
    `jax.ShapeDtypeStruct`. Leaves that the checkpoint lacks keep their value if their '/'-joined name
    matches `missing_regex` (by default LoRA adapters); any other missing leaf is an error.
    """
    directory = find_params_directory(path)
    with _verified(directory):  # The checks of large files go on while the values are looked at.
        stored, targets = _stored_leaves(directory), flatten_params(params)
        _refuse_mismatches(directory, {name: meta.shape for name, (_, meta) in stored.items()}, targets, missing_regex)
        wanted = {stored[name][0]: leaf for name, leaf in targets.items() if name in stored}
        restored = restore_arrays(directory, wanted)
        return fill_params(params, {name: restored[stored[name][0]] for name in targets if name in stored}, directory)


def restore_arrays(
    directory: epath.PathLike, wanted: Mapping[tuple[str, ...], Any]
) -> dict[tuple[str, ...], jax.Array]:
    """Reads some arrays of a directory by their key paths, into the dtypes and shardings of the leaves of `wanted`."""
    arguments = ocp.args.PyTreeRestore(
        item=unflatten_dict(dict.fromkeys(wanted, 0)),
        restore_args=unflatten_dict(
            {key: ocp.ArrayRestoreArgs(sharding=sharding_of(leaf), dtype=leaf.dtype) for key, leaf in wanted.items()}
        ),
        partial_restore=True,
    )
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            return flatten_dict(checkpointer.restore(directory, arguments))
    except Exception as error:  # Orbax raises plain Exception around what tensorstore found
        reason = str(error).splitlines()[0].partition(" [tensorstore_spec")[0]
        raise OpenPICheckpointError(f"{directory} is damaged or incomplete: {reason}") from error


def _verified(directory: epath.Path) -> contextlib.AbstractContextManager[None]:
    """Checks the files of a directory while they are read, if the directory is on this machine and has checksums.

    acrlpd writes checksums, openpi does not. To check the files of a remote directory would be to fetch them twice.
    """
    local = pathlib.Path(directory)
    if not (local / CHECKSUMS_FILE).exists():
        return contextlib.nullcontext()
    return verified(local, share=(jax.process_index(), jax.process_count()))


def load_paligemma_weights(path: epath.PathLike, params: nnx.State) -> nnx.State:
    """Fills PaliGemma's part of `params` from big_vision's npz (`params/img/...`, `params/llm/...`)."""
    file = find_paligemma_file(path)
    loaded, targets = _read_paligemma(file), flatten_params(params)
    if not loaded.keys() & targets.keys():  # any parameter may be missing, but a file that has none of them is wrong
        raise OpenPICheckpointError(
            f"{file} has nothing of PaliGemma: expected arrays such as params/img/embedding/kernel, found "
            f"{', '.join(sorted(loaded)[:3]) or 'none under params/'}"
        )
    _refuse_mismatches(file, {name: value.shape for name, value in loaded.items()}, targets, missing_regex=".*")
    placed = {
        name: jax.device_put(value.astype(targets[name].dtype), sharding_of(targets[name]))
        for name, value in loaded.items()
        if name in targets
    }
    return fill_params(params, placed, file)


def find_paligemma_file(path: epath.PathLike) -> epath.Path:
    return _find(path, "PaliGemma weights such as pt_224.npz")


def _read_paligemma(file: epath.Path) -> dict[str, np.ndarray]:
    """The arrays of an npz under params/, by the names they have in the policy."""
    prefix = "params/"
    try:
        with file.open("rb") as stream:
            if not zipfile.is_zipfile(stream):
                raise zipfile.BadZipFile("its table of contents is missing")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as arrays:
                names = [name for name in arrays if name.startswith(prefix)]
                loaded = {"PaliGemma/" + name.removeprefix(prefix): arrays[name] for name in names}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise OpenPICheckpointError(f"{file} is damaged, incomplete or not an npz: {error}") from error
    odd = {name: value.dtype for name, value in loaded.items() if value.dtype.kind != "f"}
    if odd:  # NumPy has no bfloat16 and reads such arrays as bytes
        name, dtype = next(iter(odd.items()))
        raise OpenPICheckpointError(f"{file}: {name} is {dtype}, not float; use the float32 or float16 file")
    return loaded


def save_openpi_pi0_checkpoint(params: nnx.State, directory: epath.PathLike) -> None:
    """Writes `directory`/params, which stock openpi loads. The directory appears when it is complete."""
    target = epath.Path(directory).absolute() / "params"
    if target.exists():
        raise OpenPICheckpointError(f"{target} exists already; choose another directory")
    flat = {("params", *name.split("/"), "value"): leaf for name, leaf in flatten_params(params).items()}
    with ocp.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=False) as checkpointer:
        checkpointer.save(target, unflatten_dict(flat))


def verify_openpi_checkpoint_compatibility(path: epath.PathLike, config: PolicyConfig) -> list[str]:
    """What differs between the checkpoint at `path` and the parameters of the model that `config` describes.

    The list is empty if the checkpoint has exactly these parameters.
    """
    abstract = nnx.state(nnx.eval_shape(lambda: config.create(jax.random.key(0))), nnx.Param)
    try:
        stored = _stored_leaves(find_params_directory(path))
    except OpenPICheckpointError as error:
        return [str(error)]
    return shape_differences({name: meta.shape for name, (_, meta) in stored.items()}, flatten_params(abstract))


def shape_differences(stored: Mapping[str, tuple[int, ...]], targets: Mapping[str, Any]) -> list[str]:
    """What differs between the arrays of a checkpoint and those of a model, by name and shape."""
    problems = mismatches(stored, targets, missing_regex=None)
    return problems + [f"{name}: the model has no such parameter" for name in sorted(set(stored) - set(targets))]


def _find(path: epath.PathLike, expected: str) -> epath.Path:
    found = epath.Path(path).expanduser()
    try:
        exists = found.exists()
    except ImportError as error:  # gs:// and s3:// need a library of their own
        raise OpenPICheckpointError(
            f"{found} cannot be read from here: {error}. Install the package (for gs:// {install_command('gcs')}), or "
            "copy the checkpoint to this machine and set weight_loader.path to the copy"
        ) from error
    if not exists:
        raise OpenPICheckpointError(f"{found} does not exist: expected {expected}")
    return found


def find_params_directory(path: epath.PathLike) -> epath.Path:
    """The `params` directory of an openpi checkpoint; `path` is this directory or the directory around it."""
    given = _find(path, "the directory of a checkpoint, written by openpi or by a run; weight_loader.path names it")
    for candidate in (given, given / "params"):
        if (candidate / "_METADATA").exists():
            return candidate.absolute()
    raise OpenPICheckpointError(
        f"{given} is not a complete openpi checkpoint: neither it nor {given}/params has a _METADATA file. Expected a "
        f"step directory such as .../<exp_name>/29999, or the params directory inside it"
    )


def _stored_leaves(directory: epath.Path) -> dict[str, tuple[tuple[str, ...], Any]]:
    """'/'-joined parameter name -> (key path in the file, metadata)."""
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.metadata(directory).item_metadata.tree
    except (ValueError, KeyError, OSError, AttributeError) as error:
        raise OpenPICheckpointError(f"{directory} cannot be read, it may be partly written: {error}") from error
    leaves = [
        (tuple(str(getattr(key, "key", key)) for key in path), meta)
        for path, meta in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))[0]
    ]
    if not leaves or any(path[0] != "params" for path, _ in leaves):
        raise OpenPICheckpointError(
            f"{directory}: expected one tree named 'params'; found {sorted({p[0] for p, _ in leaves})}"
        )
    wrapped = all(path[-1] == "value" for path, _ in leaves)
    return {"/".join(path[1:-1] if wrapped else path[1:]): (path, meta) for path, meta in leaves}


def mismatches(
    stored: Mapping[str, tuple[int, ...]], targets: Mapping[str, Any], missing_regex: str | None
) -> list[str]:
    """Reasons why the stored leaves cannot fill the targets; stored leaves without a target are accepted."""
    problems = []
    for name, leaf in targets.items():
        if name not in stored:
            if not re.fullmatch(missing_regex or "", name):
                problems.append(f"{name}: missing from the checkpoint")
            elif isinstance(leaf, jax.ShapeDtypeStruct):
                problems.append(f"{name}: missing from the checkpoint, and the model was not initialised")
        elif tuple(stored[name]) != tuple(leaf.shape):
            problems.append(f"{name}: shape {tuple(stored[name])} in the checkpoint, {tuple(leaf.shape)} in the model")
    return problems


def _refuse_mismatches(
    source: epath.Path, stored: Mapping[str, tuple[int, ...]], targets: Mapping[str, Any], missing_regex: str | None
) -> None:
    """Raises an error if leaves do not fit the targets or are extra adapters. Other extra leaves are dropped."""
    problems = mismatches(stored, targets, missing_regex)
    unexpected = sorted(set(stored) - set(targets))
    adapters = [name for name in unexpected if re.fullmatch(LORA, name)]
    problems += [f"{name}: an adapter that the model has no place for; use a LoRA variant" for name in adapters]
    if problems:
        raise OpenPICheckpointError(f"{source} does not fit the model:\n  " + "\n  ".join(problems))
    if unexpected:
        logger.warning("dropping parameters that the model does not have: %s", ", ".join(unexpected))


def sharding_of(leaf: Any) -> jax.sharding.Sharding:
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])


def fill_params(params: nnx.State, values: Mapping[str, jax.Array], source: epath.Path) -> nnx.State:
    """A new state with these values, which must be finite; other leaves stay as they are."""
    finite = jax.device_get(jax.jit(lambda tree: {k: jnp.isfinite(x).all() for k, x in tree.items()})(dict(values)))
    broken = [name for name, ok in finite.items() if not ok]
    if broken:
        raise OpenPICheckpointError(f"{source} has NaN or infinite values in {', '.join(broken)}")
    leaves = [
        (path, leaf.replace(values.get("/".join(map(str, path)), leaf.get_value())))
        for path, leaf in nnx.to_flat_state(params)
    ]
    return nnx.from_flat_state(leaves)


def flatten_params(params: nnx.State) -> dict[str, Any]:
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(params)}
