"""The demo's model: absorbed and paged equals plain."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from flashmla import reference
from flashmla.demo.generate import PROMPT, TOKENIZER, WEIGHTS, Summary, generate
from flashmla.demo.model import Config, LanguageModel, PagedModel, PlainModel


def oracle(
    q, k_cache, block_table, cache_seqlens, head_dim_v, *plan, softmax_scale=None, causal=False
):
    out, lse = reference.attend(
        q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal
    )
    return out.to(q.dtype), lse.float()


def no_plan(cache_seqlens, num_heads_per_head_k, num_heads_k):
    return None, None


@pytest.mark.parametrize("page_size", [1, 5, 64, 100])
def test_absorbed_and_paged_equals_plain_with_random_weights(page_size):
    torch.manual_seed(0)
    config = Config(vocab_size=50, context_length=64, hidden_size=32, num_layers=2, num_heads=3)
    model = LanguageModel(config).double().eval().requires_grad_(False)
    tokens = torch.randint(0, 50, (20,))
    paged = PagedModel(model, oracle, no_plan, page_size)
    plain = PlainModel(model)
    for chunk in tokens.split([9, 1, 1, 4, 1, 1, 3]):
        assert torch.allclose(paged.append(chunk), plain.append(chunk), atol=1e-9)
    # Both equal the forward pass of the whole sequence.
    whole = model(tokens[None])[0, -1]
    final = PlainModel(model).append(tokens)
    assert torch.allclose(whole, final, atol=1e-5)


def test_pages_are_shuffled_and_unused_slots_hold_nan():
    model = LanguageModel.load(WEIGHTS)
    paged = PagedModel(model, oracle, no_plan, 16)
    paged.append(torch.arange(40))
    used = paged.cache.block_table[0][paged.cache.block_table[0] >= 0].tolist()
    assert len(used) == 3
    assert used != sorted(used)
    assert int(paged.cache.pools[0].isnan().any(-1).logical_not().sum()) == 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [7, 64])
def test_the_operator_writes_the_plain_models_tokens(dtype, page_size):
    summary = Summary()
    prompt = PROMPT.read_text().strip()
    for _ in generate(prompt, 24, summary, dtype=dtype, page_size=page_size):
        pass
    assert summary.tokens == 24
    assert summary.mismatches == 0
    assert summary.max_logit_difference < (1e-3 if dtype == torch.float32 else 1.0)


def test_a_wrong_attention_is_caught():
    def shifted(*arguments, **options):
        out, lse = oracle(*arguments, **options)
        return out * 1.5, lse

    summary = Summary()
    for _ in generate("And God said", 12, summary, attention=shifted, plan=no_plan):
        pass
    assert summary.mismatches > 0


@given(text=st.text(min_size=1, max_size=40))
def test_any_text_survives_the_tokenizer(text):
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_text_of_the_steps_is_the_text_of_the_tokens():
    summary = Summary()
    text = "".join(step.text for step in generate("In the beginning", 20, summary))
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    assert text == tokenizer.decode([step.token for step in summary.steps]).rstrip("\ufffd")
