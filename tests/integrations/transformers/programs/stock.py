"""Runs what this package wraps in transformers, on inputs of every kind. Usage: ``stock.py FOLDER``."""

import functools
import json
import logging
import shutil
import sys
from pathlib import Path

import torch
import transformers
from accelerate.utils import MegatronLMPlugin
from support import observing
from transformers import trainer as trainer_module
from transformers.models.auto import auto_factory, configuration_auto, modeling_auto, tokenization_auto

try:
    from transformers import conversion_mapping
except ImportError:  # transformers 4
    conversion_mapping = None

folder = Path(sys.argv[1])
partial = functools.partial
logging.getLogger("transformers").propagate = True  # to the observer
transformers.dynamic_module_utils.HF_MODULES_CACHE = str(folder / "modules")
sys.path.insert(0, str(folder / "modules"))

LLAMA = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
LLAMA |= dict(max_position_embeddings=32, num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=2)
GPT2 = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=1)
REMOTE = {
    "configuration_mini.py": "from transformers import LlamaConfig\n"
    "class MiniConfig(LlamaConfig):\n    model_type = 'mini'\n"
    "class LNSConfig(MiniConfig):\n    model_type = 'lns'\n",
    "modeling_mini.py": "from transformers import LlamaForCausalLM\nfrom .configuration_mini import LNSConfig, MiniConfig\n"
    "class MiniForCausalLM(LlamaForCausalLM):\n    config_class = MiniConfig\n"
    "class LNSForCausalLM(LlamaForCausalLM):\n    config_class = LNSConfig\n",
}
CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
TOKENIZERS = tokenization_auto.TOKENIZER_MAPPING
CONFIGS = configuration_auto.CONFIG_MAPPING


class OwnConfig(transformers.LlamaConfig):
    """The config of a model of one's own."""

    model_type = "own"


class OwnModel(transformers.LlamaForCausalLM):
    config_class = OwnConfig


# --- folders --------------------------------------------------------------------------------------------------------------


def edited(source, name, **changes):
    """A copy of a saved folder with another config. :param changes: None removes a value."""
    place = Path(shutil.copytree(folder / source, folder / name))
    values = json.loads((place / "config.json").read_text()) | changes
    (place / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return place


def save_all():
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    llama.save_pretrained(folder / "llama")
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).save_pretrained(folder / "gpt2")
    llama.save_pretrained(folder / "sharded", max_shard_size="20KB")
    legacy = edited("llama", "legacy")
    (legacy / "model.safetensors").unlink()
    torch.save(llama.state_dict(), legacy / "pytorch_model.bin")
    (edited("llama", "no config") / "config.json").unlink()
    (edited("llama", "damaged config") / "config.json").write_text('{"model_type": "ll')
    (edited("llama", "a list as config") / "config.json").write_text("[1, 2]")
    (edited("llama", "no weights") / "model.safetensors").unlink()
    damaged = edited("llama", "damaged weights") / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:200])
    edited("llama", "no type", model_type=None, architectures=None)
    edited("llama", "an unknown type", model_type="no_such_type")
    edited("llama", "another type", model_type="gpt2")
    edited("llama", "a type of a number", model_type=3)
    edited("llama", "other shapes", hidden_size=64)
    for name, kind, class_name in (("remote", "mini", "Mini"), ("remote of a class named LNS", "lns", "LNS")):
        classes = {"AutoConfig": f"configuration_mini.{class_name}Config"}
        classes["AutoModelForCausalLM"] = f"modeling_mini.{class_name}ForCausalLM"
        place = edited("llama", name, model_type=kind, architectures=[f"{class_name}ForCausalLM"], auto_map=classes)
        for file, code in REMOTE.items():
            (place / file).write_text(code)
    edited("remote", "remote without its class", auto_map={"AutoModelForCausalLM": "modeling_mini.NoSuchClass"})
    (folder / "empty").mkdir()
    return [path.name for path in sorted(folder.iterdir()) if path.is_dir()] + ["missing"]


def loaded(name, auto="AutoModelForCausalLM", **options):
    torch.manual_seed(1)
    model = getattr(transformers, auto).from_pretrained(folder / name, **options)
    return model, model.config.to_dict()


def dynamic(reference, name="remote", **options):
    found = auto_factory.get_class_from_dynamic_module(reference, folder / name, **options)
    return found.__name__, found.__module__.rpartition(".")[2]


# --- training -------------------------------------------------------------------------------------------------------------


def rows():
    ids = torch.randint(2, 64, (6, 8), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in ids]


class Regression(torch.nn.Module):
    """A model that is not transformers'."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)

    def forward(self, input_ids, labels=None):
        return {"loss": self.linear(input_ids.float()).square().mean()}


def trained(*args, make=None, out="run", **options):
    torch.manual_seed(2)
    model = make() if make else transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    settings = dict(max_steps=2, per_device_train_batch_size=2, save_steps=1, logging_steps=1, report_to=[])
    settings |= dict(use_cpu=True, disable_tqdm=True, optim="adamw_torch", output_dir=str(folder / out))
    trainer = transformers.Trainer(model=model, args=transformers.TrainingArguments(**settings), train_dataset=rows())
    result = trainer.train(*args, **options)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return model, result.global_step, losses, [type(each).__name__ for each in trainer.callback_handler.callbacks]


def runs():
    """Checkpoints of a Trainer, copied and changed. :returns: their names, in the folder ``run``."""
    trained()
    good = folder / "run" / "checkpoint-1"

    def copied(name):
        return Path(shutil.copytree(good, folder / name))

    (copied("run: no config") / "config.json").unlink()
    (copied("run: damaged config") / "config.json").write_text("{")
    (copied("run: a list as config") / "config.json").write_text("[1]")
    (copied("run: no weights") / "model.safetensors").unlink()
    (copied("run: no state") / "trainer_state.json").unlink()
    damaged = copied("run: damaged weights") / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:200])
    (copied("run: no optimizer") / "optimizer.pt").unlink()
    (folder / "run: empty").mkdir()
    return [path.name for path in sorted(folder.glob("run: *"))]


def planned(*args):
    plugin = MegatronLMPlugin()
    plugin.set_network_size_args(*args)
    return plugin.megatron_lm_default_args


FUNCTIONS = {
    "config of": configuration_auto._LazyConfigMapping.__getitem__,
    "has a config": configuration_auto._LazyConfigMapping.__contains__,
    "class of": auto_factory._LazyAutoMapping.__getitem__,
    "has a class": auto_factory._LazyAutoMapping.__contains__,
    "keys": auto_factory._LazyAutoMapping.keys,
    "from_pretrained": auto_factory._BaseAutoModelClass.from_pretrained,
    "remote class": auto_factory.get_class_from_dynamic_module,
    "from_dict": transformers.PretrainedConfig.from_dict,
    "train": trainer_module.Trainer.train,
    "post_init": transformers.PreTrainedModel.post_init,
    "Megatron plugin": MegatronLMPlugin.set_network_size_args,
}
cases = {}
transformers.AutoConfig.register("own", OwnConfig)
transformers.AutoModelForCausalLM.register(OwnConfig, OwnModel)
for key in ("llama", "gpt2", "own", "no_such_type", "", None, 3, ["llama"]):
    cases[f"config of: {key!r}"] = lambda key=key: CONFIGS[key]
    cases[f"has a config: {key!r}"] = lambda key=key: key in CONFIGS
kinds = {kind.__name__: kind for kind in (transformers.LlamaConfig, transformers.BertConfig, OwnConfig, dict)}
kinds |= {"ResNetConfig": transformers.ResNetConfig, "None": None, "a text": "LlamaConfig"}
for name, key in kinds.items():
    for table, mapping in (("models", CAUSAL), ("tokenizers", TOKENIZERS)):
        cases[f"class of: {name} in {table}"] = lambda key=key, mapping=mapping: mapping[key]
        cases[f"has a class: {name} in {table}"] = lambda key=key, mapping=mapping: key in mapping
cases["keys: models"] = lambda: sorted(each.__name__ for each in CAUSAL.keys())  # noqa: SIM118  the wrapped method
cases["keys: tokenizers"] = lambda: sorted(each.__name__ for each in TOKENIZERS.keys())  # noqa: SIM118

for name in save_all():
    options = {"trust_remote_code": True} if name.startswith("remote") else {}
    cases[f"from_pretrained: {name}"] = partial(loaded, name, **options)
    config = transformers.LlamaConfig(**LLAMA)
    cases[f"from_pretrained: {name}, another config"] = partial(loaded, name, config=config, **options)
cases |= {
    "from_pretrained: a base model": lambda: loaded("llama", "AutoModel"),
    "from_pretrained: a classifier": lambda: loaded("llama", "AutoModelForSequenceClassification", num_labels=3),
    "from_pretrained: a dtype": lambda: loaded("llama", torch_dtype=torch.bfloat16),
    "from_pretrained: a type without this head": lambda: loaded("llama", "AutoModelForMaskedLM"),
    "from_pretrained: a name": lambda: transformers.AutoModel.from_pretrained("no-such-owner/no-such-model"),
    "from_pretrained: by keywords": lambda: transformers.AutoModel.from_pretrained(
        pretrained_model_name_or_path=folder / "llama", config=transformers.LlamaConfig(**LLAMA)
    ),
    "from_pretrained: None": lambda: transformers.AutoModel.from_pretrained(None),
    "from_pretrained: no name": lambda: transformers.AutoModel.from_pretrained(),
    "from_pretrained: remote code that is not trusted": lambda: loaded("remote", trust_remote_code=False),
    "from_pretrained: loading information": lambda: transformers.AutoModel.from_pretrained(
        folder / "llama", output_loading_info=True
    )[1],
    "remote class: a model": lambda: dynamic("modeling_mini.MiniForCausalLM"),
    "remote class: named LNS": lambda: dynamic("modeling_mini.LNSForCausalLM"),
    "remote class: by keywords": lambda: auto_factory.get_class_from_dynamic_module(
        class_reference="modeling_mini.MiniForCausalLM", pretrained_model_name_or_path=folder / "remote"
    ).__name__,
    "remote class: missing": lambda: dynamic("modeling_mini.NoSuchClass"),
    "remote class: a missing module": lambda: dynamic("no_such_module.NoSuchClass"),
    "remote class: another folder": lambda: dynamic(f"{folder / 'remote'}--modeling_mini.MiniForCausalLM", "llama"),
    "remote class: no reference": lambda: dynamic(None),
    "from_dict: good": lambda: transformers.LlamaConfig.from_dict(LLAMA),
    "from_dict: unused values": lambda: transformers.LlamaConfig.from_dict(LLAMA, return_unused_kwargs=True, no_such=1),
    "from_dict: of another type": lambda: transformers.LlamaConfig.from_dict(LLAMA | {"model_type": "gpt2"}),
    "from_dict: of no type": lambda: transformers.PretrainedConfig.from_dict({"hidden_size": 3}),
    "from_dict: None": lambda: transformers.LlamaConfig.from_dict(None),
    "from_dict: a list": lambda: transformers.LlamaConfig.from_dict([1]),
    "from_dict: no values": lambda: transformers.LlamaConfig.from_dict(),
}  # fmt: skip
names = runs()
cases |= {f"train: resumes from {name}": partial(trained, str(folder / name), out="out") for name in names}
cases |= {
    "train: from the start": partial(trained, out="fresh"),
    "train: resumes from its last checkpoint": lambda: trained(True),
    "train: resumes from a path": lambda: trained(resume_from_checkpoint=folder / "run" / "checkpoint-1"),
    "train: resumes where there is no checkpoint": lambda: trained(True, out="llama"),
    "train: resumes where there is no folder": lambda: trained(True, out="none"),
    "train: resumes from a missing folder": lambda: trained(str(folder / "missing"), out="out"),
    "train: resumes from no path": lambda: trained(5, out="out"),
    "train: resumes from an empty text": lambda: trained("", out="out"),
    "train: False": lambda: trained(False, out="out"),
    "train: a model that is not transformers'": lambda: trained(make=Regression, out="regression"),
    "train: such a model resumes": lambda: trained(True, make=Regression, out="regression"),
    "train: another model resumes": lambda: trained(
        True, make=lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    ),
    "train: a wrong option": lambda: trained(no_such=1, out="out"),
}  # fmt: skip
if conversion_mapping is not None:
    FUNCTIONS["conversions"] = conversion_mapping.get_checkpoint_conversion_mapping
    for key in ("llama", "mixtral", "qwen2_moe", "legacy", "MixtralForCausalLM", "no_such_type", "", None):
        cases[f"conversions: {key!r}"] = lambda key=key: repr(conversion_mapping.get_checkpoint_conversion_mapping(key))
    cases["conversions: by a keyword"] = lambda: repr(
        conversion_mapping.get_checkpoint_conversion_mapping(model_type="mixtral")
    )
cases |= {
    "post_init: llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "post_init: a model of one's own": lambda: OwnModel(OwnConfig(**LLAMA)),
    "post_init: BERT": lambda: transformers.BertModel(transformers.BertConfig(hidden_size=24, num_hidden_layers=1)),
    "post_init: again": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).post_init(),
    "post_init: a wrong argument": lambda: OwnModel(OwnConfig(**LLAMA)).post_init(1),
    "post_init: no config": lambda: transformers.LlamaForCausalLM(None),
    "Megatron plugin: llama": lambda: planned(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))),
    "Megatron plugin: gpt2": lambda: planned(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))),
    "Megatron plugin: a model that is not transformers'": lambda: planned(Regression()),
    "Megatron plugin: no model": lambda: planned(),
}
observing.main(cases, FUNCTIONS, folder, "transformers", "accelerate")
