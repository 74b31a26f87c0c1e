"""The description of a study: schemes as arms, learning rates, names of the pack, and text that must stay text."""

import re
import subprocess
from dataclasses import MISSING, fields

import pytest
import yaml
from support.studies import REPOSITORY

from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import Scheme
from olmo_lns.study.arms import ARMS
from olmo_lns.study.engines import megatron
from olmo_lns.study.launch import slurm
from olmo_lns.study.plan import spec
from olmo_lns.study.plan.check import compare_planned
from olmo_lns.study.plan.spec import Launch, Study

CONFIGS = REPOSITORY / "configs"


@pytest.fixture(autouse=True)
def _arms():
    """Remove the arms that a test added: the table keeps them for the life of the process."""
    before = dict(ARMS)
    yield
    for name in {*ARMS} - {*before}:
        del ARMS[name]


def load(folder, **keys):
    raw = {"name": "mine", "config": f"{CONFIGS}/megatron/{{size}}-{{arm}}.yaml", "framework": "megatron"}
    raw |= {"sizes": ["60M"], "arms": ["preln", "lns"], "seeds": [1]} | keys
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return Study.load(path)


def test_any_scheme_with_its_parameters_can_be_an_arm(tmp_path):
    """The pack has no file for such an arm, so the run takes the file of Pre-LN with the keys of the arm."""
    study = load(tmp_path, arms=["preln", "lns:exponent=0.3", "lns:exponent=0.5"])
    assert study.arms == ["preln", "lns_exponent_0.3", "lns"]
    run = study.runs[1]
    assert run.name == "60M-lns_exponent_0.3-s1" and run.config.name == "60M-preln.yaml"
    assert run.engine.scheme(run.settings) == Scheme.of("lns", exponent=0.3)
    compare_planned(study.runs)
    assert study.runs[2].config.name == "60M-lns.yaml"


def test_an_unknown_arm_is_refused(tmp_path):
    with pytest.raises(LNSConfigError, match="unknown arm 'lnss'.*did you mean 'lns'.*expected a scheme, such as lns"):
        load(tmp_path, arms=["preln", "lnss"])


@pytest.mark.parametrize(
    ("rates", "names"),
    [
        ([1e-3], ["60Mx0.001-preln-s1", "60Mx0.001-lns-s1"]),
        ({"lns": [1e-3, "2e-3"]}, ["60M-preln-s1", "60Mx0.001-lns-s1", "60Mx0.002-lns-s1"]),
        ({"60M": {"preln": [6e-4], "lns": [1e-3]}}, ["60Mx0.0006-preln-s1", "60Mx0.001-lns-s1"]),
        ({"preln": ["1x"], "lns": ["2x", "0.5x"]}, ["60Mx0.0006-preln-s1", "60Mx0.0012-lns-s1", "60Mx0.0003-lns-s1"]),
    ],
)
def test_rates_give_a_run_for_each_arm_and_rate(tmp_path, rates, names):
    study = load(tmp_path, rates=rates)
    assert [run.name for run in study.runs] == names
    last = study.runs[-1]
    assert last.shape.learning_rate == float(last.rate or 0) and last.shape.min_learning_rate == pytest.approx(
        last.rate / 10
    )
    assert {run.group for run in study.runs} == {"60M"}
    compare_planned(study.runs)


def test_arms_with_their_own_rates_may_differ_in_nothing_else_and_have_the_nodes_of_their_size(tmp_path):
    keys = {"rates": {"preln": [6e-4], "lns": [1e-3]}, "launch": {"nodes": {"60M": 4}}}
    study = load(tmp_path, arms={"preln": {}, "lns": {"train-iters": 7}}, **keys)
    assert [study.launch.nodes_of(run.size) for run in study.runs] == [4, 4]
    with pytest.raises(LNSConfigError, match="60Mx0.0006-preln-s1 and 60Mx0.001-lns-s1 differ.*train_iters"):
        compare_planned(study.runs)


def test_a_name_of_the_pack_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_DATA", "/data")
    monkeypatch.setenv("MEGATRON_SAVE_DIR", "/save")
    assert Study.load("paper-megatron").path == CONFIGS / "study" / "paper-megatron.yaml"
    assert megatron.expand(["--lns-config", "60M-lns"]) == megatron.expand(
        ["--lns-config", str(CONFIGS / "megatron" / "60M-lns.yaml")]
    )
    (tmp_path / "60M-lns.yaml").write_text("num-layers: 3\n")  # an edited copy comes first
    assert megatron.expand(["--lns-config", "60M-lns"]) == ["--num-layers", "3"]
    with pytest.raises(LNSConfigError, match="papr: no such file, and .*did you mean 'paper'"):
        Study.load("papr")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"size": ["a"]}, "unknown keys size"),
        ({"framework": "jax"}, "framework 'jax'"),
        ({"name": "a\ntouch /tmp/x"}, "expected text without line breaks"),
        ({"config": "{Size}.yaml"}, "config '{Size}.yaml': expected a path"),
        ({"sizes": "ab"}, "sizes 'ab': expected a list of names, or for each name its settings"),
        ({"sizes": ["a/b"]}, "size 'a/b'"),
        ({"rates": [0]}, "rates .*expected a list of learning rates above 0"),
        ({"rates": ["xx"]}, "rates .*expected a list of learning rates above 0"),
        ({"rates": {"deepnorm": [1e-3]}}, "rates names deepnorm, which is not among the arms"),
        ({"seeds": [2**32]}, "seeds .4294967296.: expected a list of whole numbers from 0"),
        ({"more_seeds": {"60M": [1]}}, "a seed is listed twice"),
        ({"horizons": [16, 8]}, r"horizons \[16, 8\]: expected rising"),
        ({"horizons": [8, 16]}, "runs of Megatron cannot be branched here"),
        ({"published": "lns-0"}, "published 'lns-0'.*expected "),
        ({"decay": 0.1}, "decay belongs to horizons"),
        ({"launch": {"nodes": {"B": 4}}}, "launch: nodes names B, which is not among the sizes: "),
        ({"launch": {"sbatch": {"qos": "long\ntouch x"}}}, "launch: sbatch: qos: .* without line breaks"),
        ({"launch": {"sbatch": {"q os": 1}}}, "expected a mapping of #SBATCH options"),
    ],
    ids=str,
)
def test_a_wrong_description_is_named(tmp_path, keys, message):
    with pytest.raises(LNSConfigError, match=message):
        load(tmp_path, **keys)


def test_one_arm_can_have_more_seeds_than_another(tmp_path):
    study = load(tmp_path, sizes=["60M", "1B"], more_seeds={"60M": {"lns": [2, 3]}, "1B": [2]})
    assert [run.name for run in study.runs] == [
        *("60M-preln-s1", "60M-lns-s1", "60M-lns-s2", "60M-lns-s3"),
        *("1B-preln-s1", "1B-lns-s1", "1B-preln-s2", "1B-lns-s2"),
    ]


def test_no_word_of_a_description_becomes_a_command_in_a_script(tmp_path, monkeypatch):
    """bash expands the command line as an array task does, and every word arrives as it was written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pretrain.py").touch()
    words = ["$(touch ran)", "`touch ran`", "$HOME", "a;touch ran", "it's"]
    study = load(tmp_path, launch={"command": "pretrain.py", "nproc": 2, "nodes": 2, "args": words})
    (script,) = slurm.write(study, study.runs, tmp_path / "out", tmp_path / "jobs")
    cases = re.findall(r"COMMAND=\(.*\) ;;", script.read_text())
    assert len(cases) == 2 and '"$SLURM_JOB_ID"' in cases[0] and '"$HEAD:29500"' in cases[0]
    line = cases[0].removesuffix(" ;;") + '; printf "%s\\n" "${COMMAND[@]}"'
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[-len(words) :] == words and not (tmp_path / "ran").exists()
    with pytest.raises(LNSConfigError, match="no line breaks"):
        slurm.write(study, study.runs, tmp_path / "out", tmp_path / "jobs", job=slurm.Job(account="a\nb"))


def test_the_page_has_every_key_with_its_default_and_a_valid_example():
    """docs/study.md has each key of the code and no other, the defaults of the code, and examples that are accepted."""
    page = (REPOSITORY / "docs" / "study.md").read_text(encoding="utf-8").split("## Every key of a description")[1]
    rows = [[cell.strip() for cell in line.split(" | ")] for line in page.split("\n## ")[0].splitlines()]
    found = {row[0].strip("|` "): row[1:] for row in rows if row[0].startswith("| `")}
    schema = {key: value for key, value in spec.KEYS.items() if key != "launch"}
    schema |= {f"launch.{key}": value for key, value in spec.LAUNCH.items()}
    assert list(found) == list(schema)
    for key, (kind, default, example, meaning) in found.items():
        fits, _, wanted = schema[key]
        assert kind and meaning and fits(yaml.safe_load(example.strip("`"))), (key, example)
        if default.startswith("`"):
            assert yaml.safe_load(default.strip("`")) == wanted, key
        else:
            assert wanted is (spec.NEEDED if default == "–" else None), key
    launch = {field.name: field.default for field in fields(Launch) if field.default not in (MISSING, ())}
    assert launch == {key: default for key, (*_, default) in spec.LAUNCH.items() if key not in ("args", "sbatch")}
