"""Prompts: JSON lines as data sets publish them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from texts_helpers import byte_tokenizer

from kernjax.base.errors import UserError
from kernjax.texts import check_lengths, load_tokenizer, read_prompts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(byte_tokenizer(tmp_path_factory.mktemp("model")))


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + "\n")
    return path


def test_every_form_of_a_prompt(tmp_path, tokenizer):
    path = write(
        tmp_path / "p.jsonl",
        {"question": "2 + 2?", "answer": "4"},
        {"prompt": "Once", "id": "story", "kind": "prose"},
        {"text": "def f"},
        {"tokens": [5, 6]},
    )
    prompts = read_prompts(path, tokenizer, kind="math", template="Q: {prompt}\nA:")
    assert [(p.id, p.kind, p.text) for p in prompts] == [
        ("prompt-1", "math", "Q: 2 + 2?\nA:"),
        ("story", "prose", "Q: Once\nA:"),
        ("prompt-3", "math", "Q: def f\nA:"),
        ("prompt-4", "math", None),
    ]
    assert tokenizer.decode(prompts[0].ids) == "Q: 2 + 2?\nA:"
    assert prompts[3].ids.tolist() == [5, 6] and prompts[3].ids.dtype == np.int32
    assert [p.id for p in read_prompts(path, tokenizer, limit=2)] == ["prompt-1", "story"]


def test_ids_need_no_tokenizer(tmp_path):
    path = write(tmp_path / "p", {"tokens": [5]})
    assert read_prompts(path, None)[0].ids.tolist() == [5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 is no object"),
        ('{"answer": "4"}', "line 1 has the keys answer. Expected one of prompt, question, text"),
        ("{}", r"has the keys \(none\)"),
        ('{"prompt": ""}', "prompt=''"),
        ('{"prompt": 3}', "prompt=3"),
        ('{"tokens": []}', "no list of token ids"),
        ('{"tokens": [1.5]}', "no list of token ids"),
        ('{"tokens": [true]}', "no list of token ids"),
        ('{"tokens": [-1]}', "no list of token ids"),
        ('{"prompt": "x", "id": "a/b"}', "id='a/b'"),
        ('{"prompt": "x", "kind": ""}', "kind=''"),
        ('{"prompt": "x", "id": "a"}\n{"prompt": "y", "id": "a"}', "line 2: the id 'a' is that of"),
        ("\n\n", "holds no prompt"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, tokenizer, line, message):
    (tmp_path / "p").write_text(line)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / "p", tokenizer)


def test_other_refusals(tmp_path, tokenizer):
    path = write(tmp_path / "p", {"prompt": "Once"})
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts(tmp_path / "none", tokenizer)
    with pytest.raises(UserError, match="the model has no tokenizer.json"):
        read_prompts(path, None)
    with pytest.raises(UserError, match="template='Q:' has no {prompt}"):
        read_prompts(path, tokenizer, template="Q:")
    prompts = read_prompts(path, tokenizer)
    check_lengths(prompts, 4)
    with pytest.raises(UserError, match="'prompt-1' has 4 tokens. Expected at most context_len=3"):
        check_lengths(prompts, 3)
