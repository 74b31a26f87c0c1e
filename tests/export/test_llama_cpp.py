"""llama.cpp runs an export as transformers does. Needs `pip install xllamacpp gguf`; about 3 s."""

import pytest
import torch
from support.exports import export, load_hf, logits, save_olmo
from support.olmo_models import tokens

gguf = pytest.importorskip("gguf", reason="pip install gguf")
llama_cpp = pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
pytest.importorskip("olmo.model", reason="ai2-olmo is not installed")


def to_gguf(model, path):
    """The model as llama.cpp's converter writes it: names by gguf's own map, rows of q and k in pairs."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{number}>" for number in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if (count := heads.get(name.split(".")[-2])) is not None:
            tensor = tensor.reshape(count, 2, len(tensor) // count // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_llama_cpp_gives_the_probabilities_of_the_checkpoint(tmp_path):
    model = save_olmo(tmp_path / "run", layer_norm_type="lns_rms", n_kv_heads=2, embedding_size=64)
    assert export(tmp_path / "run", tmp_path / "out", "--format", "hf", "--tokenizer", "none") == 0
    to_gguf(load_hf(tmp_path / "out"), tmp_path / "model.gguf")
    parameters = llama_cpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.n_gpu_layers = str(tmp_path / "model.gguf"), 16, 0
    server, ids = llama_cpp.Server(parameters), tokens(batch=1, length=10)
    asked = {"prompt": ids[0].tolist(), "n_predict": 1, "n_probs": 64, "temperature": -1}
    found = server.handle_completions(asked)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    expected = logits(model, ids)[0, -1].log_softmax(-1)
    assert len(found) == 64
    for each in found:
        assert each["logprob"] == pytest.approx(expected[each["id"]].item(), abs=2e-3)
    assert torch.tensor([each["id"] for each in found[:3]]).tolist() == expected.topk(3).indices.tolist()
