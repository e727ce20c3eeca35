"""A tokenizer is its tokenizer.json: what transformers makes of it too, and never code."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mla_compile import MLAError, load_tokenizer
from tests.models.small import v3_config


def byte_tokenizer() -> Tokenizer:
    ids = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=ids | {"Ġt": 256, "he": 257}, merges=[("Ġ", "t"), ("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.add_tokens([AddedToken("<tool>", lstrip=True, normalized=False)])
    begin = tokenizer.token_to_id("<begin>")
    tokenizer.post_processor = TemplateProcessing("<begin> $A", special_tokens=[("<begin>", begin)])
    return tokenizer


def token(content: str) -> dict[str, object]:
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **flags}


# As published: DeepSeek's, GLM's, what transformers 5 saves, nothing.
PUBLISHED = {
    "deepseek": {
        "add_bos_token": True, "add_eos_token": False, "bos_token": token("<begin>"), "eos_token": token("<end>"),
        "clean_up_tokenization_spaces": False, "legacy": True, "model_max_length": 131072, "pad_token": token("<end>"),
        "sp_model_kwargs": {}, "unk_token": None, "tokenizer_class": "LlamaTokenizerFast",
        "chat_template": "{{ messages[0].content }}",
    },
    "glm": {
        "added_tokens_decoder": {}, "additional_special_tokens": ["<begin>", "<tool>"], "eos_token": "<end>",
        "clean_up_tokenization_spaces": False, "do_lower_case": False, "extra_special_tokens": {},
        "model_max_length": 128000, "padding_side": "left", "tokenizer_class": "PreTrainedTokenizer",
    },
    "saved": {"backend": "tokenizers", "eos_token": "<end>", "tokenizer_class": "TokenizersBackend"},
    "several templates": {"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]},
    "nothing": {},
    "a special token that tokenizer.json lacks": {"eos_token": "<other>"},
}  # fmt: skip


def write(path: Path, config: dict[str, object] | None) -> Path:
    (path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_reads_and_writes_as_the_one_of_transformers(tmp_path, name):
    v3_config().save_pretrained(write(tmp_path, PUBLISHED[name]))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)

    @runs(max_examples=30)
    @given(
        st.text(max_size=8)
        | st.lists(st.sampled_from(["the ", "<end>", "<tool>", "<other>", " , é"])).map("".join)
    )
    def same(text: str) -> None:
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)

    same()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (ours.chat_template, ours.model_max_length) == (theirs.chat_template, theirs.model_max_length)
    assert len(ours) == len(theirs)


def test_it_is_loaded_where_there_is_one(tmp_path):
    assert load_tokenizer(tmp_path) is None
    words = Tokenizer(WordLevel({"<unk>": 0, "mla": 1, "mtp": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer("mtp mla what")["input_ids"] == [2, 1, 0]
    assert tokenizer.name_or_path == str(tmp_path)


def test_a_template_in_a_file_of_its_own_comes_first(tmp_path):
    write(tmp_path, PUBLISHED["deepseek"])
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].role }}")
    chat = [{"role": "user", "content": "hello"}]
    assert load_tokenizer(tmp_path).apply_chat_template(chat, tokenize=False) == "user"


def test_a_template_runs_in_a_sandbox(tmp_path):
    write(tmp_path, {"chat_template": "{{ messages.__class__.__mro__ }}"})
    with pytest.raises(Exception, match="unsafe"):
        load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)


@pytest.mark.parametrize(
    "other", ["tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt"]
)
def test_another_format_is_refused_by_name(tmp_path, other):
    (tmp_path / other).write_text("{}")
    with pytest.raises(
        MLAError, match=rf"a tokenizer in tokenizer\.json, got {other}; .*--tokenizer DIR.*token ids"
    ):
        load_tokenizer(tmp_path)


def test_files_that_a_config_names_are_not_opened(tmp_path):
    write(tmp_path, {})
    elsewhere = tmp_path.parent / "elsewhere.json"
    elsewhere.write_text('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}')
    keys = [
        f"{kind}_file"
        for kind in ("tokenizer", "vocab", "merges", "gguf", "chat_template", "special_tokens_map")
    ]
    keys += ["vocab", "merges", "name_or_path", "tokenizer_object", "fast_tokenizer_files", "backend"]
    before = load_tokenizer(tmp_path)("hello")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict.fromkeys(keys, str(elsewhere))))
    assert load_tokenizer(tmp_path)("hello") == before


HOSTILE = [
    None,
    True,
    -1,
    0,
    2**70,
    1e300,
    "x",
    "",
    [],
    [0],
    {},
    {"type": "x"},
    {"content": 5},
    "\ud800",
    [["a", "b"]],
]


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in list(inside)[:8] for place in places(item, (*path, key)))]


@runs(max_examples=100)
@given(data=st.data(), hostile=st.sampled_from(HOSTILE), name=st.sampled_from(list(PUBLISHED)))
def test_whatever_its_files_say_it_loads_or_is_refused_by_name(tmp_path_factory, data, hostile, name):
    directory = tmp_path_factory.mktemp("tokenizer")
    write(directory, PUBLISHED[name])
    file = directory / data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    content = json.loads(file.read_text())
    *path, last = data.draw(st.sampled_from(places(content)[1:] or [("eos_token",)]))
    place = content
    for key in path:
        place = place[key]
    place[last] = hostile
    file.write_text(json.dumps(content))
    try:
        tokenizer = load_tokenizer(directory)
    except MLAError as error:
        message = str(error)
        assert str(directory) in message
        assert "\n" not in message
    else:
        assert tokenizer is not None
        tokenizer.decode([1, 2])


def test_a_broken_tokenizer_is_a_named_error(tmp_path):
    for text in ("{", "[]", "[" * 100_000, ""):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(
            MLAError, match=r"tokenizer\.json: expected a tokenizer that the tokenizers library"
        ):
            load_tokenizer(tmp_path)
