"""Each ``olmo-lns`` line of README and docs parses; some lines that need no cluster run as printed."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import forked

from olmo_lns import cli

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
#: Marks of lines that no test machine can run: a placeholder, a hub, a trained model of somebody's.
ELSEWHERE = re.compile(r"…|<|Qwen/|allenai/|--tasks|folded-run|lm_eval|qwen-lns")


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
    return found


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder as the guides assume it: runs/lns/step1000, its unsharded copy, held-out tokens and our configs."""
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    work = tmp_path_factory.mktemp("guide")
    size = {"max_duration": 4, "scheduler.t_warmup": 1, "model.n_layers": 2}
    small = {"name": "small", "config": "demo-base.yaml", "data": "demo", "sizes": {"a": size}, "arms": ["lns"]}
    (work / "small.yaml").write_text(yaml.safe_dump(small))
    command = [sys.executable, "-m", "olmo_lns", "demo", "small.yaml", "--out", "made"]
    subprocess.run(command, cwd=work, check=True, capture_output=True)
    (checkpoint,) = work.glob("made/*-lns-*/step4-unsharded")
    for name in ("step1000", "step1000-unsharded"):
        shutil.copytree(checkpoint, work / "runs" / "lns" / name)
    shutil.copy(work / "made" / "data" / "heldout.npy", work)
    (work / "configs").symlink_to(REPOSITORY / "configs")
    return work


#: Page -> the beginnings of the lines that are run, in this order, in one folder.
RUN = {
    "diagnostics.md": ("olmo-lns analyze variance", "olmo-lns analyze jacobian", "olmo-lns analyze gradnorm"),
    "export.md": (
        "olmo-lns export runs/lns/step1000 folded",
        "olmo-lns export runs/lns/step1000 model",
        "olmo-lns verify",
    ),
    "olmo.md": ("olmo-lns doctor",),
    "study.md": ("olmo-lns study plan paper",),
}


def runnable():
    for page, beginnings in RUN.items():
        lines = [line for line in shell_lines(REPOSITORY / "docs" / page) if not ELSEWHERE.search(line)]
        for beginning in beginnings:
            found = [line for line in lines if line.startswith(beginning)]
            assert found, f"docs/{page} has no line that begins with {beginning!r}"
            yield page, found[0]


def test_the_python_of_the_readme_runs_as_printed():
    pytest.importorskip("transformers", reason="needs transformers")
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    done = forked.run(code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "LayerNorm Scaling on: 48 norms" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_chosen_lines_run_as_printed(trained):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for page, line in runnable():
        done = subprocess.run(["bash", "-c", line], cwd=trained, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (page, line, done.stdout[-2000:], done.stderr[-2000:])
