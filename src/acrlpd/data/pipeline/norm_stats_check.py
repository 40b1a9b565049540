"""Refuses norm statistics that do not belong to the data or to the transforms of a run."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from acrlpd.data.pipeline.norm_stats import NormStats, NormStatsError, NormStatsOrigin

# A dim whose scale is this much below the median of the others hardly varies.
_NEAR_CONSTANT = 1e-3
# Normalised values are of order 1. A dim with many values beyond this was measured in other units.
_FAR = 10.0
_FAR_SHARE = 0.01
_FIX = "make statistics for this config with `acrlpd data stats`"


def check_norm_stats(
    norm_stats: Mapping[str, NormStats],
    origin: NormStatsOrigin | None,
    expected: NormStatsOrigin,
    sample: Mapping[str, np.ndarray],
    *,
    counterpart: np.ndarray | None,
    use_quantiles: bool,
    padded_dim: int,
) -> list[str]:
    """Raises NormStatsError when the statistics are wrong for this run; returns warnings.

    `sample` holds states [n, s] and actions [n, T, a] as the statistics should have seen them (after repack
    and data transforms); `counterpart` the same actions absolute where the run has them relative and the
    reverse. Statistics padded to the model's width are fine: released ones are.
    """
    for key in ("state", "actions"):
        if key not in norm_stats:
            raise NormStatsError(f"the norm statistics have no {key!r}, only {sorted(norm_stats)}; {_FIX}")
        dim, found = sample[key].shape[-1], norm_stats[key].dim
        if found not in (dim, max(dim, padded_dim)):
            raise NormStatsError(
                f"the norm statistics of {key!r} have {found} dims, the data has {dim}: they belong to "
                f"another robot or other columns; {_FIX}"
            )
    warnings: list[str] = []
    if origin is not None:
        warnings += _compare_origin(origin, expected)
    elif counterpart is not None:
        relative = expected.transforms.get("delta_action_mask") is not None
        _check_relative(norm_stats["actions"], sample["actions"], counterpart, relative=relative)
    for key in ("state", "actions"):
        warnings += _check_values(key, norm_stats[key], sample[key], use_quantiles=use_quantiles)
    return warnings


def _compare_origin(origin: NormStatsOrigin, expected: NormStatsOrigin) -> list[str]:
    differences = [
        f"{name}: statistics {_show(origin.transforms.get(name))}, this run {_show(value)}"
        for name, value in expected.transforms.items()
        if origin.transforms.get(name) != value
    ]
    if differences:
        raise NormStatsError(f"the norm statistics were made with other transforms ({'; '.join(differences)}); {_FIX}")
    warnings = []
    if origin.action_horizon != expected.action_horizon:
        warnings.append(
            f"the norm statistics were made with action_horizon {origin.action_horizon}, this run has "
            f"{expected.action_horizon}; {_FIX}"
        )
    if origin.dataset != expected.dataset:
        warnings.append(
            f"the norm statistics were made from another dataset or another state of this one "
            f"({origin.num_frames} frames, now {expected.num_frames}); keep them for weights that were "
            f"trained with them, otherwise {_FIX}"
        )
    return warnings


def _show(value: Any) -> str:
    return "absolute actions" if value is None else str(value)


def _check_relative(stats: NormStats, actions: np.ndarray, counterpart: np.ndarray, *, relative: bool) -> None:
    """Statistics that say nothing of their origin: are they of relative or of absolute actions?"""
    this, other = _distance(stats, actions), _distance(stats, counterpart)
    if this > 0.5 and this > 2 * other:
        names = ("relative", "absolute") if relative else ("absolute", "relative")
        raise NormStatsError(
            f"this run has {names[0]} actions (data.use_delta_joint_actions={str(relative).lower()}), but "
            f"the norm statistics look like those of {names[1]} ones: distance {this:.2f} to the first, "
            f"{other:.2f} to the second; {_FIX}"
        )


def _distance(stats: NormStats, actions: np.ndarray) -> float:
    """How differently two distributions are placed and scaled, on average over dims."""
    dim = actions.shape[-1]
    values = actions.reshape(-1, dim).astype(np.float64)
    mean, std = values.mean(axis=0), values.std(axis=0) + 1e-6
    stats_mean, stats_std = stats.mean[:dim], stats.std[:dim] + 1e-6
    shift = np.abs(mean - stats_mean) / (std + stats_std)
    return float(np.mean(np.abs(np.log(std / stats_std)) + shift))


def _check_values(key: str, stats: NormStats, sample: np.ndarray, *, use_quantiles: bool) -> list[str]:
    """Whether the sample, normalised, is of order 1 in every dim."""
    dim = sample.shape[-1]
    values = sample.reshape(-1, dim).astype(np.float64)
    scale = stats.scale(use_quantiles=use_quantiles)[:dim]
    centre = stats.mean[:dim]
    if use_quantiles:
        q01, q99 = stats.quantiles()
        centre = ((q01 + q99) / 2)[:dim]
    constant = near_constant_dims(scale)
    far_share = np.mean(np.abs(values - centre) > _FAR * (scale + 1e-6), axis=0)
    far = np.flatnonzero(far_share > _FAR_SHARE)
    if far.size:
        worst = int(far[np.argmax(far_share[far])])
        raise NormStatsError(
            f"the norm statistics do not fit the data: in dims {far.tolist()} of {key!r} many values lie "
            f"more than {_FAR:g} scales from the centre (dim {worst}: statistics centre {centre[worst]:.4g} "
            f"scale {scale[worst]:.4g}, data mean {values[:, worst].mean():.4g} std {values[:, worst].std():.4g}). "
            f"Usual reasons: statistics of relative actions used for absolute ones or the reverse "
            f"(data.use_delta_joint_actions), other units (data.adapt_to_pi), or another robot; {_FIX}"
        )
    if constant.size:
        return [
            f"dims {constant.tolist()} of {key!r} hardly vary in the norm statistics (scale "
            f"{scale[constant].max():.2g}): a small deviation at run time becomes a large input. If they are "
            f"unused, leave their columns out of data.repack"
        ]
    return []


def near_constant_dims(scale: np.ndarray) -> np.ndarray:
    """Dims that vary at least a thousand times less than the median one does."""
    varying = scale[scale > 0]
    reference = np.median(varying) if varying.size else 0.0
    return np.flatnonzero(scale <= max(_NEAR_CONSTANT * reference, 1e-6))
