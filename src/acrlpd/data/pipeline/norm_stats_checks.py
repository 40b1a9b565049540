"""Whether norm statistics fit a run: its dims, its transforms, its dataset and the values in it."""

from collections.abc import Collection, Mapping

import numpy as np

from acrlpd.data.pipeline.norm_stats import (
    EPSILON,
    FIX,
    STATISTICS_KEYS,
    NormStats,
    NormStatsError,
    NormStatsOrigin,
)

# A dim whose scale is this much below the median scale hardly varies.
_NEAR_CONSTANT = 1e-3
# Normalised values are of order 1. A dim with many values beyond this was measured in other units.
_FAR = 10.0
_FAR_SHARE = 0.01


def check_norm_stats(
    norm_stats: Mapping[str, NormStats],
    origin: NormStatsOrigin | None,
    expected: NormStatsOrigin,
    sample: Mapping[str, np.ndarray],
    *,
    counterpart: np.ndarray | None,
    use_quantiles: bool,
    padded_dim: int,
    normalized: Collection[str] = STATISTICS_KEYS,
    follow_dataset: bool = False,
) -> list[str]:
    """Raises NormStatsError when the statistics are wrong for this run; returns warnings.

    `sample` holds states [n, s] and actions [n, T, a] after repack and data transforms, as the statistics should have
    seen them. `counterpart` holds the same actions, absolute if the run has relative actions and the reverse.
    Statistics that are padded to the model's width are accepted: released statistics are. What is not `normalized` must
    have the statistics of the identity. With `follow_dataset` the statistics were found under the name of the dataset,
    so that those of another dataset are an error; if the config names them, they may be meant.
    """
    for key in STATISTICS_KEYS:
        if key not in norm_stats:
            raise NormStatsError(f"the norm statistics have no {key!r}, only {sorted(norm_stats)}; {FIX}")
        dim, found = sample[key].shape[-1], norm_stats[key].dim
        if found not in (dim, max(dim, padded_dim)):
            raise NormStatsError(
                f"the norm statistics of {key!r} have {found} dims, the data has {dim}: they belong to "
                f"another robot or other columns; {FIX}"
            )
    for key in set(STATISTICS_KEYS) - set(normalized):
        if not norm_stats[key].is_identity(use_quantiles=use_quantiles):
            raise NormStatsError(f"data.normalize leaves out {key!r}, but the norm statistics would scale it; {FIX}")
    warnings: list[str] = []
    if origin is not None and normalized:
        warnings += _compare_origin(origin, expected, follow_dataset=follow_dataset)
    elif counterpart is not None and "actions" in normalized:
        relative = expected.transforms.get("delta_action_mask") is not None
        _check_relative(norm_stats["actions"], sample["actions"], counterpart, relative=relative)
    for key in normalized:
        warnings += _check_values(key, norm_stats[key], sample[key], use_quantiles=use_quantiles)
    return warnings


def _compare_origin(origin: NormStatsOrigin, expected: NormStatsOrigin, *, follow_dataset: bool) -> list[str]:
    if differences := origin.other_transforms(expected):
        raise NormStatsError(f"the norm statistics were made with other transforms ({'; '.join(differences)}); {FIX}")
    if follow_dataset and origin.path is not None and not origin.is_of_dataset(expected):
        raise NormStatsError(
            f"the norm statistics were made from the dataset {origin.path}, this run trains on {expected.path}, which "
            "has the same name. Give the statistics of this one a name of their own: --data.asset_id NAME, to `acrlpd "
            "data stats` and to `acrlpd train`"
        )
    warnings = []
    if origin.action_horizon != expected.action_horizon:
        warnings.append(
            f"the norm statistics were made with action_horizon {origin.action_horizon}, this run has "
            f"{expected.action_horizon}; {FIX}"
        )
    if origin.dataset != expected.dataset:
        is_named = origin.path is not None and origin.path != expected.path
        made_from = f"the dataset {origin.path}" if is_named else "another dataset or another state of this one"
        warnings.append(
            f"the norm statistics were made from {made_from} ({origin.num_frames} frames; this run has "
            f"{expected.num_frames}); keep them for weights that were trained with them, otherwise {FIX}"
        )
    return warnings


def _check_relative(stats: NormStats, actions: np.ndarray, counterpart: np.ndarray, *, relative: bool) -> None:
    """Decides whether statistics without an origin are of relative or of absolute actions."""
    this, other = _distance(stats, actions), _distance(stats, counterpart)
    if this > 0.5 and this > 2 * other:
        names = ("relative", "absolute") if relative else ("absolute", "relative")
        raise NormStatsError(
            f"this run has {names[0]} actions (data.use_delta_joint_actions={str(relative).lower()}), but "
            f"the norm statistics look like those of {names[1]} ones: distance {this:.2f} to the first, "
            f"{other:.2f} to the second; {FIX}"
        )


def _distance(stats: NormStats, actions: np.ndarray) -> float:
    """How much the place and the scale of two distributions differ, on average over dims."""
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
    # What normalisation subtracts, and its divisor: the deviation, or half the distance of the quantiles.
    centre, scale = stats.mean[:dim], stats.std[:dim]
    if use_quantiles:
        q01, q99 = (quantile[:dim] for quantile in stats.quantiles())
        centre, scale = (q01 + q99) / 2, (q99 - q01) / 2
    constant = near_constant_dims(scale)
    far_share = np.mean(np.abs(values - centre) > _FAR * (scale + EPSILON), axis=0)
    far = np.flatnonzero(far_share > _FAR_SHARE)
    if far.size:
        worst = int(far[np.argmax(far_share[far])])
        raise NormStatsError(
            f"the norm statistics do not fit the data: in dims {far.tolist()} of {key!r} many values lie "
            f"more than {_FAR:g} scales from the centre (dim {worst}: statistics centre {centre[worst]:.4g} "
            f"scale {scale[worst]:.4g}, data mean {values[:, worst].mean():.4g} std {values[:, worst].std():.4g}). "
            f"Usual reasons: statistics of relative actions used for absolute ones or the reverse "
            f"(data.use_delta_joint_actions), other units, or another robot (data.robot); {FIX}"
        )
    if constant.size:
        return [
            f"dims {constant.tolist()} of {key!r} hardly vary in the norm statistics (scale "
            f"{scale[constant].max():.2g}): a small deviation at run time becomes a large input. If they are "
            f"unused, leave their columns out of data.repack"
        ]
    return []


def near_constant_dims(scale: np.ndarray) -> np.ndarray:
    """Dims that vary at least a thousand times less than the median dim."""
    varying = scale[scale > 0]
    reference = np.median(varying) if varying.size else 0.0
    return np.flatnonzero(scale <= max(_NEAR_CONSTANT * reference, 1e-6))
