"""The description of a study: text that stays text, keys that are checked, arms, rates and runs."""

import functools
import re

import pytest
import yaml
from support.studies import REPOSITORY

from olmo_lns.arms import ARMS
from olmo_lns.errors import LNSConfigError
from olmo_lns.study import bundled_configs, cli
from olmo_lns.study.describe import Study
from olmo_lns.study.planning import compare_arms
from olmo_lns.study.schema import Description, Launch, published

CONFIGS = REPOSITORY / "configs"
SHIPPED = sorted(path for path in (CONFIGS / "study").glob("*.yaml") if "\narms:" in path.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _arms():
    """Remove the arms that a test added: the table keeps them for the life of the process."""
    before = dict(ARMS)
    yield
    for name in {*ARMS} - {*before}:
        del ARMS[name]


def write(folder, text):
    path = folder / "mine.yaml"
    head = f"name: mine\nframework: megatron\nconfig: {CONFIGS}/megatron/{{size}}-{{arm}}.yaml\n"
    defaults = {"sizes": "[60M]", "arms": "[preln, lns]", "seeds": "[1]"}
    rest = "".join(f"{key}: {value}\n" for key, value in defaults.items() if not re.search(rf"^{key}:", text, re.M))
    path.write_text(head + rest + text)
    return path


def load(folder, **keys):
    return Study.load(write(folder, yaml.safe_dump(keys) if keys else ""))


def script(folder, text):
    """The Slurm script of the description with these lines."""
    path = write(folder, text)
    assert cli.main(["launch", str(path), "--out", str(folder / "out"), "--slurm", str(folder / "jobs")]) == 0
    return (folder / "jobs" / "60M.sbatch").read_text(encoding="utf-8")


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_quoted_or_not_a_value_is_the_same_and_text_stays_text(tmp_path, quote):
    """None of these is the number, the date or the truth that YAML makes of it."""
    text = {
        "time": "48:00:00", "qos": "no", "account": "010", "nice": "1e3", "partition": "1_000", "mem-per-cpu": "0x10",
        "begin": "2024-01-01", "comment": "on", "reservation": "12:30", "wckey": ".5", "licenses": "0o17",
    }  # fmt: skip
    lines = "".join(f"    {key}: {quote}{value}{quote}\n" for key, value in text.items())
    lines += "".join(f"    {key}: {quote}{value}{quote}\n" for key, value in (("mem", "null"), ("exclusive", "false")))
    lines = f"launch:\n  command: /bin/sh\n  nproc: {quote}8{quote}\n  sbatch:\n{lines}    output: ~\n"
    found = script(tmp_path, f"{lines}    oversubscribe: {quote}true{quote}\nseeds: [{quote}7{quote}]\n").splitlines()
    expected = {f"{key}={value}" for key, value in text.items()} | {"oversubscribe", "gpus-per-node=8"}
    assert {f"#SBATCH --{line}" for line in expected} <= {*found}
    assert not [line for line in found if re.search("--(mem|exclusive|output)\\b(?!-)", line)]
    assert any("60M-preln-s7" in line for line in found)


def test_names_that_yaml_takes_for_numbers_or_truth_stay_text(tmp_path):
    names = ["010", "no", "1.50", "1e3", "1_000", "0x10", "2024", "on", ".5", "null"]
    path = write(tmp_path, f"sizes: {{{', '.join(f'{name}: ' for name in names)}}}\n")
    path.write_text(path.read_text().replace("{size}-{arm}", "60M-{arm}").replace("name: mine", "name: 007"))
    study = Study.load(path)
    assert (study.name, list(dict.fromkeys(run.size_and_rate for run in study.runs))) == ("007", names)


@pytest.mark.parametrize(
    ("value", "flags"),
    [("1.0e-3", ["0.001"]), ("010", ["010"]), ("'5'", ["5"]), ("yes", ["yes"]), ("~", []), ("true", [""])],
)
def test_a_value_of_a_size_reaches_the_command_as_it_is_written(tmp_path, value, flags):
    """Numbers may become numbers; Megatron's own parser reads or refuses the rest."""
    run = Study.load(write(tmp_path, f"sizes: {{60M: {{exit-interval: {value}}}}}\n")).runs[0]
    text = " ".join(run.engine.arguments(run, tmp_path))
    assert [value.strip() for value in re.findall("--exit-interval ([^-]*)", text)] == flags


@pytest.mark.parametrize(
    "text",
    [
        "seeds: [1]\nseeds: [2]\n",
        "sizes: {60M: {lr: 1.0e-3}, 60M: {lr: 2.0e-3}}\n",
        "arms: {preln: , lns: {lr: 1.0e-3}, 'lns': }\n",
        "more_seeds: {60M: {lns: [2], lns: [3]}}\n",
        "sizes: {60M: &a {lr: 1e-3}, 150M: {<<: *a, lr: 2e-3, lr: 3e-3}}\n",
    ],
)
def test_a_key_that_is_given_twice_is_an_error(tmp_path, text):
    with pytest.raises(LNSConfigError, match="appears twice"):
        Study.load(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("horizon: [1]\n", "horizon: unknown key"),
        ("launch: {thread: 2}\n", "launch: thread: unknown key"),
        ("seeds: [-1]\n", "seeds: .*'-1'.* greater than or equal to 0"),
        ("rates: [0]\n", "rates: .*learning rate above 0"),
        ("launch: {sbatch: {qos: [a]}}\n", "launch: sbatch: qos"),
        ("launch: {sbatch: {qos: \"a\\n#SBATCH --x\"}}\n", "launch: sbatch: qos: .*match pattern"),
        ("published: lns-2\n", "published: 'lns-2' is not a table of published numbers. Use one of lns-1"),
        ("sizes: [a/b]\n", "sizes: a/b"),
        ("seeds: []\n", "The description has no run"),
        ("seeds: [1, 1]\n", "seeds: .*1 is listed twice"),
        ("arms: [preln, lns, lns]\n", "arms: .*lns is listed twice"),
        ("arms: [lns, 'lns:exponent=0.5']\n", "Two runs would use the folder 60M-lns-s1. List each arm"),
        ("only: {1B: [lns]}\n", "only names 1B, which the description does not have. Use 60M"),
        ("launch: {nodes: {1B: 2}}\n", "nodes names 1B"),
        ("arms: [lns, mixln]\n", "does not support arm 'mixln'.* use OLMo"),
        ("rates: [1e-3, 0.001]\n", "Two runs would use the folder 60Mx0.001-"),
        ("rates: [1x, 6.0e-4]\n", "Two runs would use the folder 60Mx0.0006-"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(tmp_path, text, message):
    with pytest.raises(LNSConfigError, match=message):
        Study.load(write(tmp_path, text))
    (tmp_path / "few.yaml").write_text("name: few\n")
    with pytest.raises(LNSConfigError, match="few.yaml: config: Field required"):
        Study.load(tmp_path / "few.yaml")


def test_any_scheme_with_its_parameters_can_be_an_arm(tmp_path):
    """The pack has no file for such an arm, so the run takes a stock file with the keys of the arm."""
    study = load(tmp_path, arms=["preln", "lns:exponent=0.3", "lns:exponent=0.5"])
    assert study.arms == ["preln", "lns_exponent_0.3", "lns"]
    run = study.runs[1]
    assert run.name == "60M-lns_exponent_0.3-s1" and run.config.name == "60M-preln_scaled_init.yaml"
    assert run.settings["layernorm_scaling_exponent"] == 0.3
    assert "no_scaled_init" not in run.engine.arguments(run, tmp_path)
    compare_arms(study.runs)
    assert study.runs[2].config.name == "60M-lns.yaml"


@pytest.mark.parametrize(
    ("rates", "names"),
    [
        ([1e-3], ["60Mx0.001-preln-s1", "60Mx0.001-lns-s1"]),
        ({"lns": [1e-3, "2e-3"]}, ["60M-preln-s1", "60Mx0.001-lns-s1", "60Mx0.002-lns-s1"]),
        ({"preln": ["1x"], "lns": ["2x", "0.5x"]}, ["60Mx0.0006-preln-s1", "60Mx0.0012-lns-s1", "60Mx0.0003-lns-s1"]),
    ],
)
def test_rates_give_a_run_for_each_arm_and_rate(tmp_path, rates, names):
    study = load(tmp_path, rates=rates, launch={"nodes": {"60M": 4}})
    assert [run.name for run in study.runs] == names
    last = study.runs[-1]
    assert last.workload.learning_rate == last.rate and last.settings["min_lr"] == pytest.approx(last.rate / 10)
    assert {run.size for run in study.runs} == {"60M"} and {study.layout(run) for run in study.runs} == {(4, 1)}
    compare_arms(study.runs)


@pytest.mark.parametrize(
    ("only", "found"),
    [
        (["60M"], 6), (["60M-lns"], 2), (["60M-preln"], 2), (["150M-lns-s2"], 1),
        (["60M-lns", "60M-lns-s1", "150M"], 8),
    ],
)  # fmt: skip
def test_only_takes_the_beginning_of_a_name(tmp_path, only, found):
    """By whole parts: `60M-preln` is not `60M-preln_scaled_init`."""
    study = load(tmp_path, sizes=["60M", "150M"], seeds=[1, 2], arms=["preln", "preln_scaled_init", "lns"])
    assert len(study.select_runs(only)) == found
    for wrong in ("7B", "15", "60M-preln_"):
        with pytest.raises(LNSConfigError, match=f"No run of study mine begins with '{wrong}'"):
            study.select_runs([wrong])


@functools.cache
def shipped(path):
    return Study.load(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_arms_of_a_shipped_description_differ_in_nothing_else(path):
    """In the smallest size. The sizes of a description share the settings of its arms."""
    runs = shipped(path).runs
    compare_arms([*{run.arm: run for run in reversed(runs) if run.size == runs[0].size}.values()])


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_arms_of_every_size_of_a_shipped_description_differ_in_nothing_else(path):
    compare_arms([*{(run.size, run.arm): run for run in reversed(shipped(path).runs)}.values()])


def test_every_shipped_description_loads_and_runs_the_arms_of_its_published_table():
    for path in SHIPPED:
        study = shipped(path)
        assert study.runs and str(path.stem) in (study.name, "paper-init")
        cells = published()["tables"][study.published]["cells"] if study.published else {}
        shared = {*study.sizes} & {*cells}
        assert shared or not cells
        for size in shared:
            assert {*cells[size]} <= {run.arm for run in study.runs if run.size == size}, (path, size)


def test_a_copied_description_finds_the_configs_of_the_pack(tmp_path, monkeypatch, capsys):
    """A config beside the description comes first."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("llama-c4", "tiny"):
        assert bundled_configs.main(["copy", f"study/{name}"]) == 0
    (tmp_path / "olmo" / "llama-c4").mkdir(parents=True)
    assert bundled_configs.main(["copy", "olmo/llama-c4/71M", "-o", "../olmo/llama-c4"]) == 0
    found = {run.size_and_rate: run.config.resolve() for run in Study.load("llama-c4.yaml").runs}
    assert found["71M"] == tmp_path / "olmo" / "llama-c4" / "71M.yaml"
    assert found["130M"] == CONFIGS / "olmo" / "llama-c4" / "130M.yaml"
    with pytest.raises(LNSConfigError, match="already exists, and is not overwritten"):
        bundled_configs.main(["copy", "study/tiny"])
    for name in ("olmo/60M-lsn.yaml", "../tests", "llama-c4.yaml", str(tmp_path)):  # the pack's files only
        with pytest.raises(LNSConfigError, match=f"The pack has no file {name}"):
            bundled_configs.main(["copy", name, "-o", "new"])
    assert bundled_configs.main(["list"]) == 0 and "study/paper.yaml\n" in capsys.readouterr().out


def test_the_page_has_every_key():
    page = (REPOSITORY / "docs" / "descriptions.md").read_text(encoding="utf-8")
    rows = {row[0] for row in re.findall(r"^\| `([a-z_.]+)` \|(.*)$", page, re.M)}
    assert rows >= {*Description.model_fields} - {"launch"} | {f"launch.{key}" for key in Launch.model_fields}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "papr"], "did you mean 'paper'"),
        (["plan", "paper", "--only", "60M-lsn"], "did you mean '60M-lns'"),
    ],
)
def test_a_name_that_is_misspelt_gets_a_suggestion(words, message):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    with pytest.raises(LNSConfigError, match=message):
        cli.main(words)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("arms: [lnss]", "Unknown arm 'lnss' .did you mean 'lns'"),
        ("arms: [lns]\nlaunch: {nprocs: 2}", "nprocs: unknown key .did you mean 'nproc'"),
        ("arms: [lns]\nonly: {60m: [lns]}", "only names 60m, which the description does not have .did you mean '60M'"),
    ],
)
def test_a_word_of_a_description_that_is_misspelt_gets_a_suggestion(tmp_path, line, message):
    (tmp_path / "s.yaml").write_text(f"name: s\nconfig: x.yaml\nsizes: [60M]\n{line}\n")
    with pytest.raises(LNSConfigError, match=message):
        Study.load(tmp_path / "s.yaml")
