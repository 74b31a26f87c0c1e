"""The keys of a study's description and their values, checked with pydantic.

docs/descriptions.md has every key. Every scalar is read as text and converted by the schema. Quotes therefore make no
difference: ``48:00:00`` is a time and ``no`` is a word.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.study import yaml_files


def _parse_null(value: Any) -> Any:
    return None if value in ("", "~", "null") else value


def _check_distinct(values: list[Any]) -> list[Any]:
    if repeated := [str(value) for value in values if values.count(value) > 1]:
        raise ValueError(f"{repeated[0]} is listed twice. List it once")
    return values


def _as_table(value: Any) -> Any:
    """Convert a list of names, or names with optional settings, to ``{name: settings}``."""
    if isinstance(value, list):
        return {str(name): {} for name in _check_distinct(value)}
    if isinstance(value, dict):
        return {name: {} if _parse_null(settings) is None else settings for name, settings in value.items()}
    return value


def _check_rate(text: str) -> str:
    if not 0 < float(text.removesuffix("x")) < float("inf"):  # float raises ValueError for other text
        raise ValueError("Write a learning rate above 0, or a multiple of the config's rate, such as 2x")
    return text


#: Text without control characters: a line break would start a new line in a generated shell script.
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.+][A-Za-z0-9_.+-]*$")]
Size = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._]+$")]
Positive = Annotated[int, Field(ge=1)]
#: Seeds that OLMo and Megatron accept.
Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], AfterValidator(_check_distinct)]
Overrides = Annotated[dict[Text, Any], AfterValidator(yaml_files.parse_scalars)]
Rates = Annotated[list[Annotated[Text, AfterValidator(_check_rate)]], Field(min_length=1)]
OptionalText = Annotated[Text | None, BeforeValidator(_parse_null)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Container(_Strict):
    """Container of a Slurm job.

    :param image: an image. A ``.sif`` runs with Apptainer, any other image with Pyxis.
    :param mounts: folders, such as ``/data`` or ``/data:/inside``.
    """

    image: Text
    mounts: list[Text] = []


class Launch(_Strict):
    """Launch settings of a study.

    :param command: ``train`` (``olmo-lns train``) or the path of a training script.
    :param nproc: number of GPUs in a node.
    :param nodes: number of nodes for a run, by size. The key ``""`` is for all other sizes.
    :param gpu: type of GPU, for the plan's estimates and for the time that a Slurm script requests.
    :param threads: ``OMP_NUM_THREADS`` of each run.
    :param args: arguments that are added to every command.
    :param setup: shell lines at the start of a Slurm job, such as ``module load cuda``.
    :param sbatch: additional ``#SBATCH`` lines. None removes a default line.
    """

    command: Text = "train"
    nproc: Positive = 1
    gpu: Literal["A100", "H100", "H200"] = "A100"
    nodes: Annotated[
        dict[str, Positive], BeforeValidator(lambda value: value if isinstance(value, dict) else {"": value})
    ] = {}
    threads: Annotated[Positive | None, BeforeValidator(_parse_null)] = None
    args: list[Text] = []
    setup: list[Text] = []
    sbatch: dict[Word, OptionalText] = {}
    container: Container | None = None


class Description(_Strict):
    """The keys of a description (docs/descriptions.md)."""

    name: Word
    framework: Literal["olmo", "olmo-core", "megatron"] = "olmo"
    config: Text
    sizes: Annotated[dict[Size, Overrides], BeforeValidator(_as_table)]
    arms: Annotated[dict[Text, Overrides], BeforeValidator(_as_table)]
    rates: Annotated[Rates | dict[str, Rates], BeforeValidator(lambda value: {} if value == "" else value)] = {}
    seeds: Seeds | None = None
    more_seeds: dict[str, Seeds | dict[str, Seeds]] = {}
    only: dict[str, list[str]] = {}
    data: OptionalText = None
    final_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    published: OptionalText = None
    launch: Launch = Launch()


@cache
def published() -> dict[str, Any]:
    """Return the papers' numbers: ``tables`` and ``points`` of published.yaml."""
    numbers: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    return numbers


def read_description(path: Path) -> Description:
    """Read a description file and check its keys and values.

    :raises LNSConfigError: if a key is missing, unknown or repeated, or a value is wrong.
    """
    try:
        description = Description.model_validate(yaml_files.read_text(path))
    except ValidationError as error:
        detail = max(error.errors(), key=lambda detail: len(detail["loc"]))  # the innermost key
        key = ": ".join(str(part) for part in detail["loc"] if "[" not in str(part))  # without names of types
        value = f"{detail['input']!r}: " if isinstance(detail["input"], str) else ""
        message = f"{value}{detail['msg']}"
        if detail["type"] == "extra_forbidden":
            known = Launch.model_fields if "launch" in detail["loc"] else Description.model_fields
            message = f"unknown key{did_you_mean(str(detail['loc'][-1]), known)}"
        raise LNSConfigError(f"{path}: {key}: {message}. docs/descriptions.md has all keys and values.") from None
    tables = published()["tables"]
    if description.published is not None and description.published not in tables:
        raise LNSConfigError(
            f"{path}: published: {description.published!r} is not a table of published numbers. Use one of "
            f"{', '.join(tables)}."
        )
    return description
