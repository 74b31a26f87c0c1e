"""Each ``olmo-lns`` line of README and docs parses; the Python of the README runs."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
from support import forked

from olmo_lns import cli

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def shell_lines(page):
    """The lines of the page's shell blocks, without comments, continued lines joined."""
    blocks = re.findall(r"```(?:bash|console|sh)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    joined = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"(^|\s)#.*", "", text).rstrip() for text in joined) if line]


def commands():
    """(page, words) of every line that calls olmo-lns; a loop's variables are left as they are."""
    found = [
        (page.name, words.strip())
        for page in PAGES
        for line in shell_lines(page)
        for words in re.findall(r"(?:^|do |; )olmo-lns ([^;|&]+)", line)
    ]
    assert len(found) > 30, "the pages' shell blocks were not found"
    helps = [line for command in cli.COMMANDS.values() for line in command.examples if "megatron-args" not in line]
    return found + [("help", line.removeprefix("olmo-lns ")) for line in helps]


class _Parsed(Exception):
    pass


@pytest.mark.parametrize(("page", "words"), commands())
def test_every_command_line_of_the_pages_parses(page, words, monkeypatch):
    """The command's own parser reads the line, so a renamed option or command fails here."""
    if words.startswith("train"):
        pytest.skip("OLMo's own options: read when the config is loaded")
    plain = argparse.ArgumentParser.parse_args

    def parse(self, *arguments, **options):
        plain(self, *arguments, **options)
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    values = {"$what": "variance", "$on": "--model m --data d", "$arm": "lns"}
    words = re.sub(r"\$\(.*?\)", "a.json b.json", words)
    for name, value in values.items():
        words = words.replace(name, value)
    with pytest.raises(_Parsed):
        cli.main(shlex.split(words))


def test_the_python_of_the_readme_runs_as_printed():
    pytest.importorskip("transformers", reason="needs transformers")
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    done = forked.run(code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "LayerNorm Scaling on: 48 norms" in done.stderr
