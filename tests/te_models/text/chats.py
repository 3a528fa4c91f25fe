"""Chat templates in the styles of the field, and small tokenizers of every kind, as folders of transformers."""

import json
from pathlib import Path
from typing import Any

TEXT = [
    "how are you today very well thanks tell me more the sun shines and birds sing in spring",
    "hello user assistant system model tool think weather city Oslo 17",
] * 2
SPECIAL = [
    *(
        "<unk>",
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<|eot_id|>",
    ),
    *("<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>"),
    *("[gMASK]", "<sop>", "<|endoftext|>", "<|end|>"),
]

_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
_SYSTEM = "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"

TEMPLATES: dict[str, tuple[str, list[str]]] = {
    "chatml": (
        "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + _CALLS + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ["<|im_end|>"],
    ),
    "llama2": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
        ["</s>"],
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ["<|eot_id|>", "</s>"],
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
        "{% endfor %}",
        ["</s>"],
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ["<end_of_turn>", "</s>"],
    ),
    "glm": (
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
    ),
    "qwen3": (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% set answer = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
        "{% if '</think>' in answer %}{% set thought = answer.split('</think>')[0].split('<think>')[-1].strip() %}"
        "{% set answer = answer.split('</think>')[-1].lstrip() %}{% endif %}"
        "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ answer }}"
        + _CALLS
        + "{% else %}"
        "{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ["<|im_end|>", "<|endoftext|>"],
    ),
    "deepseek": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}"
        "<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
        ["</s>"],
    ),
    "phi3": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
        ["<|end|>", "<|endoftext|>"],
    ),
    "at the end": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% else %}{{ eos_token }}{% endif %}",
        ["</s>"],
    ),
    "without end": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        ["</s>"],
    ),
}
"""By style: the template, and the tokens at which generation ends."""

KINDS = ("byte-level", "metaspace", "legacy prepend", "unigram", "word piece")


def make_tokenizer(kind: str) -> Any:
    """Train a tokenizer of `tokenizers`."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    quiet: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
    letters = [*map(chr, range(33, 127)), "▁", "\n"]
    if kind == "byte-level":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.post_processor = processors.ByteLevel(trim_offsets=True)
        made.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=360, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **quiet
        )
    elif kind == "metaspace":
        made = Tokenizer(models.BPE(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        trainer = trainers.BpeTrainer(vocab_size=240, initial_alphabet=letters, **quiet)
    elif kind == "legacy prepend":
        made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = trainers.BpeTrainer(vocab_size=240, initial_alphabet=letters, **quiet)
    elif kind == "unigram":
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", initial_alphabet=letters, **quiet)
    else:
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=300, initial_alphabet=letters, **quiet)
    made.train_from_iterator(TEXT, trainer)
    return made


def make_folder(folder: Path, kind: str, style: str, *, eos: str = "</s>") -> Any:
    """Write a tokenizer with a template, and a generation_config.json with its ends; return it as transformers reads
    it."""
    import transformers

    template, ends = TEMPLATES[style]
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(kind), bos_token="<s>", eos_token=eos, unk_token="<unk>"
    )
    made.chat_template = template
    made.save_pretrained(folder)
    ids = [made.convert_tokens_to_ids(end) for end in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids if len(ids) > 1 else ids[0]}))
    return transformers.AutoTokenizer.from_pretrained(folder)


CHAT = [
    {"role": "user", "content": "how are you today"},
    {"role": "assistant", "content": "very well, thanks"},
    {"role": "user", "content": "tell me more"},
    {"role": "assistant", "content": "the sun shines"},
]
