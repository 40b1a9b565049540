"""`acrlpd data fast_tokenizer` on a dataset, and what it refuses."""

import json

from acrlpd.cli.main import main
from acrlpd.models.fast_tokenizer import PROCESSOR_FILE, load_fast_tokenizer


def fit(output, *flags, config="debug_fast"):
    return main(["data", "fast_tokenizer", "--config", config, "--output", str(output), *flags])


def test_the_command_fits_says_what_follows_and_replaces_nothing_by_itself(tmp_path, capsys):
    output = tmp_path / "tokenizer"
    assert fit(output, "--vocab_size", "300", "--scale", "5") == 0
    said = capsys.readouterr().out
    assert "676 chunks of 5 x 3" in said and "300 tokens; a chunk takes" in said
    assert f"--model.fast_tokenizer {output} and --model.max_action_tokens" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer"]
    processor = json.loads((output / PROCESSOR_FILE).read_text())
    assert (processor["scale"], processor["time_horizon"], processor["action_dim"]) == (5, 5, 3)
    tokenizer = load_fast_tokenizer(str(output))
    assert (tokenizer.vocab_size, processor["vocab_size"]) == (300, 300)
    assert fit(output, "--vocab_size", "310") == 2
    assert "exists already" in capsys.readouterr().err
    assert fit(output, "--vocab_size", "310", "--overwrite") == 0
    assert json.loads((output / PROCESSOR_FILE).read_text())["vocab_size"] == 310


def test_what_is_refused(tmp_path, capsys):
    assert fit(tmp_path / "new", config="debug") == 2
    assert "the pi0 policy of this config reads actions as numbers" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    assert fit(other, "--overwrite") == 2
    assert "is not a tokenizer" in capsys.readouterr().err
    assert (other / "notes.txt").read_text() == "mine"
    assert fit(tmp_path / "new", "--vocab_size", "100") == 2
    assert not (tmp_path / "new").exists()
