#!/usr/bin/env python3
"""Train tiny models with many versions of OLMo-core and transformers: under LNS, stock, and stock with hooks.

    python scripts/versions.py olmo-core path/to/OLMo-core COMMIT... --out rows.csv
    python scripts/versions.py transformers 4.48 4.49 5.0 ... --out rows.csv

A commit of OLMo-core is unpacked from the checkout; a release of transformers is installed by pip into a temporary
folder. A row is ``right`` if the losses of six steps under LNS equal the hooks' within 2e-5 and differ from stock's by
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
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator

STEPS, TOLERANCE = 6, 2e-5
FAMILIES = ("llama", "qwen3", "mixtral", "gpt2")


def losses(
    build: Callable[[], Any], build_lns: Callable[[], Any], loss: Callable[[Any, Any], Any], norms: Callable[[Any], Any]
) -> dict[str, list[float]]:
    """Return the losses of six AdamW steps on fixed tokens: stock, with hooks, and under LNS.

    :param norms: model -> the norms of each block, which the hooks scale.
    """
    import torch

    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))

    def train(model: Any) -> list[float]:
        optimizer, values = torch.optim.AdamW(model.parameters(), lr=3e-3), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            value = loss(model, tokens)
            value.backward()
            optimizer.step()
            values.append(value.item())
        return values

    def hooked() -> Any:
        model = build()
        for number, block_norms in enumerate(norms(model), start=1):
            for norm in block_norms:
                norm.register_forward_hook(lambda module, args, output, s=number**-0.5: output * s)
        return model

    return {"stock": train(build()), "hooks": train(hooked()), "lns": train(build_lns())}


def olmo_core() -> dict[str, Any]:
    import torch
    import torch.nn.functional as F
    from olmo_core.nn.transformer import TransformerConfig

    from olmo_lns.olmo_core import apply

    def config() -> Any:
        return TransformerConfig.llama_like(d_model=32, vocab_size=64, n_layers=4, n_heads=4)

    def build(model_config: Any) -> Any:
        model = model_config.build(init_device="cpu")
        model.init_weights(device=torch.device("cpu"))
        return model

    def loss(model: Any, tokens: Any) -> Any:
        return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())

    def norms(model: Any) -> Any:
        return [(block.attention_norm, block.feed_forward_norm) for block in model.blocks.values()]

    return {"llama_like": losses(lambda: build(config()), lambda: build(apply(config())), loss, norms)}


def transformers() -> dict[str, Any]:
    import torch
    import transformers as hf

    from olmo_lns.integrations.transformers import apply

    sizes: dict[str, Any] = dict(vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
    sizes |= dict(intermediate_size=48, num_key_value_heads=2, head_dim=8, num_local_experts=4)
    sizes |= dict(max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    sizes |= dict(n_embd=32, n_layer=4, n_head=4, n_positions=32)
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)

    def build(family: str) -> Any:
        torch.manual_seed(0)
        return hf.AutoModelForCausalLM.from_config(hf.CONFIG_MAPPING[family](**sizes))

    def build_lns(family: str) -> Any:
        return apply(build(family), "lns", initialization="upstream")

    def loss(model: Any, tokens: Any) -> Any:
        return model(input_ids=tokens, labels=tokens).loss

    def norms(model: Any) -> Any:
        if model.config.model_type == "gpt2":
            return [(block.ln_1, block.ln_2) for block in model.transformer.h]
        return [(block.input_layernorm, block.post_attention_layernorm) for block in model.model.layers]

    return {
        family: losses(partial(build, family), partial(build_lns, family), loss, norms)
        for family in FAMILIES
        if family in hf.CONFIG_MAPPING
    }


def verdict(values: dict[str, list[float]]) -> str:
    to_hooks = max(abs(a - b) for a, b in zip(values["lns"], values["hooks"], strict=True))
    to_stock = max(abs(a - b) for a, b in zip(values["lns"], values["stock"], strict=True))
    is_right = to_hooks <= TOLERANCE and to_stock > 100 * TOLERANCE
    return f"{'right' if is_right else 'WRONG'} ({to_hooks:.0e} from hooks, {to_stock:.2f} from stock)"


def run(program: str, path: Path) -> dict[str, str]:
    """Return the verdict for each model of one version, which is imported from ``path``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, "--program", program]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        return {"-": f"stopped: {(result.stderr.strip().splitlines() or [str(result.returncode)])[-1][:200]}"}
    return {name: verdict(values) for name, values in json.loads(result.stdout.strip().splitlines()[-1]).items()}


def versions(kind: str, names: list[str]) -> Iterator[tuple[str, str, Path]]:
    """Yield version, date and folder of each commit or release; the folder exists until the next one."""
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
                (metadata,) = Path(folder).glob("transformers-*.dist-info")
                yield metadata.name.split("-")[1].removesuffix(".dist"), "", Path(folder)


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
