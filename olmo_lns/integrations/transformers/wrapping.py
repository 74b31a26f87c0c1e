"""The wrapped functions of transformers and PEFT: look-ups by model type, and the Trainer's resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

from olmo_lns.hook import wrap
from olmo_lns.integrations.transformers.model_types import PREFIX, stock_name, stock_reference, stock_type
from olmo_lns.records import require_same
from olmo_lns.schemes import PRE_LN, Scheme

_AUTO = "transformers.models.auto"


def add_configs(module: Any) -> None:
    """Add ``lns_<type>`` for every ``<type>`` to transformers' table of configs."""

    def get(original: Callable[..., Any]) -> Callable[..., Any]:
        def __getitem__(self: Any, key: Any) -> Any:
            if (stock := stock_type(key)) is None or stock not in self:
                return original(self, key)
            from olmo_lns.integrations.transformers.classes import scheme_class  # imports torch, so only on use

            return scheme_class(original(self, stock))

        return __getitem__

    def contains(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, item: original(self, stock_type(item) or item)

    wrap(f"{_AUTO}.configuration_auto:_LazyConfigMapping.__getitem__", get)
    wrap(f"{_AUTO}.configuration_auto:_LazyConfigMapping.__contains__", contains)
    wrap(f"{_AUTO}.configuration_auto:get_class_from_dynamic_module", _find_remote, needed=False)


def add_models(module: Any) -> None:
    """Let the auto classes find the model class or tokenizer of a scheme's config by the stock config."""

    def get(original: Callable[..., Any]) -> Callable[..., Any]:
        def __getitem__(self: Any, key: Any) -> Any:
            if (stock := getattr(key, "lns_made_of", None)) is None or key in self._extra_content:
                return original(self, key)
            classes = original(self, stock)
            return tuple(map(_scheme_class, classes)) if isinstance(classes, (tuple, list)) else _scheme_class(classes)

        return __getitem__

    def contains(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, item: original(self, item) or original(self, getattr(item, "lns_made_of", None) or item)

    def keys(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(self: Any) -> Any:
            classes = original(self)  # transformers before 5.0 looks a config up in this list
            subclasses: list[Any] = [each for stock in classes for each in stock.__subclasses__()]
            return [*classes, *(each for each in subclasses if getattr(each, "lns_made_of", None) in classes)]

        return made

    def compare(original: Callable[..., Any]) -> Callable[..., Any]:
        def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
            folder = str(pretrained_model_name_or_path)
            # Only a stock config is compared here. If the config names a scheme, the class of the scheme compares it.
            model_type = getattr(kwargs.get("config"), "model_type", None)
            if model_type is not None and stock_type(model_type) is None and Path(folder).is_dir():
                from olmo_lns.integrations.transformers.classes import describe_setting, saved_scheme

                saved = saved_scheme(folder, local_files_only=True)
                require_same(saved, PRE_LN, source=folder, setting=describe_setting)
            return original(cls, pretrained_model_name_or_path, *args, **kwargs)

        return from_pretrained

    wrap(f"{_AUTO}.auto_factory:_BaseAutoModelClass.from_pretrained", compare, needed=False)
    wrap(f"{_AUTO}.auto_factory:_LazyAutoMapping.__getitem__", get)
    wrap(f"{_AUTO}.auto_factory:_LazyAutoMapping.__contains__", contains)
    wrap(f"{_AUTO}.auto_factory:_LazyAutoMapping.keys", keys)
    wrap(f"{_AUTO}.auto_factory:get_class_from_dynamic_module", _find_remote, needed=False)


def _find_remote(original: Callable[..., Any]) -> Callable[..., Any]:
    """Find the scheme class of a class of remote code, which ``auto_map`` names ``modeling_my.LNSMyModel``."""

    def get_class_from_dynamic_module(class_reference: str, *args: Any, **kwargs: Any) -> Any:
        stock = stock_reference(class_reference)
        try:
            return original(class_reference, *args, **kwargs)
        except AttributeError:  # the module has no class of this name
            if stock == class_reference:
                raise
        from olmo_lns.integrations.transformers.classes import scheme_class

        return scheme_class(original(stock, *args, **kwargs))

    return get_class_from_dynamic_module


def refuse_stock_configs(module: Any) -> None:
    """Make a stock config class refuse the ``config.json`` of a scheme.

    ``LlamaForCausalLM.from_pretrained`` reads the file by ``LlamaConfig``, although it names the type ``lns_llama``.
    Without this check the model would be Pre-LN.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def from_dict(cls: Any, config_dict: Any, *args: Any, **kwargs: Any) -> Any:
            model_type = config_dict.get("model_type") if isinstance(config_dict, dict) else None
            if (stock := stock_type(model_type)) is not None and stock == cls.model_type:
                from olmo_lns.integrations.transformers.classes import describe_setting, scheme_in

                source = config_dict.get("_name_or_path") or "config.json"
                require_same(scheme_in(config_dict), PRE_LN, source=source, setting=describe_setting)
            return original(cls, config_dict, *args, **kwargs)

        return from_dict

    wrap("transformers.configuration_utils:PretrainedConfig.from_dict", make, needed=False)


def refuse_stock_models(module: Any) -> None:
    """Refuse a stock model that was built from the config of a scheme.

    An example is ``LlamaForCausalLM(AutoConfig.from_pretrained(folder))`` for a folder of the type ``lns_llama``.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def post_init(self: Any) -> None:  # every constructor ends with it
            if hasattr(self.config, "lns_made_of"):
                from olmo_lns.integrations.transformers.classes import require_scheme_class

                require_scheme_class(self)
            original(self)

        return post_init

    wrap("transformers.modeling_utils:PreTrainedModel.post_init", make, needed=False)


def _scheme_class(stock_class: Any) -> Any:
    """Return the scheme class of a stock model class; a tokenizer or processor unchanged."""
    from olmo_lns.integrations.transformers.classes import scheme_class

    # By name: transformers.modeling_utils may have been reloaded since the class was made.
    base_names = {f"{kind.__module__}.{kind.__name__}" for kind in getattr(stock_class, "__mro__", ())}
    return scheme_class(stock_class) if "transformers.modeling_utils.PreTrainedModel" in base_names else stock_class


def convert_weights(module: Any) -> None:
    """Make transformers 5 convert the weights of ``lns_<type>`` (fused experts) like those of ``<type>``."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_checkpoint_conversion_mapping(model_type: Any, *args: Any, **kwargs: Any) -> Any:
            stock = stock_type(model_type) or (stock_name(model_type) if isinstance(model_type, str) else model_type)
            return original(stock, *args, **kwargs)

        return get_checkpoint_conversion_mapping

    wrap("transformers.conversion_mapping:get_checkpoint_conversion_mapping", make, needed=False)


def add_adapter_targets(module: Any) -> None:
    """Add PEFT's default target modules of each family for ``lns_<type>``."""
    for name, table in vars(module).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict):
            table.update({PREFIX + model_type: targets for model_type, targets in list(table.items())})


def compare_on_resume(module: Any) -> None:
    """Compare the scheme of a checkpoint with the model when a Trainer resumes.

    The Trainer writes no config beside sharded weights (FSDP), so a callback saves the model's config there.
    """

    class SaveConfig(module.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            configs = [folder / name for name in ("config.json", "adapter_config.json")]
            lacks_config = folder.is_dir() and not any(path.exists() for path in configs)
            if state.is_world_process_zero and lacks_config:
                model.config.save_pretrained(folder)

    def make(train: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            from olmo_lns.integrations.transformers.classes import describe_setting, saved_scheme
            from olmo_lns.sites import read_back

            if getattr(self.model, "config", None) is None:  # not a model of transformers
                return train(self, resume_from_checkpoint, *args, **kwargs)
            running: Scheme = read_back(self.model)
            folder = resume_from_checkpoint
            if folder is True:
                folder = module.get_last_checkpoint(self.args.output_dir)
            is_path = bool(folder) and isinstance(folder, (str, Path))
            if is_path and not Path(folder, "adapter_config.json").is_file():
                saved = saved_scheme(str(folder), local_files_only=True)
                require_same(saved, running, source=folder, setting=describe_setting)
            if not running.is_pre_ln:
                self.pop_callback(SaveConfig)
                self.add_callback(SaveConfig)
            return train(self, resume_from_checkpoint, *args, **kwargs)

        return wrapped

    wrap("transformers.trainer:Trainer.train", make)
