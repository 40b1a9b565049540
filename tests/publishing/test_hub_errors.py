"""Whatever is wrong with a hub, a token or an address is said in one line, with what to do."""

import sys
from pathlib import Path

import pytest

from acrlpd.cli.main import main
from acrlpd.cli.pull import main as pull_main
from acrlpd.cli.push import main as push_main
from acrlpd.hub import HubError, parse_hub_address
from acrlpd.policies.checkpoint import open_checkpoint
from local_hub import LocalHub


def one_line(error: pytest.ExceptionInfo[HubError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def pull(repo: str, folder: Path) -> str:
    with pytest.raises(HubError) as error:
        pull_main([repo, "--output", str(folder / "copy")])
    assert not list(folder.glob("*copy*"))
    return one_line(error)


def test_no_network(hub: LocalHub, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    expected = "the hub at http://127.0.0.1:9 cannot be reached for hf://lab/arm: check the network"
    assert expected in pull("lab/arm", tmp_path)
    with pytest.raises(HubError, match="cannot be reached") as error:
        push_main([str(trained), "lab/arm"])
    assert expected in one_line(error)
    with pytest.raises(HubError, match="cannot be reached") as error:
        open_checkpoint("hf://lab/arm")
    assert expected in one_line(error)


def test_what_was_fetched_once_is_opened_without_a_network(policies: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    fetched = open_checkpoint("hf://lab/arm@step-50").directory
    count = len(policies.downloaded)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert open_checkpoint("hf://lab/arm@step-50").directory == fetched
    assert len(policies.downloaded) == count


def test_a_wrong_token(policies: LocalHub, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "refuses the token for hf://lab/arm: log in with `hf auth login`" in pull("lab/arm", tmp_path)
    with pytest.raises(HubError, match="refuses the token for hf://lab/new") as error:
        push_main([str(trained), "lab/new"])
    assert "read and write" in one_line(error) and ("models", "lab/new") not in policies.repositories


def test_no_token_for_a_private_repository(policies: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    assert "has no model lab/arm, or hides it from you: check the name" in pull("lab/arm", tmp_path)


def test_a_repository_of_another_kind(policies: LocalHub, trained: Path, tmp_path: Path) -> None:
    policies.add("datasets", "lab/cubes", trained)
    assert "lab/cubes is a dataset, where a model is wanted" in pull("lab/cubes", tmp_path)
    assert "its address is hf://lab/arm" in pull("datasets/lab/arm", tmp_path)
    with pytest.raises(HubError, match="is the address of a dataset; leave datasets/ out"):
        push_main([str(trained), "datasets/lab/arm"])


def test_a_repository_without_files_of_ours(policies: LocalHub, tmp_path: Path, trained: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weights.bin").write_bytes(b"")
    policies.add("models", "lab/other", tmp_path / "other")
    assert "has nothing that acrlpd reads" in pull("lab/other", tmp_path) and "weights.bin" not in policies.downloaded
    with pytest.raises(HubError, match=r"expected acrlpd\.json, run/run\.json or params/_METADATA; found weights\.bin"):
        open_checkpoint("hf://lab/other")
    with pytest.raises(HubError, match=r"files that acrlpd did not put there \(weights\.bin\): choose another"):
        push_main([str(trained), "lab/other"])


def test_a_tag_that_does_not_exist(policies: LocalHub, tmp_path: Path) -> None:
    assert "lab/arm has no tag, branch or commit 'step-7'; it has step-50" in pull("lab/arm@step-7", tmp_path)


def test_a_missing_extra(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = r"the hub needs the package huggingface_hub: pip install .*\[hub\]"
    for command in (lambda: pull_main(["a/b", "--output", str(tmp_path / "x")]), lambda: open_checkpoint("hf://a/b")):
        with pytest.raises(HubError, match=message):
            command()


def test_a_run_does_not_go_on_from_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", "hf://lab/arm@step-50"]) == 2
    assert "--load critics,policy hf://lab/arm@step-50 starts a new run" in capsys.readouterr().err


def test_nothing_to_upload(tmp_path: Path) -> None:
    with pytest.raises(HubError, match="is nothing to upload: expected an export"):
        push_main([str(tmp_path), "lab/arm"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lab/arm", ("lab/arm", "model", None, "")),
        ("hf://lab/arm@v1.0", ("lab/arm", "model", "v1.0", "")),
        ("hf:/lab/arm@step-5/sub/params", ("lab/arm", "model", "step-5", "sub/params")),
        ("hf://datasets/lab/cubes@main/", ("lab/cubes", "dataset", "main", "")),
    ],
)
def test_addresses(text: str, expected: tuple[str, str, str | None, str]) -> None:
    address = parse_hub_address(text)
    assert (address.repo_id, address.kind, address.revision, address.path) == expected
    assert parse_hub_address(str(address)) == address


@pytest.mark.parametrize("text", ["arm", "hf://arm", "hf://a/b@", "hf://a b/c", "hf://../x", "hf://a/..", "a/b@c@d"])
def test_what_is_not_an_address(text: str) -> None:
    with pytest.raises(HubError, match="expected hf://owner/name"):
        parse_hub_address(text)
