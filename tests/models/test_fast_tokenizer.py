"""FAST tokens: chunks come back but for the rounding, on host and devices, and what cannot be written is named."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.fft
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer
from tokenizers.trainers import BpeTrainer

from acrlpd.models.families.pi0_fast import Pi0FASTConfig
from acrlpd.models.fast_decoding import decode_tokens, is_undecodable, to_language_ids
from acrlpd.models.fast_tokenizer import (
    PROCESSOR_FILE,
    TOKENIZER_FILE,
    FASTTokenizerError,
    fit_fast_tokenizer,
    load_fast_tokenizer,
    quantize,
    released_directory,
)

VOCAB = 4096


def walks(seed, shape, size=0.3):
    return np.cumsum(np.random.default_rng(seed).normal(0, size, shape), axis=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tokenizer of chunks [10, 7] whose characters have one byte or two: its range is large."""
    path = tmp_path_factory.mktemp("fast") / "tokenizer"
    tokenizer = fit_fast_tokenizer(walks(0, (500, 10, 7)), vocab_size=600, largest_action=6.0)
    tokenizer.save(path, action_dim=7, time_horizon=10)
    assert tokenizer.min_token < -256
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_fast_tokenizer(str(directory))


def decode(directory, sequences, horizon, dim, length=40):
    """Chunks of FAST ids, on the devices, between the text that openpi writes around them."""
    tokens = np.zeros((len(sequences), length), np.int32)
    for row, ids in enumerate(sequences):
        sequence = [5, 6, 7, *(to_language_ids(number, VOCAB) for number in ids), 9, 1]
        tokens[row, : len(sequence)] = sequence[:length]
    return np.asarray(_decode(tokens, fast_tokenizer=str(directory), action_horizon=horizon, action_dim=dim))


def _decode(tokens, **sizes):
    return jax.jit(lambda tokens: decode_tokens(tokens, vocab_size=VOCAB, **sizes))(tokens)


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 1.0))
def test_only_the_rounding_is_lost(tokenizer, seed, size):
    chunks = walks(seed, (3, 10, 7), size)
    for chunk, ids in zip(chunks, tokenizer.encode(chunks), strict=True):
        back = tokenizer.decode(ids, 10, 7)
        error = np.abs(scipy.fft.dct(back - chunk, axis=0, norm="ortho"))
        assert error.max() <= 0.5 / tokenizer.scale + 1e-9


def test_chunks_like_those_of_the_fit_are_short(tokenizer):
    """Without merges they would take 140 tokens: 70 characters, nearly all of two bytes."""
    counts = [len(ids) for ids in tokenizer.encode(walks(6, (100, 10, 7)))]
    assert np.mean(counts) < 60
    assert "definition" not in repr(tokenizer)


def test_every_chunk_within_the_stated_range_can_be_written(tokenizer):
    """The extreme chunks of each frequency: all actions at the bound, with the signs of the frequency's wave."""
    signs = np.sign(scipy.fft.idct(np.eye(10), axis=0, norm="ortho")).T[:, :, None]
    chunks = np.concatenate([signs, -signs]) * tokenizer.largest_action(10) * np.ones(7)
    for chunk, ids in zip(chunks, tokenizer.encode(chunks), strict=True):
        np.testing.assert_allclose(tokenizer.decode(ids, 10, 7), chunk, atol=0.05 * np.sqrt(10))


def test_devices_read_what_the_host_reads(directory, tokenizer):
    """Tokens of chunks, and anything that a policy could draw: broken characters, too few and too many."""
    rng = np.random.default_rng(1)
    written = tokenizer.encode(walks(2, (40, 2, 3), 0.8))
    drawn = [rng.integers(0, tokenizer.vocab_size, rng.integers(0, 9)).tolist() for _ in range(400)]
    cut = [ids[: rng.integers(0, len(ids) + 1)] + ids[: rng.integers(0, 3)] for ids in written]
    split = [[byte for number in ids for byte in _single_bytes(tokenizer, number)] for ids in written]
    sequences = [*written, *drawn, *cut, *split]
    expected = [tokenizer.decode(ids, 2, 3) for ids in sequences]
    found = decode(directory, sequences, 2, 3)
    for chunk, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(chunk, np.zeros((2, 3)) if want is None else want, atol=1e-4)
    known = np.array([want is not None for want in expected])
    np.testing.assert_array_equal(is_undecodable(found), ~known)
    assert known[:40].all() and known[-40:].all() and 0 < known[40:440].sum() + known[440:480].sum() < 440


def _single_bytes(tokenizer, number):
    return [tokenizer.token_bytes.index(bytes([byte])) for byte in tokenizer.token_bytes[number]]


def test_the_first_run_of_action_tokens_counts(directory, tokenizer):
    chunk = walks(3, (1, 2, 3))
    [ids] = tokenizer.encode(chunk)
    ids = [to_language_ids(number, VOCAB) for number in ids]
    tokens = np.zeros((3, 40), np.int32)
    for row, sequence in enumerate(([*ids, 1], [5, *ids, 9, *ids, 1], [5, *ids[:1], 9, *ids[1:], 1])):
        tokens[row, : len(sequence)] = sequence
    found = np.asarray(_decode(tokens, fast_tokenizer=str(directory), action_horizon=2, action_dim=3))
    np.testing.assert_allclose(found[0], chunk[0], atol=0.1)
    np.testing.assert_array_equal(found[0], found[1])
    assert is_undecodable(found).tolist() == [False, False, True]


def test_a_tokenizer_of_the_public_processor(tmp_path):
    """Fitted as the public processor does it, whose alphabet is not that of bytes; its characters are its tokens."""
    chunks = walks(4, (200, 6, 2))
    numbers = quantize(chunks, 10)
    low = int(numbers.min())
    texts = ["".join(map(chr, row)) for row in (numbers - low).reshape(200, -1).astype(int)]
    bpe = ByteLevelBPETokenizer()
    alphabet = [chr(i) for i in range(int(numbers.max()) - low + 1)]
    bpe._tokenizer.train_from_iterator(
        texts, BpeTrainer(vocab_size=500, min_frequency=2, show_progress=False, initial_alphabet=alphabet)
    )
    (tmp_path / TOKENIZER_FILE).write_text(bpe._tokenizer.to_str())
    processor = {"scale": 10, "min_token": low, "vocab_size": 500, "action_dim": None, "time_horizon": None}
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps(processor))
    tokenizer = load_fast_tokenizer(str(tmp_path))
    encoded = tokenizer.encode(chunks[:20])
    assert encoded == [bpe.encode(text).ids for text in texts[:20]]
    for ids, text, chunk in zip(encoded, texts, chunks, strict=False):
        assert bpe.decode(ids) == text
        np.testing.assert_allclose(tokenizer.decode(ids, 6, 2), chunk, atol=0.05 * np.sqrt(6))
    with pytest.raises(FASTTokenizerError, match="action dim 1 is out of the range"):
        tokenizer.encode(np.full((1, 6, 2), [0.0, 90.0]))  # a byte that no chunk of the data had


def test_an_action_out_of_range_is_named(tokenizer):
    chunks = walks(5, (4, 10, 7))
    chunks[2, :, 3] = -9.5
    with pytest.raises(FASTTokenizerError) as error:
        tokenizer.encode(chunks)
    for part in ("action dim 3", "reaches -9.5", "coefficient -300", "between -9.", "acrlpd data fast_tokenizer"):
        assert part in str(error.value)
    chunks[2, :, 3] = np.nan
    with pytest.raises(FASTTokenizerError, match="action dim 3"):
        tokenizer.encode(chunks)
    with pytest.raises(FASTTokenizerError, match="action dim 3 has numbers that are not finite"):
        fit_fast_tokenizer(chunks, vocab_size=300)
    chunks[2, :, 3] = 1e6
    with pytest.raises(FASTTokenizerError, match="action dim 3 reaches 1e\\+06 after normalisation"):
        fit_fast_tokenizer(chunks, vocab_size=300)
    with pytest.raises(FASTTokenizerError, match="each of the 256 bytes; found 100"):
        fit_fast_tokenizer(walks(0, (4, 10, 7)), vocab_size=100)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "there is no FAST tokenizer in .*acrlpd data fast_tokenizer"),
        ({TOKENIZER_FILE: "{"}, "is not a FAST tokenizer, or its files are damaged"),
        ({TOKENIZER_FILE: '{"model": {"type": "BPE", "vocab": {"a": 0}}}', PROCESSOR_FILE: "{}"}, "scale"),
        (
            {
                TOKENIZER_FILE: '{"model": {"type": "WordPiece", "vocab": {"a": 0}}}',
                PROCESSOR_FILE: '{"scale": 10, "min_token": -3}',
            },
            "found WordPiece",
        ),
    ],
)
def test_a_directory_that_is_no_tokenizer(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises((FASTTokenizerError, FileNotFoundError), match=message):
        load_fast_tokenizer(str(tmp_path))


def test_a_checkpoint_knows_whether_its_tokenizer_is_the_released_one(tmp_path, monkeypatch, request, tokenizer):
    """openpi has the released tokenizer already, and must be told of any other one."""
    request.addfinalizer(load_fast_tokenizer.cache_clear)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer.save(released_directory())
    tokenizer.save(tmp_path / "own")
    for name, is_foreign in (("released", False), (str(tmp_path / "own"), True), ("byte", True)):
        config = Pi0FASTConfig(fast_tokenizer=name)
        for generation in ("run", "export", "export_of_the_export"):
            assets = tmp_path / name.replace("/", "_") / generation
            for path, content in config.asset_files().items():
                (assets / path).parent.mkdir(parents=True, exist_ok=True)
                (assets / path).write_bytes(content)
            config = config.with_assets(assets)
            assert Path(config.fast_tokenizer).parent == assets
            assert ("fast_tokenizer_path" in " ".join(config.openpi_differences())) == is_foreign
