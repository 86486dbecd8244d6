"""The demo's model: absorbed and paged equals plain."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashmla
from flashmla import reference
from flashmla.demo.generate import PROMPT, TOKENIZER, WEIGHTS, Summary, generate, judge
from flashmla.demo.model import Config, LanguageModel, PagedModel, PlainModel
from flashmla.demo.tokenizer import Tokenizer

PROMPTS = [PROMPT.read_text(), "a", "In the beginning " * 30, "\u05d0\u05d1 \U0001f54a\n\n\x00 9"]


@pytest.fixture(autouse=True)
def _one_thread(_two_threads):
    """A step is too small to gain from a second thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def trained() -> LanguageModel:
    return LanguageModel.load(WEIGHTS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TOKENIZER)


def oracle(
    q, k_cache, block_table, cache_seqlens, head_dim_v, *plan, softmax_scale=None, causal=False
):
    out, lse = reference.attend(
        q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal
    )
    return out.to(q.dtype), lse.float()


def no_plan(cache_seqlens, num_heads_per_head_k, num_heads_k):
    return None, None


def run(*arguments, **options) -> Summary:
    summary = Summary()
    for _ in generate(*arguments, summary, **options):
        pass
    return summary


@pytest.mark.parametrize("page_size", [1, 5, 64, 100])
def test_absorbed_and_paged_equals_plain_with_random_weights(page_size):
    torch.manual_seed(0)
    config = Config(vocab_size=50, context_length=64, hidden_size=32, num_layers=2, num_heads=3)
    model = LanguageModel(config).double().eval().requires_grad_(False)
    # Larger weights, and norms of another size than 1, so that every part has a say.
    for parameter in model.parameters():
        parameter.mul_(8) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    tokens = torch.randint(0, 50, (20,))
    paged = PagedModel(model, oracle, no_plan, page_size)
    plain = PlainModel(model)
    for chunk in tokens.split([9, 1, 1, 4, 1, 1, 3]):
        assert torch.allclose(paged.append(chunk), plain.append(chunk), atol=1e-6)
    # Both equal the forward pass of the whole sequence.
    whole = model(tokens[None])[0, -1]
    final = PlainModel(model).append(tokens)
    assert torch.allclose(whole, final, atol=1e-6)


@pytest.mark.parametrize("page_size", [1, 48, 64, 2000])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["shipped", "letter", "long", "unicode"])
def test_absorbed_and_paged_equals_plain_with_the_trained_weights(
    trained, tokenizer, page_size, prompt
):
    tokens = torch.tensor(tokenizer.encode(prompt))[:40]
    paged = PagedModel(trained, oracle, no_plan, page_size)
    plain = PlainModel(trained)
    for chunk in (tokens, *torch.arange(300, 306).split([1, 1, 4])):
        ours, expected = paged.append(chunk), plain.append(chunk)
        assert torch.allclose(ours, expected, atol=5e-5)
        assert int(ours.argmax()) == int(expected.argmax())


def test_the_trained_weights_know_their_text(trained, tokenizer):
    tokens = torch.tensor(tokenizer.encode(PROMPT.read_text()))  # of a chapter held out
    logits = trained(tokens[None, :-1])[0]
    assert torch.nn.functional.cross_entropy(logits, tokens[1:]) < 3.0  # 2.74 here; uniform is 6.9


def test_an_attention_call_is_what_the_documentation_says(trained):
    calls = []

    def recorded(*arguments, **options):
        calls.append((arguments, options))
        return oracle(*arguments, **options)

    plans = []

    def planned(*arguments):
        plans.append(arguments)
        return "metadata", "num_splits"

    paged = PagedModel(trained, recorded, planned, 16)
    paged.append(torch.arange(20))
    paged.append(torch.arange(1))
    layers = trained.config.num_layers
    assert [(int(lens), *heads) for lens, *heads in plans] == [(20, 160, 1), (21, 8, 1)]
    assert len(calls) == 2 * layers
    for index, (arguments, options) in enumerate(calls):
        q, k_cache, table, lens, head_dim_v, *plan = arguments
        assert q.shape == (1, 20 if index < layers else 1, 8, 576)
        assert k_cache.shape == (64, 16, 1, 576)
        assert table.shape == (1, 64)
        assert table.dtype == lens.dtype == torch.int32
        assert head_dim_v == 512
        assert plan == ["metadata", "num_splits"]
        assert options == {"softmax_scale": 96**-0.5, "causal": True}


def test_pages_are_shuffled_and_unused_slots_hold_nan(trained):
    paged = PagedModel(trained, oracle, no_plan, 16)
    paged.append(torch.arange(40))
    used = paged.cache.block_table[0][paged.cache.block_table[0] >= 0].tolist()
    assert len(used) == paged.cache.pages == 3
    assert used != sorted(used)
    for pool in paged.cache.pools:
        assert int(pool.isnan().any(-1).logical_not().sum()) == 40


def test_a_full_cache_takes_no_more(trained):
    paged = PagedModel(trained, oracle, no_plan, 64)
    paged.cache.grow(1020)
    with pytest.raises(ValueError, match="5 tokens do not fit: the cache has room for 4 more"):
        paged.cache.grow(5)
    paged.cache.grow(4)
    assert sorted(paged.cache.block_table[0].tolist()) == list(range(16))


@pytest.mark.skipif(not flashmla._flashmla_C_AVAILABLE, reason="flashmla is not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [7, 64])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_operator_writes_the_plain_models_tokens(dtype, page_size, temperature):
    summary = run(PROMPTS[0], 16, dtype=dtype, page_size=page_size, temperature=temperature)
    assert summary.tokens == len(summary.steps) == 16
    assert summary.mismatches == 0
    assert summary.all_equal or dtype == torch.bfloat16
    assert summary.max_logit_difference < (1e-4 if dtype == torch.float32 else 0.5)
    assert summary.prompt_tokens > 64
    assert summary.pages == -(-(summary.prompt_tokens + 15) // page_size)
    assert summary.cache_bytes == 6 * -(-1024 // page_size) * page_size * 576 * dtype.itemsize
    assert summary.tokens_per_second == pytest.approx(15 / summary.decode_seconds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_both_models_run_on_a_gpu():
    def moved(q, *rest, **options):
        tensors = (x.cpu() if isinstance(x, torch.Tensor) else x for x in (q, *rest))
        return tuple(result.to(q.device) for result in oracle(*tensors, **options))

    for dtype in (torch.float32, torch.bfloat16):
        summary = run(
            PROMPTS[0], 16, dtype=dtype, device="cuda", attention=moved, plan=no_plan, page_size=48
        )
        assert summary.mismatches == 0
        assert summary.max_logit_difference < (1e-3 if dtype == torch.float32 else 0.5)


def test_tokens_are_drawn_by_the_seed():
    options = {"attention": oracle, "plan": no_plan, "temperature": 1.0}
    drawn = [
        [step.token for step in run("And", 12, seed=seed, **options).steps] for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_wrong_attention_is_caught():
    def enlarged(*arguments, **options):
        out, lse = oracle(*arguments, **options)
        return out * 1.5, lse

    summary = run("And God said", 12, attention=enlarged, plan=no_plan)
    assert summary.mismatches > 0
    assert not summary.all_equal


@pytest.mark.parametrize(
    ("plain_scores", "expected"),
    [
        ([1.0, 8.0, 2.0], (1, 1, False)),
        ([1.0, 8.0, 8.00001], (1, 2, True)),
        ([1.0, 8.0, 8.001], (1, 2, False)),
        ([8.00001, 8.0, 8.00002], (1, 2, True)),
    ],
    ids=["equal", "tie", "mismatch", "tie of three"],
)
def test_a_tie_is_told_from_a_mismatch(plain_scores, expected):
    scores = torch.tensor([1.0, 8.0, 3.0])
    assert judge(scores, torch.tensor(plain_scores), rounding=3e-5) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"num_tokens": 0}, "num_tokens is 0; it must be at least 1"),
        ({"page_size": 0}, "page_size is 0; it must be between 1 and the"),
        ({"temperature": -0.5}, "temperature is -0.5; it must be finite and not negative"),
        ({"temperature": math.nan}, "temperature is nan; it must be finite and not negative"),
        ({"dtype": torch.float16}, "dtype is torch.float16; it must be float32 or bfloat16"),
        (
            {"prompt": "a\n" * 512, "num_tokens": 1},
            "the prompt has 1024 tokens and num_tokens is 1; together they must be at most the "
            "model's context length, 1024",
        ),
    ],
    ids=["prompt", "num_tokens", "page_size", "temperature", "nan", "dtype", "context"],
)
def test_generate_refuses(options, message):
    given = {"prompt": "And", "num_tokens": 2} | options
    summary = Summary()
    with pytest.raises(ValueError, match=message):
        next(generate(**given, summary=summary, attention=oracle, plan=no_plan))
    assert summary == Summary()


@given(text=st.text(max_size=60))
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(data=st.binary(max_size=20))
def test_bytes_of_a_command_line_survive_the_tokenizer(tokenizer, data):
    text = data.decode("utf-8", "surrogateescape")
    assert tokenizer.decode(tokenizer.encode(text)) == data.decode("utf-8", "replace")


def test_frequent_words_are_one_token(tokenizer):
    text = " and the LORD said unto him"
    assert len(tokenizer.encode(text)) == 6
    assert tokenizer.vocab_size == Config().vocab_size


def test_the_most_frequent_pair_is_merged_first(tmp_path):
    trained = Tokenizer.train(["abab abc", "bc bc bc"], 259)
    spelled = [tuple(trained.decode([token]) for token in pair) for pair in trained.merges]
    # "bc" is there four times; then "ab" and " bc" twice each, and "a" is the lowest token.
    assert spelled == [("b", "c"), ("a", "b"), (" ", "bc")]
    trained.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json").merges == trained.merges
    assert len(trained.encode("abab bc")) == 3


def test_the_text_of_the_steps_is_the_text_of_the_tokens(tokenizer):
    summary = Summary()
    steps = generate("In the beginning", 20, summary, attention=oracle, plan=no_plan)
    text = "".join(step.text for step in steps)
    assert text == tokenizer.decode([step.token for step in summary.steps]).rstrip("\ufffd")
