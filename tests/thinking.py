"""Chat templates of models that think, in our words, and a tiny model whose answers begin with what a test dictates."""

import copy
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from tokenizers import AddedToken

from cacheblend_lab.reference import load_tokenizer
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt
from cacheblend_rag.chat.render import render_chat
from cacheblend_rag.lexer import lexer_of
from tests.families import tiny_reader

# Thoughts are shown again in the answers after the last message of the user, while calls and their results go on.
QWEN3 = (
    "{% set ns = namespace(at=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.at = loop.index0 %}{% endif %}"
    "{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% elif m.role != 'assistant' %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% else %}"
    "{% set said, thought = m.content, m.reasoning_content or '' %}"
    "{% if not thought and '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1] %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if thought and loop.index0 > ns.at %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}{{ said }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The prompt opens the thoughts, and those of past answers are always left out.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}"
    "{{ eos_token }}{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
# Answers are messages in channels; analysis is shown again beside a call, until there is a final message.
GPT_OSS = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% if m.tool_calls %}{% if m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant to=functions."
    "{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}"
    "<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Tools in the form of Qwen and Hermes, with the roles that the reference model knows.
TOOL_TEMPLATE = """{{ bos_token }}{% if tools %}<|system|>
You may call these tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write each call as JSON with a name and arguments between <tool_call></tool_call> tags.
{% endif %}{% for message in messages %}{% if message.role == 'tool' %}<|user|>
<tool_response>
{{ message.content }}
</tool_response>
{% else %}<|{{ message.role }}|>
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
TEMPLATES = {"Qwen3": QWEN3, "DeepSeek-R1": R1, "gpt-oss": GPT_OSS}

_SPECIAL = "<|im_start|> <|im_end|> <|user|> <|Assistant|> <|start|> <|end|> <|channel|> <|message|> <|call|> <|return|>".split()


def knows_tags(tokenizer: Any) -> Any:
    """A copy of a tokenizer with the template of Qwen, for whose tags it has tokens that are not special."""
    known = copy.deepcopy(tokenizer)
    known.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    known.chat_template = TOOL_TEMPLATE
    return known


def tokenizer_of(name: str) -> Any:
    """A tokenizer with the template of a model and its control tokens: those around thoughts are special for gpt-oss alone."""
    tokenizer = load_tokenizer()
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in _SPECIAL], special_tokens=True)
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in ("<think>", "</think>")])
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


class Dictation:
    """A tiny random model, and the tokens that each of its answers begins with; what follows, the model chooses."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.tokenizer = tokenizer_of(name)
        self.model = tiny_reader(vocab_size=len(self.tokenizer), eos_token_id=None)
        self._left: list[int] = []
        self.model.lm_head.register_forward_hook(self._dictate)
        self.engine = BlendEngine(
            self.model, self.tokenizer, **engine_settings(self_check=False, lookup_tokens=0, **settings)
        )

    def say(self, text: str, *, ends: bool = False) -> int:
        """Have the next answer begin with a text, or be just that; return how many tokens those are."""
        self._left = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self._left += [self.tokenizer.eos_token_id] if ends else []
        self.model.generation_config.eos_token_id = self.tokenizer.eos_token_id if ends else None
        return len(self._left)

    def _dictate(self, _: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        if self._left:
            logits[:, -1] = torch.nn.functional.one_hot(torch.tensor(self._left.pop(0)), logits.shape[-1]) * 1e4
        return logits

    def own_answer(self, prompt_ids: Sequence[int], begins: str, tokens: int) -> list[int]:
        """What the model itself, without any of ours, makes of the ids of a prompt when its answer begins so."""
        self.say(begins)
        ids = torch.tensor([list(prompt_ids)])
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        return output[0, ids.shape[1] :].tolist()

    def holds_six_turns(
        self, ask: Callable[[list[dict[str, Any]], int], tuple[str, str, int]]
    ) -> list[tuple[int, int]]:
        """Check a chat of six turns: the answers are the model's own, and KV is kept as far as the template allows.

        `ask` is given the turns, and how many tokens the answer may have; it returns thoughts, words, and the tokens that came
        from the prompt before. Returned are these, and those of the prompt, for each turn.
        """
        turns: list[dict[str, Any]] = []
        held: list[int] = []
        kept: list[tuple[int, int]] = []
        for number in range(6):
            turns.append({"role": "user", "content": f"What did the harbour office write in letter {number}?"})
            ids = self.engine.prompt_ids(BlendPrompt(segments=render_chat(self.tokenizer, turns)))
            begins = f"<think>\nLetter {number} was sent to Mara.\n</think>\n\n"
            tokens = self.say(begins) + 9
            answer = self.own_answer(ids, begins, tokens)
            self.say(begins)
            thoughts, words, reused = ask(turns, tokens)
            thinking = lexer_of(self.tokenizer).thinking(())
            assert thinking is not None
            assert (thoughts, words) == thinking.apart(self.tokenizer.decode(answer, skip_special_tokens=True))
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, ids[:-1], strict=False)))
            assert reused == same
            # The template takes out what was thought, and nothing before it.
            assert same >= (kept[-1][1] if kept else 0)
            held = [*ids, *answer[:-1]]
            turns.append({"role": "assistant", "content": words, "reasoning_content": thoughts})
            kept.append((reused, len(ids)))
        return kept
