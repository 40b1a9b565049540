import json
import logging

import numpy as np
import pytest
import sentencepiece

from acrlpd.data.pipeline.tokenizer import ByteTokenizer, PaligemmaTokenizer, create_tokenizer, default_tokenizer_path
from acrlpd.data.pipeline.transforms import TokenizePrompt


def test_formats_equal_openpi(goldens):
    for case in json.loads((goldens / "tokenizer_formats.json").read_text())["cases"]:
        states = None if case["state"] is None else np.array([case["state"]])
        tokens, mask = ByteTokenizer(case["max_len"]).tokenize([case["prompt"]], states)
        assert tokens[0].tolist() == case["tokens"]
        assert mask[0].tolist() == case["mask"]
        assert tokens.dtype == np.int32
        assert mask.dtype == bool


def test_a_labelled_prompt_is_what_openpi_makes_of_the_text(goldens):
    """The label stands behind the task and before the state, so openpi, sent the task with its label, agrees."""
    for case in json.loads((goldens / "tokenizer_formats.json").read_text())["cases"]:
        state = np.zeros(2) if case["state"] is None else np.array(case["state"])
        transform = TokenizePrompt(ByteTokenizer(400), case["state"] is not None, labelled=True)
        found = transform({"prompt": case["prompt"], "state": state})
        for row, label in enumerate(("Advantage: negative", "Advantage: positive")):
            texts = [call["text"] for call in case["encode_calls"]]  # as openpi encoded them
            task, comma, rest = texts[0].partition(", State:") if case["state"] is not None else (texts[0], "", "")
            ids = [2, *(3 + byte for byte in "".join([f"{task} {label}{comma}{rest}", *texts[1:]]).encode())]
            assert found["labelled_prompt"][row, : len(ids)].tolist() == ids
            assert found["labelled_prompt_mask"][row].sum() == len(ids)
            stock, _ = ByteTokenizer(400).tokenize(
                [f"{case['prompt'].strip()} {label}"], None if case["state"] is None else state[None]
            )
            np.testing.assert_array_equal(found["labelled_prompt"][row], stock[0])


def test_a_label_is_not_added_twice():
    with pytest.raises(ValueError, match="has its label already; leave the label out"):
        TokenizePrompt(ByteTokenizer(64), labelled=True)({"prompt": "cube Advantage: positive", "state": np.zeros(2)})


def test_rows_do_not_depend_on_each_other():
    tokenizer = ByteTokenizer(32)
    states = np.array([[0.1, 0.2], [-1.5, 0.9], [0.0, 1.0]])
    prompts = ["a", "bb", "a"]
    for given in (None, states):
        tokens, mask = tokenizer.tokenize(prompts, given)
        for i, prompt in enumerate(prompts):
            one, one_mask = ByteTokenizer(32).tokenize([prompt], None if given is None else given[i : i + 1])
            np.testing.assert_array_equal(tokens[i], one[0])
            np.testing.assert_array_equal(mask[i], one_mask[0])


def test_a_long_prompt_is_cut_with_one_warning(caplog):
    tokenizer = ByteTokenizer(8)
    with caplog.at_level(logging.WARNING):
        assert tokenizer.tokenize(["it fit"])[1].all()  # with beginning and end
        assert not caplog.records
        tokens, mask = tokenizer.tokenize(["a long prompt", "another long prompt"])
    assert mask.all()
    assert tokens.shape == (2, 8)
    assert [record.message for record in caplog.records] == [
        "prompt 'a long prompt' needs 15 tokens and is cut to 8; raise model.max_token_len (said once)"
    ]


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    text = folder / "text.txt"
    text.write_text("\n".join(f"pick up the {colour} cube {i}" for i in range(50) for colour in ("red", "blue")))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "model"),
        vocab_size=60,
        bos_id=2,
        unk_id=3,
        eos_id=1,
        pad_id=0,
        user_defined_symbols="\n",
        minloglevel=2,
    )
    return folder / "model.model"


def test_sentencepiece_follows_the_same_formats(sentencepiece_model):
    tokenizer = create_tokenizer(str(sentencepiece_model), 64)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    expected = processor.encode("pick up the red cube", add_bos=True) + processor.encode("\n")
    tokens, mask = tokenizer.tokenize([" pick_up the\nred cube"])
    assert tokens[0, : len(expected)].tolist() == expected
    assert mask[0].sum() == len(expected)
    text = "Task: pick up the red cube, State: 0 128;\nAction: "
    tokens, mask = tokenizer.tokenize(["pick_up the red cube"], np.array([[-1.0, 0.0]]))
    assert tokens[0][mask[0]].tolist() == processor.encode(text, add_bos=True)
    assert tokenizer.vocab_size == 60


def test_the_model_is_found_in_the_cache_directory(sentencepiece_model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError) as error:
        create_tokenizer("paligemma", 48)
    message = str(error.value)
    assert str(default_tokenizer_path()) in message
    assert "curl" in message
    assert "https://storage.googleapis.com/big_vision/paligemma_tokenizer.model" in message
    assert default_tokenizer_path() == tmp_path / "acrlpd" / "paligemma_tokenizer.model"
    default_tokenizer_path().parent.mkdir()
    default_tokenizer_path().write_bytes(sentencepiece_model.read_bytes())
    assert isinstance(create_tokenizer("paligemma", 48), PaligemmaTokenizer)


def test_a_damaged_model_is_named(sentencepiece_model, tmp_path):
    path = tmp_path / "paligemma_tokenizer.model"
    for content in (b"<html>404</html>", b"", sentencepiece_model.read_bytes()[:100]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"paligemma_tokenizer.model is not a SentencePiece model"):
            create_tokenizer(str(path), 48)


def test_a_long_prompt_is_refused_where_a_cut_one_would_be_another_task():
    tokenizer = create_tokenizer("byte", 8, "refuse")
    tokens, mask = tokenizer.tokenize(["sixsix"])
    assert mask.all() and tokens.shape == (1, 8)
    with pytest.raises(ValueError, match="prompt is too long: the policy reads 8 tokens, the prompt has 9"):
        tokenizer.tokenize(["sixsix", "seven77"])
