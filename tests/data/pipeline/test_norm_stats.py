import dataclasses
import functools
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acrlpd.config import apply_config_overrides, get_config
from acrlpd.data.pipeline.config_episodes import read_windows
from acrlpd.data.pipeline.norm_stats import (
    NormStats,
    NormStatsError,
    NormStatsOrigin,
    RunningStats,
    compute_norm_stats,
    load_norm_stats,
    load_norm_stats_origin,
    save_norm_stats,
)
from acrlpd.data.pipeline.norm_stats_checks import check_norm_stats, near_constant_dims
from acrlpd.data.pipeline.transforms import AbsoluteActions, DeltaActions, Normalize, Unnormalize
from acrlpd.data.sources.source import ColumnTable

ORIGIN = NormStatsOrigin(
    dataset="abc",
    num_episodes=2,
    num_frames=100,
    action_horizon=5,
    transforms={"robot": "generic", "delta_action_mask": None, "state_columns": ["state"]},
)


def test_running_stats_equal_openpi(goldens):
    """openpi's range grows from batch to batch, so quantiles are compared after the first batch alone."""
    golden = np.load(goldens / "running_stats.npz")
    batches = golden["input"].astype(np.float64).reshape(3, -1, 7)
    running = RunningStats(batches[0].min(axis=0), batches[0].max(axis=0))
    running.update(batches[0])
    first = running.get_statistics()
    for name in ("std", "q01", "q99"):
        np.testing.assert_array_equal(getattr(first, name), golden[f"float64/after_batch0/{name}"])
    running = RunningStats(batches.min(axis=(0, 1)), batches.max(axis=(0, 1)))
    for i, batch in enumerate(batches):
        running.update(batch)
        np.testing.assert_array_equal(running.get_statistics().std, golden[f"float64/after_batch{i}/std"])
    # openpi returns its mean by reference, so the goldens have the final one throughout.
    np.testing.assert_array_equal(running.get_statistics().mean, golden["float64/after_batch2/mean"])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1e-8, 1.0, 1e7]),
)
def test_counting_equals_numpys_histogram(sizes, seed, scale):
    """Also for constants and for values on bin edges."""
    rng = np.random.default_rng(seed)
    batches = [np.round(rng.normal(size=(size, 1)) * rng.integers(0, 3), 2) * scale for size in sizes]
    values = np.concatenate(batches)
    running = RunningStats(values.min(axis=0), values.max(axis=0))
    for batch in batches:
        running.update(batch)
    edges = np.linspace(values.min() - 1e-10, values.max() + 1e-10, 5001)
    counts, total = np.histogram(values, edges)[0], len(values)
    if total < 2:
        return
    stats = running.get_statistics()
    for q, found in ((0.01, stats.q01), (0.99, stats.q99)):
        bin_index = np.searchsorted(np.cumsum(counts), q * total)
        assert found[0] == edges[bin_index]


def test_statistics_of_windows_equal_brute_force():
    rng = np.random.default_rng(0)
    lengths = [3, 40, 1, 17]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    columns = {name: rng.normal(size=(offsets[-1], 2)).astype(np.float32) for name in ("state", "action")}

    table = ColumnTable(columns, offsets, (None,), np.zeros(offsets[-1], np.int32))
    config = apply_config_overrides(
        get_config("debug"),
        {
            "model.action_horizon": 6,
            "data.repack.state": ["state"],
            "data.repack.actions": ["action"],
            "data.use_delta_joint_actions": True,
            "data.delta_action_mask": [1, -1],
        },
    )

    stats = compute_norm_stats(table.num_rows, functools.partial(read_windows, table, config))
    chunks = []
    for start, end in itertools.pairwise(offsets):
        for t in range(start, end):
            for i in range(6):
                action = columns["action"][min(t + i, end - 1)].copy()
                action[0] -= columns["state"][t, 0]
                chunks.append(action)
    np.testing.assert_allclose(stats["actions"].mean, np.mean(chunks, axis=0), atol=1e-6)
    np.testing.assert_allclose(stats["actions"].std, np.std(chunks, axis=0), rtol=1e-5)
    bin_width = np.ptp(chunks, axis=0).max() / 5000
    expected = np.quantile(chunks, 0.99, axis=0, method="inverted_cdf")
    np.testing.assert_allclose(stats["actions"].q99, expected, atol=1.001 * bin_width)
    np.testing.assert_allclose(stats["state"].mean, columns["state"].mean(axis=0), atol=1e-6)


def test_values_next_to_a_bin_edge_are_on_their_side_of_it():
    """Rounding puts about every third of these into the bin above, whose edge is larger than all values."""
    edges = np.linspace(-1 - 1e-10, 1 + 1e-10, 5001)[::10]
    running = RunningStats(np.full(len(edges) - 1, -1.0), np.ones(len(edges) - 1))
    values = np.nextafter(edges[1:], -np.inf)
    running.update(np.stack([values, values]))
    stats = running.get_statistics()
    assert stats.q01 is not None and (stats.q01 < values).all()
    running = RunningStats(np.full(len(edges) - 1, -1.0), np.ones(len(edges) - 1))
    running.update(np.stack([edges[:-1], edges[:-1]]))
    np.testing.assert_array_equal(running.get_statistics().q01, edges[:-1])


@pytest.mark.parametrize("value", [0.3, 0.7, -1.2459109472530652])
def test_a_dim_that_never_changes_has_no_deviation(value):
    """The mean of squares is a bit smaller than the square of the mean here: no reason for NaN."""
    running = RunningStats(np.array([value]), np.array([value]))
    for _ in range(2):
        running.update(np.full((7, 1), value))
    stats = running.get_statistics()
    assert stats.std[0] == 0
    assert stats.mean[0] == pytest.approx(value)


def test_quantiles_of_a_dataset_whose_range_grows_late():
    """A gripper that is mostly shut in the first 16,000 frames, and wide open in those after them."""
    gripper = np.concatenate([np.tile([0, 0, 0, 0.2], 4_000), np.linspace(0.5, 1, 24_000)]).astype(np.float32)
    columns = {"state": gripper[:, None], "actions": (gripper * gripper - 0.5)[:, None]}
    for order in (slice(None), slice(None, None, -1)):
        ordered = {name: x[order] for name, x in columns.items()}
        stats = compute_norm_stats(40_000, lambda rows, x=ordered: {name: x[name][rows] for name in x})
        for name, values in columns.items():
            for q, found in ((0.01, stats[name].q01), (0.99, stats[name].q99)):
                expected = np.quantile(values, q, axis=0, method="inverted_cdf")
                np.testing.assert_allclose(found, expected, atol=1.001 / 5000)


@pytest.mark.parametrize("name", ["norm_stats_example", "norm_stats_example_noquantiles"])
def test_files_are_openpis_byte_for_byte(goldens, tmp_path, name):
    norm_stats = load_norm_stats(goldens / name)
    save_norm_stats(tmp_path, norm_stats, ORIGIN)
    assert (tmp_path / "norm_stats.json").read_bytes() == (goldens / name / "norm_stats.json").read_bytes()
    assert load_norm_stats_origin(tmp_path) == ORIGIN
    save_norm_stats(tmp_path, norm_stats)
    assert load_norm_stats_origin(tmp_path) is None


def test_quantiles_that_are_missing_are_named(goldens):
    stats = load_norm_stats(goldens / "norm_stats_example_noquantiles")
    with pytest.raises(NormStatsError, match=r"no quantiles.*acrlpd data stats"):
        stats["state"].quantiles()


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(NormStatsError, match=r"no norm statistics at .*acrlpd data stats"):
        load_norm_stats(tmp_path)
    ragged = {"mean": [[1.0], [1.0, 2.0]], "std": [1.0]}
    for content in ("{", "[]", *(json.dumps({"norm_stats": {"state": x}}) for x in ({"mean": [1.0]}, ragged))):
        (tmp_path / "norm_stats.json").write_text(content)
        with pytest.raises(NormStatsError, match=r"norm_stats.json is not a norm_stats.json"):
            load_norm_stats(tmp_path)
    (tmp_path / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": {"mean": [1.0], "std": [1.0, 2.0]}}}))
    with pytest.raises(NormStatsError, match="disagree about the number of dims"):
        load_norm_stats(tmp_path)


@pytest.mark.parametrize("field", ["mean", "std", "q01", "q99"])
def test_statistics_that_are_not_numbers_are_refused(tmp_path, field):
    fields = {name: [0.0, 1.0, 2.0] for name in ("mean", "std", "q01", "q99")} | {field: [0.0, float("nan"), 2.0]}
    (tmp_path / "norm_stats.json").write_text(json.dumps({"norm_stats": {"actions": fields}}))
    with pytest.raises(NormStatsError, match=rf"norm_stats.json: {field} of 'actions' is not finite in dims \[1\]"):
        load_norm_stats(tmp_path)
    (tmp_path / "norm_stats.json").write_text(json.dumps({"norm_stats": {"actions": {"mean": 0.0, "std": 1.0}}}))
    with pytest.raises(NormStatsError, match="'actions' must be a list of numbers"):
        load_norm_stats(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"dataset": "x"}'])
def test_a_damaged_origin_is_named(tmp_path, content):
    (tmp_path / "norm_stats_origin.json").write_text(content)
    with pytest.raises(NormStatsError, match=r"norm_stats_origin.json is damaged .*acrlpd data stats"):
        load_norm_stats_origin(tmp_path)


def example(seed=0, dim=3):
    """States far from zero, actions near the state: as joint positions are."""
    rng = np.random.default_rng(seed)
    state = rng.normal(2.0, 0.5, (400, dim))
    return {"state": state, "actions": state[:, None] + rng.normal(0, 0.02, (400, 5, dim))}


def stats_of(sample):
    return {
        key: NormStats(
            *[f(x.reshape(-1, x.shape[-1])) for f in (lambda v: v.mean(0), lambda v: v.std(0))],
            np.quantile(x.reshape(-1, x.shape[-1]), 0.01, axis=0),
            np.quantile(x.reshape(-1, x.shape[-1]), 0.99, axis=0),
        )
        for key, x in sample.items()
    }


def check(norm_stats, sample, *, origin=ORIGIN, expected=ORIGIN, counterpart=None, use_quantiles=False, **options):
    return check_norm_stats(
        norm_stats,
        origin,
        expected,
        sample,
        counterpart=counterpart,
        use_quantiles=use_quantiles,
        padded_dim=32,
        **options,
    )


@pytest.mark.parametrize("use_quantiles", [False, True])
def test_statistics_of_the_same_data_are_accepted(use_quantiles):
    assert check(stats_of(example(0)), example(1), use_quantiles=use_quantiles) == []
    assert check(stats_of(example(0)), example(1), origin=None, use_quantiles=use_quantiles) == []


def test_padded_statistics_are_accepted_and_other_sizes_refused():
    def resized(dim):
        return {
            key: NormStats(*(np.resize(x, dim) for x in (s.mean, s.std, s.q01, s.q99)))
            for key, s in stats_of(example()).items()
        }

    assert check(resized(32), example()) == []
    for dim in (2, 7):
        with pytest.raises(NormStatsError, match=f"'state' have {dim} dims, the data has 3"):
            check(resized(dim), example())


def test_a_missing_key_is_named():
    with pytest.raises(NormStatsError, match=r"no 'actions', only \['state'\]"):
        check({"state": stats_of(example())["state"]}, example())


def test_other_transforms_are_refused():
    other = dataclasses.replace(ORIGIN, transforms={**ORIGIN.transforms, "delta_action_mask": [True, False]})
    with pytest.raises(
        NormStatsError, match=r"delta_action_mask: statistics \[True, False\], this run absolute actions"
    ):
        check(stats_of(example()), example(), origin=other)


def test_another_dataset_or_horizon_is_a_warning():
    other = dataclasses.replace(ORIGIN, dataset="xyz", num_frames=7, action_horizon=50)
    warnings = check(stats_of(example()), example(), origin=other)
    assert len(warnings) == 2
    assert "action_horizon 50, this run has 5" in warnings[0]
    assert "7 frames; this run has 100" in warnings[1]


@pytest.mark.parametrize("run_is_relative", [True, False])
def test_absolute_statistics_for_relative_actions_are_refused(run_is_relative):
    """The classic mistake with statistics that do not say what they were made from."""
    mask = (True, True, False)
    absolute = example()
    relative = DeltaActions(mask)(absolute)
    right, wrong = (relative, absolute) if run_is_relative else (absolute, relative)
    toggle = AbsoluteActions(mask) if run_is_relative else DeltaActions(mask)
    expected = dataclasses.replace(
        ORIGIN, transforms={**ORIGIN.transforms, "delta_action_mask": list(mask) if run_is_relative else None}
    )
    arguments = {"origin": None, "expected": expected, "counterpart": toggle(right)["actions"]}
    assert check(stats_of(right), right, **arguments) == []
    with pytest.raises(NormStatsError, match=r"use_delta_joint_actions=.* look like those of"):
        check(stats_of(wrong), right, **arguments)


def test_other_units_are_refused():
    sample = example()
    sample["state"] = sample["state"] * 57.3  # degrees for radians
    with pytest.raises(NormStatsError, match=r"dims \[0, 1, 2\] of 'state' .*other units"):
        check(stats_of(example()), sample)


@pytest.mark.parametrize("use_quantiles", [False, True])
def test_a_few_far_values_are_the_data_and_many_are_other_units(use_quantiles):
    """A sensor that spikes twice in 400 steps is what it is; one that is off in one step of 20 was scaled otherwise."""
    stats, spikes = stats_of(example(0)), example(1)
    spikes["state"][:2, 1] = 1e3
    assert check(stats, spikes, use_quantiles=use_quantiles) == []
    spikes["state"][:20, 1] = 1e3
    with pytest.raises(NormStatsError, match=r"dims \[1\] of 'state'"):
        check(stats, spikes, use_quantiles=use_quantiles)


def test_quantiles_are_centred_between_themselves():
    """Rare spikes move the mean far away from where nearly all values are, and quantiles do not care."""
    sample = example()
    sample["state"][:3, 1] = 1e4
    assert check(stats_of(sample), sample, use_quantiles=True) == []


def test_near_constant_dims_are_named():
    sample = example()
    sample["state"][:, 1] = 0.5
    (warning,) = check(stats_of(sample), sample)
    assert "dims [1] of 'state' hardly vary" in warning
    assert near_constant_dims(np.array([1.0, 2.0, 1e-4, 0.0])).tolist() == [2, 3]
    assert near_constant_dims(np.zeros(2)).tolist() == [0, 1]


@pytest.mark.parametrize("use_quantiles", [False, True])
def test_what_is_not_normalised_comes_as_it_is(use_quantiles):
    data = {"state": np.linspace(-300, 500, 60).reshape(20, 3), "actions": np.linspace(-1, 1, 120).reshape(20, 2, 3)}
    stats = compute_norm_stats(20, lambda rows: {key: x[rows] for key, x in data.items()}, ("actions",))
    given = {key: x.astype(np.float32) for key, x in data.items()}
    normalized = Normalize(stats, use_quantiles=use_quantiles)(given)
    np.testing.assert_allclose(normalized["state"], given["state"], rtol=1e-6, atol=1e-6)
    assert not np.allclose(normalized["actions"], given["actions"])
    back = Unnormalize(stats, use_quantiles=use_quantiles)(normalized)
    np.testing.assert_allclose(back["state"], given["state"], rtol=1e-6, atol=1e-6)
    assert check(stats, data, use_quantiles=use_quantiles, normalized=("actions",)) == []


def test_statistics_that_would_scale_what_is_not_normalised_are_refused():
    with pytest.raises(NormStatsError, match=r"leaves out 'state', but the norm statistics would"):
        check(stats_of(example()), example(), origin=None, normalized=("actions",))
