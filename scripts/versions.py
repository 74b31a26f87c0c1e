#!/usr/bin/env python3
"""Train tiny models in many versions of OLMo-core and transformers: under LNS, stock, and stock with hooks.

    python scripts/versions.py olmo-core path/to/OLMo-core COMMIT... --out rows.csv
    python scripts/versions.py transformers 4.48 4.49 5.0 ... --out rows.csv

A commit is unpacked from the checkout's git folder, a release of transformers is installed by pip into a folder of its
own. A row is ``right`` where the losses of six steps under LNS equal the hooks' within 2e-5 and differ from stock's by
more than 100 times that; else it has the reason. ``--markdown`` prints the rows as a table.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterator

STEPS, NEAR = 6, 2e-5
FAMILIES = ("llama", "qwen3", "mixtral", "gpt2")


def losses(build: Callable[[], Any], loss: Callable[[Any, Any], Any], blocks: Callable[[Any], Any], lns: Any) -> Any:
    """Losses of six AdamW steps on fixed tokens: stock, with hooks, and under LNS."""
    import torch

    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))

    def train(model: Any) -> list[float]:
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=3e-3), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            value = loss(model, tokens)
            value.backward()
            optimizer.step()
            found.append(value.item())
        return found

    def hooked() -> Any:
        model = build()
        for number, norms in enumerate(blocks(model), start=1):
            for norm in norms:
                norm.register_forward_hook(lambda module, args, output, s=number**-0.5: output * s)
        return model

    return {"stock": train(build()), "hooks": train(hooked()), "lns": train(lns(build))}


def olmo_core() -> dict[str, Any]:
    import torch
    import torch.nn.functional as F
    from olmo_core.nn.transformer import TransformerConfig

    from olmo_lns.olmo_core import apply

    def config() -> Any:
        return TransformerConfig.llama_like(d_model=32, vocab_size=64, n_layers=4, n_heads=4)

    def draw(made: Any) -> Any:
        model = made.build(init_device="cpu")
        model.init_weights(device=torch.device("cpu"))
        return model

    def loss(model: Any, tokens: Any) -> Any:
        return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())

    under = lambda build: draw(apply(config()))  # noqa: E731
    norms = lambda model: [(b.attention_norm, b.feed_forward_norm) for b in model.blocks.values()]  # noqa: E731
    return {"llama_like": losses(lambda: draw(config()), loss, norms, under)}


def transformers() -> dict[str, Any]:
    import torch
    import transformers as hf

    from olmo_lns.integrations.transformers import apply

    sizes: dict[str, Any] = dict(vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
    sizes |= dict(
        intermediate_size=48, num_key_value_heads=2, head_dim=8, num_local_experts=4, max_position_embeddings=32
    )
    sizes |= dict(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    sizes |= dict(n_embd=32, n_layer=4, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    found = {}
    for family in FAMILIES:
        if family not in hf.CONFIG_MAPPING:
            continue

        def build(family: str = family) -> Any:
            torch.manual_seed(0)
            return hf.AutoModelForCausalLM.from_config(hf.CONFIG_MAPPING[family](**sizes))

        def norms(model: Any, family: str = family) -> Any:
            if family == "gpt2":
                return [(block.ln_1, block.ln_2) for block in model.transformer.h]
            return [(block.input_layernorm, block.post_attention_layernorm) for block in model.model.layers]

        under = lambda build: apply(build(), "lns", initialization="upstream")  # noqa: E731
        found[family] = losses(build, lambda model, tokens: model(input_ids=tokens, labels=tokens).loss, norms, under)
    return found


def verdict(values: dict[str, list[float]]) -> str:
    pairs = zip(values["lns"], values["hooks"], values["stock"], strict=True)
    near, far = zip(*((abs(a - b), abs(a - c)) for a, b, c in pairs), strict=True)
    right = max(near) <= NEAR and max(far) > 100 * NEAR
    return f"{'right' if right else 'WRONG'} ({max(near):.0e} from hooks, {max(far):.2f} from stock)"


def run(program: str, path: Path) -> dict[str, str]:
    """The verdicts of one version, each for one model; ``path`` goes in front of the packages of this environment."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, "--program", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {
            "-": f"stopped: {done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else done.returncode}"
        }
    return {name: verdict(values) for name, values in json.loads(done.stdout.strip().splitlines()[-1]).items()}


def versions(kind: str, names: list[str]) -> Iterator[tuple[str, str, Path]]:
    """``(version, date, folder)`` of each commit or release; the folder is gone with the next one."""
    if kind == "olmo-core":
        source, *names = names
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            if kind == "olmo-core":
                git = ["git", "-C", source]
                date = subprocess.check_output([*git, "log", "-1", "--format=%cs", name], text=True).strip()
                archive = subprocess.Popen([*git, "archive", name, "src"], stdout=subprocess.PIPE)
                subprocess.run(["tar", "-x", "-C", folder], stdin=archive.stdout, check=True)
                yield name[:9], date, Path(folder, "src")
            else:
                pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", folder]
                subprocess.run([*pip, f"transformers=={name}.*", "numpy<2.4"], check=True, capture_output=True)
                (about,) = Path(folder).glob("transformers-*.dist-info")
                yield about.name.split("-")[1].removesuffix(".dist"), "", Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("olmo-core", "transformers"), nargs="?")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("rows.csv"))
    parser.add_argument("--markdown", action="store_true", help="print the rows of --out as a table")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        print(json.dumps({"olmo-core": olmo_core, "transformers": transformers}[options.program]()))
        return
    if not options.markdown:
        for version, date, folder in versions(options.kind, options.names):
            with options.out.open("a", newline="") as file:
                rows = [(options.kind, version, date, model, text) for model, text in run(options.kind, folder).items()]
                csv.writer(file).writerows(rows)
            print(*rows, sep="\n", flush=True)
        return
    for row in csv.reader(options.out.open(newline="")):
        print("| " + " | ".join(row[1:]) + " |")


if __name__ == "__main__":
    main()
