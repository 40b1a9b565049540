import io
import json
import shutil

import numpy as np
import pytest

from acrlpd.cli.data import label
from acrlpd.console import Console
from acrlpd.data.pipeline.labels import Label, Labels, labels_path, load_labels
from acrlpd.data.sources.source import DatasetError, open_source
from acrlpd.data.tools.label import (
    format_indices,
    label_interactively,
    label_list,
    label_rewards,
    label_rule,
    parse_indices,
    parse_rewards,
)


@pytest.fixture
def source(libero):
    return open_source(libero["v30"])


def lengths(source):
    return dict(zip(source.indices, source.lengths.tolist(), strict=True))


def test_labels_lie_next_to_the_dataset(source, libero):
    path = labels_path(source.root)
    assert path == libero["v30"].resolve().parent / "libero_v30.labels.json"
    assert load_labels(path, source) is None


def test_round_trip(source, tmp_path):
    labels = Labels(tmp_path / "labels.json", label_list(source, [0, 2], [1]))
    labels = labels.updated({5: Label(True, lengths(source)[5], reward=0.5)})
    labels.save()
    assert load_labels(labels.path, source) == labels
    assert [p.name for p in tmp_path.iterdir()] == ["labels.json"]
    assert {index: label.success for index, label in labels.episodes.items()} == {
        0: True,
        1: False,
        2: True,
        5: True,
    }


def test_labels_of_another_dataset_are_refused(source, tmp_path):
    path = tmp_path / "labels.json"
    Labels(path, {0: Label(True, lengths(source)[0] + 1)}).save()
    with pytest.raises(DatasetError, match="belong to another dataset"):
        load_labels(path, source)
    for content in ("{", "[]", json.dumps({"format": "other", "episodes": {}})):
        path.write_text(content)
        with pytest.raises(DatasetError, match=r"labels.json is not a labels file"):
            load_labels(path, source)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"success": "false"}, r"success of episode 3 is 'false', expected true or false"),
        ({"success": None}, r"success of episode 3 is None, expected true or false"),
        ({"success": True, "reward": "1"}, r"reward of episode 3 is '1', expected a number"),
    ],
)
def test_an_edited_label_that_says_neither_yes_nor_no_is_refused(source, tmp_path, entry, message):
    labels = Labels(tmp_path / "labels.json", label_list(source, [0, 3], []))
    labels.save()
    content = json.loads(labels.path.read_text())
    content["episodes"]["3"] |= entry
    labels.path.write_text(json.dumps(content))
    with pytest.raises(DatasetError, match=message):
        load_labels(labels.path, source)


@pytest.mark.parametrize("text", ["", "7", "0-5", "0-3,7,10-11"])
def test_format_indices_is_the_inverse_of_parse_indices(text):
    assert format_indices(parse_indices(text)) == text


def test_parse_indices():
    assert parse_indices("0-3, 7,10-10") == [0, 1, 2, 3, 7, 10]
    assert parse_indices("") == []
    with pytest.raises(ValueError, match="found '3-x'"):
        parse_indices("1,3-x")
    with pytest.raises(ValueError, match="'5-2' ends before it begins; expected 2-5"):
        parse_indices("1,5-2")


def test_lists_are_checked(source):
    with pytest.raises(ValueError, match=r"no episodes 99; it has \d+, up to \d+"):
        label_list(source, [0, 99], [])
    with pytest.raises(ValueError, match=r"\[1\] are listed as success and as failure"):
        label_list(source, [0, 1], [1])


def test_rules(source):
    steps = lengths(source)
    by_length = label_rule(source, "length < 60")
    assert {i: label.success for i, label in by_length.items()} == {i: n < 60 for i, n in steps.items()}
    assert {i: label.length for i, label in by_length.items()} == steps

    for name, reduce in {
        "last": lambda x: x[-1],
        "max": np.max,
        "mean": np.mean,
        "first": lambda x: x[0],
    }.items():
        found = label_rule(source, f"{name}(state[3]) >= 0.25")
        for i, index in enumerate(source.indices):
            value = reduce(source.episode(i).columns["state"][:, 3].astype(np.float64))
            assert found[index].success == (value >= 0.25)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("__import__('os')", "cannot read the rule"),
        ("length < ten", "cannot read the rule"),
        ("last(stat) > 1", "no column 'stat'"),
        ("last(state) > 1", r"dims 0..7, choose one: state\[0\]"),
        ("last(state[8]) > 1", "dims 0..7"),
        ("last(image) > 1", "no column 'image'"),
    ],
)
def test_rules_that_make_no_sense_are_refused(source, rule, message):
    with pytest.raises(ValueError, match=message):
        label_rule(source, rule)


def test_asking_a_person(source, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("maybe\ny\nn\ns\nYes\nq\n"))
    output = io.StringIO()
    console = Console(file=output, width=200, force_terminal=True, color_system="truecolor")
    found = list(label_interactively(source, [1], "image", console))
    steps = lengths(source)
    assert found == [
        (0, Label(True, steps[0])),
        (2, Label(False, steps[2])),
        (4, Label(True, steps[4])),
    ]
    text = output.getvalue()
    assert text.count("▀") >= 4 * 2 * 64 * 32 and "\x1b[38;2;" in text and "rgb(" not in text
    for index in (0, 2, 3, 4, 5):
        assert f"episode \x1b[1;36m{index}" in text or f"episode {index}" in text


def test_the_dataset_itself_is_not_touched(libero, tmp_path):
    copy = shutil.copytree(libero["v21"], tmp_path / "set")
    before = {p: p.stat().st_mtime_ns for p in copy.rglob("*")}
    source = open_source(copy)
    Labels(labels_path(source.root), label_rule(source, "length > 50")).save()
    assert {p: p.stat().st_mtime_ns for p in copy.rglob("*")} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["set", "set.labels.json"]


def test_rewards_of_episodes():
    assert parse_rewards("0-1=1, 4=-0.5") == {0: 1.0, 1: 1.0, 4: -0.5}
    for text in ("1", "1=x", "1=nan", "a=1"):
        with pytest.raises(ValueError, match="expected episode"):
            parse_rewards(text)
    known = {0: Label(True, 50), 1: Label(False, 60), 2: Label(True, 70)}
    assert label_rewards(known, {0: 0.5, 1: -1.0}) == {0: Label(True, 50, 0.5), 1: Label(False, 60, -1.0)}
    with pytest.raises(ValueError, match=r"episodes \[9\] have no label yet"):
        label_rewards(known, {0: 1.0, 9: 1.0})


def test_labels_are_changed_only_when_told_to(source, tmp_path):
    def run(**options):
        label(str(source.root), labels_file=tmp_path / "labels.json", **options)
        return load_labels(tmp_path / "labels.json", source).episodes

    by_hand = run(success="0-2", failure="3")
    with pytest.raises(ValueError, match=r"has 4 labels, and 3 of them would change \(episodes 0, 1, 2\); nothing was"):
        run(rule="length < 0")
    assert load_labels(tmp_path / "labels.json", source).episodes == by_hand
    assert len(run(success="0,4", failure="5")) == 6  # the same label again, and new ones
    assert run(reward="0=0.5")[0].reward == 0.5  # added to a label that had none
    with pytest.raises(ValueError, match=r"1 of them would change \(episodes 0\)"):
        run(success="0")  # which would forget the reward
    assert not any(label.success for label in run(rule="length < 0", overwrite=True).values())


@pytest.mark.parametrize("width", [20, 79, 200])
def test_previews_fit_the_terminal(source, width):
    """Also where the output is no terminal, whose width is then the number of columns that the environment names."""
    shown = io.StringIO()
    console = Console(file=shown, width=width, force_terminal=False)
    console.input = lambda *_: "q"
    assert not list(label_interactively(source, {}, "image", console))
    rows = [line for line in shown.getvalue().splitlines() if "▀" in line]
    assert {len(row) for row in rows} == {min(128, width // 2 * 2)}
    assert len(rows) == pytest.approx(min(64, width // 2) / 2, abs=1)  # square frames; a character is two pixels high
