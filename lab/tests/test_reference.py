"""The shipped weights: they load offline, are small, and answer what the tests ask them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_lab.reference import load_model, load_tokenizer
from cacheblend_lab.reference.corpus import examples
from cacheblend_lab.reference.prompt import FORM, value_of

TOKENIZER = load_tokenizer()


def ids(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return encoded


def test_it_answers_by_full_prefill() -> None:
    model, right = load_model(), []
    for example in examples(24):
        for asked in example.questions:
            prompt = torch.tensor([ids(FORM.render(example.chunks, asked.text))])
            output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40)
            answer = TOKENIZER.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
            right.append(value_of(answer) == asked.answer)
    assert sum(right) / len(right) >= 0.75


def test_answers_stand_in_the_chunks_that_they_need() -> None:
    found = examples(512)
    assert sum(len(example.questions) for example in found) == 512
    titles = [document.title for example in found for document in example.documents]
    assert len(titles) == len(set(titles))
    for example in found:
        for question in example.questions:
            assert value_of(question.sentence) == question.answer
            assert question.source in question.support
            assert question.answer in example.chunks[question.source]


@settings(max_examples=100)
@given(st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), max_size=30), min_size=1))
def test_pieces_cut_at_line_breaks_equal_the_whole(lines: list[str]) -> None:
    pieces = [token for number, line in enumerate(lines) for token in ids(line if number == 0 else "\n" + line)]
    assert pieces == ids("\n".join(lines))


def test_the_form_of_prompts_is_that_of_the_chat_template() -> None:
    text = FORM.render(["A.", "B."], "C?")
    message = FORM.head.partition("\n")[2] + FORM.separator.join(["A.", "B."]) + FORM.middle + "C?"
    rendered = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == text
