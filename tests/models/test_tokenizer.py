"""A tokenizer is its tokenizer.json: what transformers makes of it too, and never code."""

import json
import random
import re
import tempfile
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
from tests.models.tokenizer_files import NAMED, random_text, write_random


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


def assert_as_transformers_has_it(directory: Path, draw: random.Random) -> None:
    v3_config().save_pretrained(directory)
    write_random(directory, draw)
    try:
        theirs = AutoTokenizer.from_pretrained(directory)
    except TypeError:  # an object of special_tokens_map.json that it does not take
        with pytest.raises(MLAError, match="tokens of the files beside it"):
            load_tokenizer(directory)
        return
    file = directory / "tokenizer_config.json"
    adds_bos = file.exists() and json.loads(file.read_text()).get("add_bos_token")
    bos = [theirs.bos_token_id] if adds_bos and theirs.bos_token_id is not None else []
    ours = load_tokenizer(directory)
    assert len(ours) == len(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_ids == theirs.all_special_ids
    for name in NAMED:
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    for _ in range(6):
        ids = ours(text := random_text(draw))["input_ids"]
        assert ids == bos + theirs(text)["input_ids"], text  # transformers ignores add_bos_token
        for some in (ids, [draw.randrange(len(ours)) for _ in range(8)]):
            for skip in (True, False):
                assert ours.decode(some, skip_special_tokens=skip) == theirs.decode(
                    some, skip_special_tokens=skip
                )


@pytest.mark.parametrize("seed", range(40))
def test_tokens_that_other_files_name_are_those_of_transformers(tmp_path, seed):
    assert_as_transformers_has_it(tmp_path, random.Random(seed))


@pytest.mark.long
def test_many_more_such_files(tmp_path_factory):
    for seed in range(1000, 1300):
        assert_as_transformers_has_it(tmp_path_factory.mktemp("tokenizer"), random.Random(seed))


@pytest.mark.parametrize("given", ["with BOS", "without", "none"])
@pytest.mark.parametrize("wanted", [True, False, None])
def test_a_text_begins_with_bos_as_its_config_says(tmp_path, given, wanted):
    """DeepSeek's tokenizer.json adds none, and its config has add_bos_token."""
    file = json.loads(byte_tokenizer().to_str())
    if given != "with BOS":
        without = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
        file["post_processor"] = without if given == "without" else None
    config = PUBLISHED["deepseek"] | {"add_bos_token": wanted}
    (write(tmp_path, config) / "tokenizer.json").write_text(json.dumps(file))
    tokenizer = load_tokenizer(tmp_path)
    plain = tokenizer("hello", add_special_tokens=False)["input_ids"]
    begins = given == "with BOS" if wanted is None else wanted
    assert tokenizer("hello")["input_ids"] == [tokenizer.bos_token_id] * begins + plain


def test_other_tokens_that_texts_begin_with_are_not_dropped(tmp_path):
    file = json.loads(byte_tokenizer().to_str())
    for config in ({"bos_token": "<begin>", "add_bos_token": True}, {"bos_token": "<tool>"}):
        (write(tmp_path, config) / "tokenizer.json").write_text(json.dumps(file))
        assert load_tokenizer(tmp_path)("")["input_ids"] == [258]
    write(tmp_path, {"bos_token": "<tool>", "add_bos_token": True})
    expected = (
        r"json: add_bos_token: expected none beside .* other special tokens too, \['<begin>'\], got True"
    )
    with pytest.raises(MLAError, match=expected):
        load_tokenizer(tmp_path)


def test_without_a_bos_token_none_is_added(tmp_path):
    file = json.loads(byte_tokenizer().to_str()) | {"post_processor": None}
    (write(tmp_path, {"add_bos_token": True}) / "tokenizer.json").write_text(json.dumps(file))
    assert load_tokenizer(tmp_path)("he")["input_ids"] == [257]


def test_a_token_that_only_its_config_names_is_one_token(tmp_path):
    decoder = {"258": {"content": "<|user|>", "special": True}}
    write(tmp_path, {"added_tokens_decoder": decoder, "eos_token": "<|user|>"})
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer("<|user|>hi")["input_ids"]
    assert len(ids) == 4  # the template's <begin> before it
    assert tokenizer.eos_token_id == ids[1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi"


BAD_FILES = {
    "special_tokens_map.json": ["[]", "{", '{"eos_token": 3}', '{"a": 1, "a": 2}', '{"extra_special_tokens": [0]}'],
    "added_tokens.json": ["[]", '{"<a>": -1}', '{"<a>": "1"}', '{"<a>": true}', '{"<a>": 1, "<a>": 2}'],
    "tokenizer_config.json": [
        '{"added_tokens_decoder": []}', '{"added_tokens_decoder": {"x": {"content": "a"}}}',
        '{"added_tokens_decoder": {"1": "a"}}', '{"extra_special_tokens": 3}',
        '{"model_specific_special_tokens": ["a"]}', '{"eos_token": ["a"]}', '{"add_bos_token": "yes"}',
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"), [(n, content) for n, every in BAD_FILES.items() for content in every]
)
def test_a_bad_file_of_tokens_is_named(tmp_path, name, content):
    write(tmp_path, {})
    (tmp_path / name).write_text(content)
    with pytest.raises(MLAError, match=re.escape(str(tmp_path / name))):
        load_tokenizer(tmp_path)


def test_a_library_that_panics_is_a_named_error(tmp_path, monkeypatch):
    def panic(*_: object, **__: object) -> None:
        raise PanicException("it gave up")

    write(tmp_path, {})
    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", panic)
    with pytest.raises(MLAError, match=r"tokenizer\.json: .*it gave up"):
        load_tokenizer(tmp_path)


def test_no_room_for_temporary_files_is_not_blamed_on_the_tokenizer(tmp_path, monkeypatch):
    write(tmp_path, {})
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        with pytest.raises(MLAError, match=r"^TMPDIR: .*No such file"):
            load_tokenizer(tmp_path)


class PanicException(BaseException):
    """As pyo3's: no `Exception`."""


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


FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in list(inside)[:8] for place in places(item, (*path, key)))]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_its_files_say_it_loads_or_is_refused_by_name(tmp_path, seed):
    check_hostile(tmp_path, random.Random(seed))


def check_hostile(directory: Path, draw: random.Random) -> bool:
    """Whether a tokenizer with one value of its files replaced loads; else one error names the directory."""
    write(directory, PUBLISHED[draw.choice(list(PUBLISHED))])
    other = {"eos_token": token("<end>"), "additional_special_tokens": ["<tool>"], "a_token": "<other>"}
    (directory / "special_tokens_map.json").write_text(json.dumps(other))
    (directory / "added_tokens.json").write_text(json.dumps({"<new>": 300}))
    file = directory / draw.choice(FILES)
    content = json.loads(file.read_text())
    *path, last = draw.choice(places(content)[1:] or [("eos_token",)])
    place = content
    for key in path:
        place = place[key]
    place[last] = draw.choice(HOSTILE)
    file.write_text(json.dumps(content))
    try:
        tokenizer = load_tokenizer(directory)
    except MLAError as error:
        message = str(error)
        assert str(directory) in message
        assert "\n" not in message
        return False
    assert tokenizer is not None
    tokenizer.decode([1, 2])
    return True


def test_a_broken_tokenizer_is_a_named_error(tmp_path):
    for text in ("{", "[]", "[" * 100_000, ""):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(
            MLAError, match=r"tokenizer\.json: expected a tokenizer that the tokenizers library"
        ):
            load_tokenizer(tmp_path)
