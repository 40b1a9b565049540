"""doctor, plan and configs: what they are told, and what they say."""

import os
from pathlib import Path

import pytest

from acrlpd.cli import doctor
from acrlpd.cli.main import main
from acrlpd.config import apply_config_overrides, get_config, save_config
from acrlpd.config.plan.accelerators import MEMORY_FRACTION


def test_doctor_finds_as_much_memory_as_a_run_may_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """XLA's own share of a GPU is smaller than what training takes and the plan counts on."""
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.setenv(name, "")  # restored afterwards
    monkeypatch.delenv(name)
    monkeypatch.setattr(doctor, "CHECKS", {"share": lambda: doctor.Check("ok", os.environ[name])})
    assert main(["doctor"]) == 0
    assert str(MEMORY_FRACTION) in capsys.readouterr().out


def test_doctor_says_how_to_get_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    missing = doctor.check_tokenizer()
    path = tmp_path / "acrlpd" / "paligemma_tokenizer.model"
    assert missing.status == "ok" and f"curl -fLo {path} https://" in missing.message
    monkeypatch.setattr(doctor, "CHECKS", {"tokenizer": doctor.check_tokenizer})
    assert main(["doctor"]) == 0
    assert missing.message in capsys.readouterr().out  # in one piece, to be copied, also in a narrow terminal
    path.parent.mkdir()
    path.touch()
    assert doctor.check_tokenizer().message == f"PaliGemma's is at {path}"


@pytest.mark.parametrize("amount", ["nan", "inf", "0"])
def test_a_plan_needs_an_amount_of_memory(amount: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "debug", "--device-memory", amount]) == 2
    assert f"--device-memory must be above 0 GiB; found {float(amount)}" in capsys.readouterr().err


def test_differences_with_brackets_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = apply_config_overrides(get_config("debug"), {"data.data_dir": "/data/[raw]/x"})
    path = tmp_path / "mine[red].yaml"
    save_config(changed, path)
    assert main(["configs", "diff", "debug", str(path)]) == 0
    out = "".join(capsys.readouterr().out.split())
    assert "/data/[raw]/x" in out and "mine[red].yaml" in out
