"""`init_inference` and the ragged engine, as DeepSpeed's users call them."""

from __future__ import annotations

import json

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from ds_config.errors import ConfigError, PlanError, UnsupportedError
from ds_inference import RaggedConfig, SchedulingError, SchedulingResult, build_hf_engine, init_inference
from ds_inference.config import StateManagerConfig

transformers = pytest.importorskip("transformers")


def small(**more):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=61, n_positions=128, **more)
    config.eos_token_id = config.bos_token_id = None
    made = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for param in made.parameters():
            param.normal_(0, 0.3)
    return made


IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.mark.parametrize("inject", [False, True])
def test_answers_are_the_modules(inject):
    engine = init_inference(small(), dtype=torch.float32, replace_with_kernel_inject=inject)
    wanted = small().generate(IDS, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert torch.equal(engine.generate(IDS, max_new_tokens=9, do_sample=False, pad_token_id=0), wanted)
    assert torch.equal(engine(IDS).logits, small()(IDS).logits)


def test_prompts_of_different_lengths_padded_on_the_left():
    engine = init_inference(small(), {"dtype": "fp32", "kernel_inject": True})
    ids, mask = torch.tensor([[0, 0, 7, 8], [9, 10, 11, 12]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    found = engine.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5)
    for row, prompt in zip(found, ([7, 8], [9, 10, 11, 12]), strict=True):
        alone = small().generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert row[4:].tolist() == alone[0, len(prompt) :].tolist()


def test_an_end_token_pads_behind_it():
    free = small().generate(IDS, max_new_tokens=9, do_sample=False, pad_token_id=0)
    end = int(free[0, 6])
    wanted = small().generate(IDS, max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=end)
    engine = init_inference(small(), dtype="fp32", replace_with_kernel_inject=True)
    assert torch.equal(engine.generate(IDS, max_new_tokens=9, eos_token_id=end, pad_token_id=0), wanted)


def test_the_configuration_is_the_modules():
    """Pipelines of transformers and the scripts around them read the number of layers and of tokens there."""
    module = small()
    assert init_inference(module, dtype="fp32").config is module.config
    assert init_inference(torch.nn.Linear(2, 2), dtype="fp32").config is None


def test_an_injection_policy_has_classes_as_keys():
    policy = {torch.nn.Linear: ("attn.c_proj",), torch.nn.Conv2d: "mlp.c_proj"}
    for keys in ({"injection_policy": policy}, {"config": {"injection_dict": policy}}):
        config = init_inference(small(), dtype="fp32", **keys).inference_config
        assert list(config.injection_policy.values()) == [("attn.c_proj",), "mlp.c_proj"]


def test_half_precision_is_the_default():
    assert next(init_inference(small()).module.parameters()).dtype == torch.float16


def test_attributes_are_the_modules_and_times_are_kept():
    engine = init_inference(small(), dtype=torch.float32)
    assert engine.lm_head is engine.module.lm_head
    with pytest.raises(PlanError, match="profile_model_time"):
        engine.model_times()
    engine.profile_model_time()
    engine(IDS)
    assert len(engine.model_times()) == 1
    assert engine.model_times() == []


def test_weights_of_a_folder_go_into_a_module_on_meta(tmp_path):
    small().save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = transformers.GPT2LMHeadModel(small().config)
    engine = init_inference(empty, dtype=torch.float32, checkpoint=str(tmp_path))
    assert torch.equal(engine(IDS).logits, small()(IDS).logits)
    (tmp_path / "d.json").write_text(json.dumps({"type": "x", "checkpoints": ["model.safetensors"]}))
    with torch.device("meta"):
        empty = transformers.GPT2LMHeadModel(small().config)
    engine = init_inference(empty, dtype=torch.float32, checkpoint=str(tmp_path / "d.json"))
    assert torch.equal(engine(IDS).logits, small()(IDS).logits)


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        ({"dtpye": "fp16"}, ConfigError, "dtype"),
        ({"dtype": "int7"}, ConfigError, "int7"),
        ({"dtype": torch.int32}, ConfigError, "int32"),
        ({"tensor_parallel": {"tp_size": 2}}, PlanError, "2 ranks, and 1"),
        ({"mp_size": 2}, PlanError, "2 ranks, and 1"),
        ({"enable_cuda_graph": True}, UnsupportedError, "no CUDA device"),
        ({"save_mp_checkpoint_path": "x"}, UnsupportedError, "save_mp_checkpoint_path"),
        ({"config": {"dtype": "fp16"}, "dtype": "fp32"}, PlanError, "fp16"),
    ],
)
def test_what_cannot_be_is_said(keys, error, said):
    if torch.cuda.is_available() and "enable_cuda_graph" in keys:
        pytest.skip("this host has CUDA")
    given = keys.pop("config", None) if "dtype" in keys else None
    with pytest.raises(error, match=said):
        init_inference(small(), given, **keys)


def test_eight_bits_are_asked_for_by_the_dtype():
    wanted = init_inference(
        small(), dtype=torch.float32, replace_with_kernel_inject=True, quant={"weight": {"num_bits": 8}}
    ).generate(IDS, max_new_tokens=5)
    for dtype in (torch.int8, "int8"):
        engine = init_inference(small(), dtype=dtype, replace_with_kernel_inject=True)
        assert torch.equal(engine.generate(IDS, max_new_tokens=5), wanted)
    with pytest.raises(UnsupportedError, match=r"dtype torch\.int8"):
        init_inference(small(), dtype=torch.int8)


def test_long_prompts_are_refused():
    engine = init_inference(small(), dtype=torch.float32, max_out_tokens=3)
    with pytest.raises(PlanError, match="max_out_tokens is 3"):
        engine.generate(IDS)


def test_without_a_length_so_many_tokens_as_transformers_gives():
    model = small()
    engine = init_inference(small(), dtype=torch.float32, replace_with_kernel_inject=True)
    for ids in (IDS, torch.arange(25)[None]):
        assert torch.equal(engine.generate(ids), model.generate(ids))
    model.generation_config.max_length = engine.module.generation_config.max_length = 7
    assert torch.equal(engine.generate(IDS), model.generate(IDS))


@pytest.mark.parametrize(
    "more",
    [
        {"num_beams": 3},
        {"min_new_tokens": 9},
        {"min_length": 9},
        {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [[3], [5]]},
        {"return_dict_in_generate": True, "output_scores": True},
        {"max_new_tokens": 0},
        {"max_new_tokens": 9, "num_return_sequences": 2},
        {"forced_eos_token_id": 0},
    ],
    ids=lambda m: next(iter(m)),
)
def test_what_the_paged_engine_does_not_do_the_module_does(more):
    model = small()
    engine = init_inference(small(), dtype=torch.float32, replace_with_kernel_inject=True)

    def answer(of):
        try:
            return of.generate(IDS, **{"max_new_tokens": 9, **more})
        except ValueError as error:
            return str(error)

    with pytest.warns(UserWarning, match="own generate runs"):
        found = answer(engine)
    wanted = answer(model)
    if isinstance(wanted, str):
        assert found == wanted
    else:
        assert torch.equal(getattr(found, "sequences", found), getattr(wanted, "sequences", wanted))
    quantised = init_inference(
        small(), dtype=torch.float32, replace_with_kernel_inject=True, quant={"weight": {"num_bits": 8}}
    )
    with pytest.raises(UnsupportedError, match="whose weights are quantised"):
        answer(quantised)


def test_options_of_configurations_count(recwarn):
    model = small()
    (first,) = model.generate(IDS[:1], max_new_tokens=3)[:, -1].tolist()
    config = transformers.GenerationConfig(max_new_tokens=6, eos_token_id=first, pad_token_id=0, repetition_penalty=1.5)
    engine = init_inference(small(), dtype=torch.float32, replace_with_kernel_inject=True)
    assert torch.equal(engine.generate(IDS, generation_config=config), model.generate(IDS, generation_config=config))
    assert not [w for w in recwarn if "own generate" in str(w.message)]
    model.generation_config.no_repeat_ngram_size = engine.module.generation_config.no_repeat_ngram_size = 1
    assert torch.equal(engine.generate(IDS, max_new_tokens=9), model.generate(IDS, max_new_tokens=9))


def test_padding_is_known_by_its_token():
    model = small()
    engine = init_inference(small(), dtype=torch.float32, replace_with_kernel_inject=True)
    padded = torch.tensor([[0, 0, 5, 9], [7, 0, 3, 2]])
    for more in ({"pad_token_id": 0}, {"pad_token_id": 0, "eos_token_id": [0, 1]}, {}):
        more = {"max_new_tokens": 5, "do_sample": False, **more}
        assert torch.equal(engine.generate(padded, **more), model.generate(padded, **more))


def test_an_unknown_family_runs_its_own_forward_and_a_warning_says_so():
    plain, x = torch.nn.Linear(4, 4), torch.ones(4)
    want = plain(x)
    assert torch.equal(init_inference(plain, dtype=torch.float32)(x), want)
    with pytest.warns(UserWarning, match="the layers of a Linear are not replaced: model_type None has no declaration"):
        engine = init_inference(plain, replace_with_kernel_inject=True, dtype=torch.float32)
    assert torch.equal(engine(x), want)
    with pytest.raises(UnsupportedError, match=r"quant\.weight\.num_bits = 8 for a Linear"):
        init_inference(plain, replace_with_kernel_inject=True, quant={"weight": {"num_bits": 8}})


# ---- the ragged engine


def ragged(**limits):
    given = {"memory_config": {"mode": "allocate", "size": 4}, **limits}
    return build_hf_engine(small(), RaggedConfig(state_manager=given))


def test_put_gives_the_logits_of_last_tokens():
    engine, model = ragged(), small()
    first = engine.put([3, 4], [torch.tensor([5, 6, 7]), torch.tensor([9])])
    second = engine.put([4, 3], [torch.tensor([10, 11]), torch.tensor([8])])
    with torch.no_grad():
        wanted = model(torch.tensor([[5, 6, 7, 8]])).logits[0]
        other = model(torch.tensor([[9, 10, 11]])).logits[0]
    for found, expected in ((first[0], wanted[2]), (first[1], other[0]), (second[1], wanted[3]), (second[0], other[2])):
        assert torch.allclose(found, expected, atol=1e-4)


def test_sequences_of_a_forward_fit_into_it():
    for limits in ({"max_ragged_batch_size": 512}, {"max_tracked_sequences": 512}):
        with pytest.raises(ValidationError, match="max_ragged_sequence_count is 1024"):
            StateManagerConfig(max_ragged_sequence_count=1024, **limits)


def test_experts_may_be_said_by_a_word():
    for value in (True, False, {"enabled": True, "num_experts": [4]}):
        moe = init_inference(small(), dtype="fp32", moe=value)._config.moe
        assert moe.enabled is (value is not False)


def test_limits_are_said_before_and_nothing_is_changed():
    engine = ragged(max_ragged_batch_size=200, max_ragged_sequence_count=2, max_tracked_sequences=3, max_context=120)
    why = engine.can_schedule
    assert why([0], [100]) is SchedulingResult.Success
    assert why([0], [121]) is SchedulingResult.SequenceTokenLimitExceeded
    assert why([0, 1], [101, 100]) is SchedulingResult.BatchTokenLimitExceeded
    assert why([0, 1, 2], [1, 1, 1]) is SchedulingResult.BatchSequenceLimitExceeded
    assert why([0, 1, 2, 3], [1] * 4) is SchedulingResult.EngineSequenceLimitExceeded
    with pytest.raises(SchedulingError) as caught:
        engine.put([0], [torch.zeros(121, dtype=torch.int64)])
    assert caught.value.status is SchedulingResult.SequenceTokenLimitExceeded
    assert int(engine.free_blocks) == 4
    assert engine.query(7, 500, 9) == (120, 1)
    engine.put([0], [torch.tensor([1, 2, 3])])
    assert engine.get_remaining_block_capacity(0) == 125
    assert int(engine.free_blocks) == 3
    engine.flush(0)
    engine.flush(0)
    assert int(engine.free_blocks) == 4


def test_a_full_cache_is_said():
    engine = build_hf_engine(small(), RaggedConfig(state_manager={"memory_config": {"mode": "allocate", "size": 1}}))
    engine.put([0], [torch.tensor([1])])
    assert engine.can_schedule([1], [1]) is SchedulingResult.KVCacheLimitExceeded


def test_what_a_put_cannot_compute_changes_nothing(tmp_path):
    engine = ragged()
    engine.put([1], [torch.tensor([5, 6])])
    before = engine.query(1, 99, 99), engine.query(2, 99, 99), int(engine.free_blocks)
    for wrong in ([61], [-1], [1.5]):
        with pytest.raises(PlanError, match=f"{wrong[0]}"):
            engine.put([1, 2], [torch.tensor([7]), torch.tensor(wrong)])
    forward, engine.model.forward = engine.model.forward, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.put([1, 2], [torch.arange(9), torch.tensor([7])])
    engine.model.forward = forward
    assert before == (engine.query(1, 99, 99), engine.query(2, 99, 99), int(engine.free_blocks))
    with pytest.raises(UnsupportedError, match="save_pretrained"):
        engine.serialize(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "config"), [(None, None), ("llama", {}), (nn.Linear(2, 2), 3), (nn.Linear(2, 2), ["dtype"])]
)
def test_what_is_no_module_or_no_configuration_is_refused(model, config):
    with pytest.raises(ConfigError) as error:
        init_inference(model, config)
    assert error.value.code == "inference-config"
