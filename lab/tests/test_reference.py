"""The shipped weights, which stand in for a model that was trained: they load offline, and answer what the tests ask them."""

import torch

from cacheblend_lab.reference import load_model, load_tokenizer
from cacheblend_lab.reference.corpus import examples
from cacheblend_lab.reference.prompt import FORM, value_of

TOKENIZER = load_tokenizer()


def test_it_answers_by_full_prefill_what_stands_in_the_chunks() -> None:
    model, right = load_model(), []
    for example in examples(24):
        for asked in example.questions:
            assert asked.answer == value_of(asked.sentence) and asked.answer in example.chunks[asked.source]
            text = FORM.render(example.chunks, asked.text)
            prompt = torch.tensor([TOKENIZER(text, add_special_tokens=False)["input_ids"]])
            output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40)
            answer = TOKENIZER.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
            right.append(value_of(answer) == asked.answer)
    assert sum(right) / len(right) >= 0.75


def test_the_form_of_prompts_is_that_of_the_chat_template() -> None:
    text = FORM.render(["A.", "B."], "C?")
    message = FORM.head.partition("\n")[2] + FORM.separator.join(["A.", "B."]) + FORM.middle + "C?"
    rendered = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == text
