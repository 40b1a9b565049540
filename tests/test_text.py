"""Texts of others in a terminal and in Markdown."""

import html
import io
import os
import pty
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from acrlpd.cli.main import main
from acrlpd.console import Console
from acrlpd.text import escape_markdown, print, printable

ROOT = Path(__file__).parents[1]
# Clears the screen, sets the title, a C1 control sequence, goes back in the line, turns the direction of the text.
NASTY = "\x1b[2Jclear \x1b]0;title\x07 \x9b31m \rback \u202eturn"


def is_harmless(text: str) -> bool:
    return all(c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") for c in text)


@given(st.text())
def test_nothing_hidden_is_left(text: str) -> None:
    shown = printable(text)
    assert is_harmless(shown) and shown.encode() is not None
    assert shown == text or not is_harmless(text) or {"\u2028", "\u2029"} & set(text)


def test_what_is_readable_stays() -> None:
    text = "Tür öffnen, 開ける 🤖\n\tC:\\new"
    assert printable(text) == text
    assert printable("\x1b[2J\ud800") == r"\x1b[2J\ud800"


def test_every_way_of_the_console_is_harmless() -> None:
    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=True, color_system="truecolor")
    table = Table(NASTY, title=NASTY)
    table.add_row(NASTY)
    table.add_row(Text(NASTY, style="bold red"))
    for shown in (NASTY, Text(NASTY), table, Panel(Text(NASTY), title=Text(NASTY)), {"text": NASTY}):
        console.print(shown)
    console.rule(NASTY)
    styled = out.getvalue()
    assert "\x1b[1;31m" in styled  # rich's own styles are still obeyed
    for sequence in ("\x1b[2J", "\x1b]0", "\x07", "\x9b", "\r", "\u202e"):
        assert sequence not in styled
    assert re.sub(r"\x1b\[[\d;]*m", "", styled).count(r"\x1b[2Jclear") == 10


def test_no_part_of_a_text_is_cut_off_where_escapes_make_it_longer() -> None:
    out = io.StringIO()
    grid = Table.grid()
    grid.add_row(Text("\x1b word " * 20 + "the end"))
    Console(file=out, width=30).print(Panel(grid))
    assert out.getvalue().count(r"\x1b") == 20 and "the end" in out.getvalue()


def test_brackets_are_no_markup() -> None:
    out = io.StringIO()
    Console(file=out).print("lr[/bold] [link=file:///etc]here[/link]")
    assert out.getvalue() == "lr[/bold] [link=file:///etc]here[/link]\n"


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    print("a\x1b[2J", 1, sep="|", end="!\n")
    assert capsys.readouterr().out == "a\\x1b[2J|1!\n"


LOGS = """
import logging, sys, threading, warnings
from acrlpd.cli.main import main
from acrlpd.process import setup_logging
main(["--version"])
logging.getLogger("another.package").warning("other \\x1b[2J")
setup_logging()
logging.getLogger("acrlpd.training").warning("prompt %s", "\\x1b]0;title\\x07")
warnings.warn("warning \\x1b[2J")
thread = threading.Thread(target=lambda: 1 / 0, name="thread \\x1b[2J")
thread.start()
thread.join()
raise RuntimeError("bug \\x1b[2J")
"""


def test_log_messages_warnings_and_tracebacks_of_a_process() -> None:
    result = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, check=False)
    assert result.returncode == 1 and is_harmless(result.stderr)
    for words in (
        r"other \x1b[2J",
        r"prompt \x1b]0;title\x07",
        r"UserWarning: warning \x1b[2J",
        r"Exception in thread thread \x1b[2J:",
        "ZeroDivisionError: division by zero",
        r"RuntimeError: bug \x1b[2J",
    ):
        assert words in result.stderr


@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_error_messages_of_a_command(debug: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", "aloha", "--exp_name", "x", "--data_dir", NASTY, *debug]) == 2
    assert main(["watch", f"/nowhere/{NASTY}", *debug]) == 2
    shown = capsys.readouterr()
    assert is_harmless(shown.out + shown.err) and shown.err.count(r"\x1b[2Jclear") >= 2


def test_errors_about_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["watch", "run", f"--{NASTY}"], ["runs", "verify", "run", f"--{NASTY}"]):
        with pytest.raises(SystemExit):
            main(args)
        shown = capsys.readouterr()
        assert is_harmless(shown.out + shown.err) and r"\x1b[2Jclear" in shown.err


def test_help_that_shows_the_values_of_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text('base_config: debug\ndata:\n  default_prompt: "go \\e[2J \\e[31m left"\n')
    with pytest.raises(SystemExit):
        main(["train", "--config", str(config), "--help", "data"])
    shown = capsys.readouterr().out
    assert is_harmless(shown) and r"go \x1b[2J \x1b[31m left" in " ".join(shown.replace("│", "").split())


def test_a_terminal_shows_the_styles_of_errors_about_arguments() -> None:
    code = f"from acrlpd.cli.main import main; main(['watch', 'run', {'--' + NASTY!r}])"
    receiver, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color"}
    result = subprocess.run(
        [sys.executable, "-c", code], stdout=terminal, stderr=terminal, env=environment, check=False
    )
    shown = os.read(receiver, 2**16).decode()
    assert result.returncode == 2 and "\x1b[31m" in shown and r"\x1b[2Jclear" in shown
    assert is_harmless(re.sub(r"\x1b\[[\d;]+m|\r\n", "", shown))


MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


@example("__0__")
@given(st.text(st.sampled_from("<b>&;|`*_~[]()!#-+=.1\\ x:/'\"\n"), max_size=30) | st.text())
def test_markdown_shows_the_text_as_it_is(text: str) -> None:
    plain = " ".join(printable(text).split())
    escaped = escape_markdown(text)
    table = MARKDOWN.render(f"| {escaped} |\n| --- |\n| cell |\n")
    assert f"<th>{html.escape(plain, quote=False)}</th>" in table.replace("&quot;", '"')
    item = MARKDOWN.render(f"- {escaped}\n").replace("&quot;", '"').replace("\n", "")
    assert item == f"<ul><li>{html.escape(plain, quote=False)}</li></ul>"


def test_markdown_stays_readable() -> None:
    assert (
        escape_markdown("critic_loss is 0.5, -1.5 at step 2,250 (95 %)")
        == "critic_loss is 0.5, -1.5 at step 2,250 (95 %)"
    )
    assert escape_markdown("<img src=x onerror=alert(1)>") == "&lt;img src=x onerror=alert(1)&gt;"


@pytest.mark.parametrize(
    "code", ["print('x')", "import rich.console\n\nrich.console.Console()", "import tyro\n\ntyro.cli(int)"]
)
def test_lint_refuses_the_other_ways_to_the_terminal(code: str) -> None:
    ruff = [Path(sys.executable).with_name("ruff"), "check", "--stdin-filename", "src/acrlpd/cli/new.py", "-"]
    result = subprocess.run(ruff, input=code + "\n", cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and ("T201" in result.stdout or "TID251" in result.stdout)
