"""A spawned DataLoader worker that gets a config with an lns type; prints what each process saw."""

import pickle
import sys

from torch.utils.data import DataLoader, Dataset


class Configs(Dataset):
    def __init__(self, config):
        self.config = config

    def __len__(self):
        return 1

    def __getitem__(self, index):
        kind = self.config.layer_norm_type
        members = type(kind)
        return f"{kind!s} {kind is members['lns_rms']} {kind is members(str(kind))}"


def main():
    from olmo.config import LayerNormType, ModelConfig

    config = ModelConfig(layer_norm_type=LayerNormType.lns_rms)
    assert pickle.loads(pickle.dumps(LayerNormType.lns_rms)) is LayerNormType.lns_rms
    loader = DataLoader(Configs(config), batch_size=None, num_workers=1, multiprocessing_context=sys.argv[1])
    print("worker:", *loader)


if __name__ == "__main__":
    main()
