"""`transformers` with our weights: the same logits, the same tokens, honest counts.

Its norms and rotary positions compute in float32 whatever a model's dtype is, so that logits of
float64 models agree to that only; weights at a wrong place are off by a million times as much.
"""

import pytest
import torch

from specdec.bench.engines import Watch, as_transformers, generates, quiet, reader_of
from specdec.bench.runs import ours
from specdec.drafters import PromptLookup
from specdec.testing import small_hybrid
from tests.helpers import tiny_transformer

PROMPT = torch.tensor([1, 2, 3, 1, 2, 3, 1])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "LlamaForCausalLM"),
        ({"tie_word_embeddings": False, "head_dim": 6}, "LlamaForCausalLM"),
        ({"qk_norm": True}, "Qwen3ForCausalLM"),
    ],
)
def test_logits_are_ours_and_no_weight_is_copied(changes, name):
    """Catches q, k and v split at the wrong rows, a wrong base of positions, weights held twice."""
    ours = tiny_transformer(**changes)
    theirs = as_transformers(ours)
    assert type(theirs).__name__ == name
    assert not theirs.training
    tokens = torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens).logits, atol=1e-5, rtol=0)
    own = {p.untyped_storage().data_ptr() for p in ours.parameters()}
    assert {p.untyped_storage().data_ptr() for p in theirs.parameters()} == own
    assert not any(p.requires_grad for p in theirs.parameters())


@pytest.mark.parametrize("n_experts", [0, 4])
def test_a_hybrid_goes_through_a_folder(n_experts):
    """Catches experts or recurrent layers that come back changed."""
    ours = small_hybrid(0, n_experts=n_experts)
    theirs = as_transformers(ours)
    with quiet():
        logits = theirs(PROMPT[None]).logits
    torch.testing.assert_close(logits, ours(PROMPT[None]).logits, atol=2e-5, rtol=0)


def run_all(model, helper, stops, n_tokens):
    theirs, assistant = as_transformers(model), as_transformers(helper)
    return {
        "ours": ours(model, None, stops)(PROMPT, n_tokens),
        "our lookup": ours(model, PromptLookup(2, 3), stops)(PROMPT, n_tokens),
        "plain": generates(theirs, stops)(PROMPT, n_tokens),
        "lookup": generates(theirs, stops, prompt_lookup=3)(PROMPT, n_tokens),
        "assisted": generates(theirs, stops, assistant=assistant, n_assistant=2)(PROMPT, n_tokens),
    }


def test_all_say_the_same_and_count_the_same():
    """Catches tokens of the prefill counted as decoded, passes miscounted, budgets off by one."""
    model = tiny_transformer(1)
    runs = run_all(model, model, (), 12)
    plain = runs["ours"].sequence
    for name, run in runs.items():
        assert torch.equal(run.sequence, plain), name
        assert run.n_new == 12 and 0 < run.seconds < run.call_seconds
    assert (runs["ours"].n_timed, runs["ours"].n_passes, runs["ours"].tau) == (12, 12, 1.0)
    assert (runs["plain"].n_timed, runs["plain"].n_passes, runs["plain"].tau) == (11, 12, 1.0)
    assert (runs["assisted"].n_passes, runs["assisted"].tau) == (4, 3.0)  # its own draft model
    assert runs["assisted"].n_timed == 9


def test_all_stop_alike():
    """Catches a stop token that one engine goes past, or leaves out."""
    model = tiny_transformer(1)
    free = ours(model, None, ())(PROMPT, 12).sequence[len(PROMPT) :].tolist()
    stop = free[4]
    n_new = free.index(stop) + 1
    for name, run in run_all(model, model, (stop,), 12).items():
        assert run.n_new == n_new, name
        assert run.sequence[len(PROMPT) :].tolist() == free[:n_new], name


def test_an_assistant_drafts_as_many_tokens_in_every_call():
    """Catches the heuristic of `transformers`, which carries a number over to the next call."""
    model = tiny_transformer(1)
    run = generates(as_transformers(model), (), assistant=as_transformers(model), n_assistant=2)
    assert [run(PROMPT, 12).n_passes for _ in range(3)] == [4, 4, 4]


def test_transformers_refuses_to_draft_for_a_hybrid():
    """Catches a refusal that is no ValueError any more, and would end the benchmark."""
    run = generates(as_transformers(small_hybrid(0)), (), prompt_lookup=2)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        run(PROMPT, 8)


def test_a_watch_skips_the_prompt():
    """Catches the prompt counted as a pass."""
    watch = Watch()
    for n in (7, 1, 3):
        watch.put(torch.zeros(1, n))
    watch.end()
    assert [n for _, n in watch.emitted] == [1, 3]


def test_quiet_leaves_the_logging_as_it_was():
    """Catches a library that silences its caller's logs."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_info()  # whatever other tests left behind
    logging.enable_progress_bar()
    with quiet():
        assert logging.get_verbosity() == logging.ERROR
        assert not logging.is_progress_bar_enabled()
    assert logging.get_verbosity() == logging.INFO
    assert logging.is_progress_bar_enabled()
    logging.set_verbosity(before)


def test_a_folder_has_its_own_tokenizer(tmp_path):
    """Catches a chat template that is not written, and stop tokens that are not found."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    with pytest.raises(ValueError, match=r"model: expected a tokenizer in "):
        reader_of(tmp_path)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<u>": 2, "<end>": 3}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    fast.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "a b"}]
    reader = reader_of(tmp_path)
    assert reader.encode(messages).tolist() == [0, 1]
    assert (reader.is_chat, reader.stop_tokens) == (False, (3,))
    fast.chat_template = "{% for m in messages %}<u> {{ m.content }} {% endfor %}"
    fast.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    reader = reader_of(tmp_path)
    assert reader.encode(messages).tolist() == [2, 0, 1]
    assert (reader.is_chat, reader.stop_tokens) == (True, (3, 1))
    assert reader.decode(torch.tensor([1])) == "b"
