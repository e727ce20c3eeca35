"""The page at `/`, in a real browser, before a fake server whose answers are given to the byte."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.serving.browser import CHROMIUM, CONTROL, SHIFT, Browser, Page, chromium
from tests.serving.pretended_server import (
    DONE,
    PAGE,
    Answer,
    PretendedServer,
    chunk,
    event,
    plain,
    pretended_server,
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

IDLE = "!document.querySelector('[aria-busy=true]') && document.getElementById('stop').disabled"
PIECES = """[...document.querySelectorAll('.answer')].map(answer => [answer.textContent,
    [...answer.querySelectorAll('.token')].map(token => [token.textContent, Number(token.dataset.draft)])])"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def the_server() -> Iterator[PretendedServer]:
    with pretended_server() as server:
        yield server


@pytest.fixture
def server(the_server: PretendedServer) -> PretendedServer:
    the_server.reset()
    return the_server


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Page:
    return browser.page()


@pytest.fixture
def page(tab: Page, server: PretendedServer) -> Iterator[Page]:
    tab.open(server.url)
    yield tab
    assert not tab.events("Runtime.exceptionThrown")


def write(page: Page, **settings: object) -> None:
    """settings: values of fields, by id."""
    for name, value in settings.items():
        kind = "checked" if isinstance(value, bool) else "value"
        page.evaluate(
            f"document.getElementById({json.dumps(name.replace('_', '-'))}).{kind} = {json.dumps(value)}"
        )
    page.evaluate("document.getElementById('write').click()")
    page.wait_for(IDLE)


def text(page: Page, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))


# ---- answers drawn at random

WORDS = [
    "the",
    " and",
    " earth",
    "\n",
    "\n    ",
    "    ",
    " ",
    ",",
    " <b>bold</b>",
    "&amp;",
    "<img src=x>",
    "return",
    "\t",
]
CUT = ["é", "日", "本", "👩🏽‍🚀", "ß"]  # characters whose bytes are tokens of their own


@dataclass(frozen=True)
class Drawn:
    """text: of the answer. tokens, drafts: of each token. whole: whether its text stands in the text."""

    text: str
    tokens: list[str]
    drafts: list[int]
    whole: list[bool]
    stream: list[bytes]

    @property
    def num_steps(self) -> int:
        return self.drafts.count(0) + (self.drafts[-1] != 0) - 1


def drawn_tokens(rng: random.Random) -> list[tuple[str, str]]:
    """For each token its own text, and what it adds to the answer's."""
    bytes_are = rng.choice(["\ufffd", "bytes:\\x{:02x}", ""])
    tokens: list[tuple[str, str]] = []
    for _ in range(rng.randint(1, 40)):
        kind = rng.random()
        if kind < 0.75:
            word = rng.choice(WORDS)
            tokens.append((word, word))
        elif kind < 0.9:
            character = rng.choice(CUT)
            tokens += [(bytes_are.format(byte), "") for byte in character.encode()]
            tokens[-1] = (tokens[-1][0], character)
        else:
            tokens.append(("<|endoftext|>", ""))
    return tokens


def drawn_answer(rng: random.Random, max_drafts: int) -> Drawn:
    tokens = drawn_tokens(rng)
    drafts = [0]
    while len(drafts) < len(tokens):
        drafts += [*range(1, rng.randint(0, max_drafts) + 1), 0]
    drafts = drafts[: len(tokens)]  # as behind a stop string, where a step may lack its end
    events, begin = [], 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or (drafts[end - 1] == 0 and rng.random() < 0.7):
            own, adds = zip(*tokens[begin:end])
            events.append(event(chunk("".join(adds), own, drafts[begin:end], first_id=begin)))
            begin = end
        if rng.random() < 0.1:
            events.append(b": still here\n\n")
    events.append(event(chunk("", reason=rng.choice(["length", "stop"]))))
    events.append(event({"choices": [], "usage": {"completion_tokens": len(tokens)}}))
    body = b"".join([*events, DONE])
    if rng.random() < 0.3:
        body = body.replace(b"\n", b"\r\n")
    if rng.random() < 0.5:  # characters of the text as themselves, so that a piece can end within one
        body = re.sub(rb"(\\u[0-9a-f]{4})+", lambda found: json.loads(b'"%b"' % found[0]).encode(), body)
    cuts = sorted(rng.sample(range(len(body)), min(8, len(body))))
    stream = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)])]
    whole = [bool(own) and own == adds for own, adds in tokens]
    return Drawn("".join(adds for _, adds in tokens), [own for own, _ in tokens], drafts, whole, stream)


def check_side(page: Page, at: int, drawn: Drawn) -> None:
    shown, pieces = page.evaluate(PIECES)[at]
    assert shown == drawn.text
    spaces_are_blank = [
        (token.lstrip(" ") or token) if re.match(r" \S", token) else token for token in drawn.tokens
    ]
    expected = [
        (token, min(draft, 4))
        for token, draft, whole in zip(spaces_are_blank, drawn.drafts, drawn.whole)
        if whole
    ]
    of_bytes = set("".join(CUT))
    assert [tuple(piece) for piece in pieces if not of_bytes & set(piece[0])] == expected
    side = f"#sides section:nth-child({at + 1})"
    assert text(page, f"{side} .tokens") == f"{len(drawn.tokens)} token{'s' * (len(drawn.tokens) != 1)}"
    assert text(page, f"{side} .steps") == str(drawn.num_steps)
    acceptance = text(page, f"{side} .acceptance")
    if drawn.num_steps == 0:
        assert acceptance == "–"
    else:
        assert float(acceptance) == pytest.approx((len(drawn.tokens) - 1) / drawn.num_steps, abs=0.0051)


def test_text_is_whole_and_each_token_shows_its_draft_position(page: Page, server: PretendedServer) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        drafted, alone = drawn_answer(rng, rng.choice([1, 3, 6])), drawn_answer(rng, 0)
        server.answer = lambda body, sides=(drafted, alone): Answer(sides["max_drafts" in body].stream)  # type: ignore[misc]
        write(page)
        assert page.evaluate("document.getElementById('problem').innerText") == "", seed
        check_side(page, 0, drafted)
        check_side(page, 1, alone)
        assert page.evaluate("document.images.length + document.querySelectorAll('.answer b').length") == 0


def test_text_that_comes_later_than_its_tokens_is_coloured_all_the_same(
    page: Page, server: PretendedServer
) -> None:
    tokens, drafts = ["In", " the", " begin", "ning"], [0, 1, 2, 0]
    for held in range(1, 12):  # characters held back, as where a stop string may begin
        chunks, given = [], 0
        for end in (1, 4):
            ready = max(given, len("".join(tokens[:end])) - held)
            begin = 0 if end == 1 else 1
            chunks.append(
                chunk("".join(tokens)[given:ready], tokens[begin:end], drafts[begin:end], first_id=begin)
            )
            given = ready
        chunks.append(chunk("".join(tokens)[given:], reason="stop"))
        body = b"".join(map(event, chunks)) + DONE
        server.answer = lambda _, body=body: Answer([body])  # type: ignore[misc]
        write(page)
        shown, pieces = page.evaluate(PIECES)[0]
        assert shown == "In the beginning"
        assert pieces == [["In", 0], ["the", 1], ["begin", 2], ["ning", 0]]


def test_text_that_its_tokens_exceed_is_shown_as_far_as_it_goes(page: Page, server: PretendedServer) -> None:
    server.answer = lambda body: Answer(
        [event(chunk("In the be", ["In", " the", " begin"], [0, 1, 0], "stop")), DONE]
    )
    write(page)
    assert page.evaluate(PIECES)[0] == ["In the be", [["In", 0], ["the", 1], ["be", 0]]]


def test_an_answer_may_come_byte_by_byte(page: Page, server: PretendedServer) -> None:
    body = event(chunk("E", ["E"], [0])).replace(b'"E"', '"日é"'.encode()) + DONE
    begin = body.index("日".encode()) - 1
    middle = [bytes([byte]) for byte in body[begin : begin + 8]]
    server.answer = lambda _: Answer([body[:begin], *middle, body[begin + 8 :]], pause=0.01)
    write(page)
    assert page.evaluate(PIECES)[0] == ["日é", [["日é", 0]]]


def test_speed_is_that_of_the_tokens_behind_the_first(page: Page, server: PretendedServer) -> None:
    first, last = chunk("", ["a"] * 200, [0] * 200), chunk("", ["b"] * 5, [0] * 5, "stop")
    server.answer = lambda body: Answer([b": not yet\n\n", event(first), event(last) + DONE], pause=0.2)
    write(page)
    assert int(text(page, ".first")) >= 150
    assert 0 < int(text(page, ".speed").replace(",", "")) <= 250, "5 tokens in 0.2 s, not 205"


@pytest.mark.parametrize(
    ("num_tokens", "seconds", "shown"),
    [(1, 25.0, "0.040"), (1, 1.0, "1.0"), (1, 0.77, "1.3"), (20, 1.0, "20"), (1000, 1.0, "1,000")],
)
def test_speed_has_two_digits_and_no_decimals_from_ten_on(
    page: Page, server: PretendedServer, num_tokens: int, seconds: float, shown: str
) -> None:
    last = chunk("b", ["b"] * num_tokens, [0] * num_tokens, "stop")
    server.answer = lambda body: Answer([event(chunk("a", ["a"], [0])), event(last) + DONE], pause=0.01)
    # of the request, of the first chunk, of the last one
    page.evaluate(f"window.times = [0, 0, {1000 * seconds}]; performance.now = () => times.shift()")
    write(page, compare=False)
    assert text(page, ".speed") == shown


def test_without_a_second_chunk_there_is_no_speed(page: Page, server: PretendedServer) -> None:
    server.answer = lambda body: Answer([event(chunk("a b", ["a", " b"], [0, 0], "stop")) + DONE])
    write(page)
    assert text(page, ".speed") == "–"


MODELS: dict[str, dict[str, Any]] = {
    "Model: small. Drafts: the model’s MTP layer, 3 per step": {
        "drafter": "mtp",
        "num_speculative_tokens": 3,
    },
    "Model: small. Drafts: n-gram lookup in the text so far, 5 per step": {
        "drafter": "ngram",
        "num_speculative_tokens": 5,
    },
    "Model: small. Drafts: my-own, 1 per step": {"drafter": "my-own", "num_speculative_tokens": 1},
    "Model: small. No drafts": {"drafter": None, "num_speculative_tokens": 0},
    "Model: small": {},
}


@pytest.mark.parametrize("words", MODELS)
def test_it_names_the_project_the_model_and_what_drafts(
    page: Page, server: PretendedServer, words: str
) -> None:
    server.models = Answer([json.dumps({"data": [{"id": "small"} | MODELS[words]]}).encode()])
    page.open(server.url)
    page.wait_for(f"document.getElementById('model').textContent === {json.dumps(words)}")
    assert text(page, "h1").startswith("mla-compile")


def test_the_legend_grows_with_the_drafts(page: Page, server: PretendedServer) -> None:
    for drafts, is_shown in [([0, 1, 2, 3], False), ([0, 1, 2, 3, 4], True)]:
        body = event(chunk("x" * len(drafts), ["x"] * len(drafts), drafts)) + DONE
        server.answer = lambda _, body=body: Answer([body])  # type: ignore[misc]
        write(page)
        assert page.evaluate("document.getElementById('later').checkVisibility()") == is_shown
        assert page.evaluate("document.querySelectorAll('.share')[0].children.length") == len(drafts)


# ---- what is asked, and what becomes of it


def test_both_sides_ask_the_same_but_for_their_drafts(page: Page, server: PretendedServer) -> None:
    write(page, prompt="Say “hé”\n", max_tokens=7, temperature=0.25, seed=11)
    common = {
        "model": "small",
        "prompt": "Say “hé”\n",
        "max_tokens": 7,
        "temperature": 0.25,
        "seed": 11,
        "stream": True,
        "stream_options": {"include_usage": True},
        "draft_positions": True,
    }
    bodies = sorted((body for body, _ in server.asked), key=lambda body: "max_drafts" in body)
    assert bodies == [common, {**common, "max_drafts": 0}]
    assert (
        text(page, "#status")
        == "Both generated the same 2 tokens: in 1 step with drafts, in 1 without. Seed 11."
    )

    server.asked.clear()
    write(page, max_drafts=2, seed="", compare=False)
    ((body, headers),) = server.asked
    assert body["max_drafts"] == 2 and 0 <= body["seed"] < 2**32
    assert "Authorization" not in headers
    assert text(page, "#status") == f"Done: 2 tokens in 1 step. Seed {body['seed']}."


def test_texts_that_differ_are_reported(page: Page, server: PretendedServer) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        third = chunk(" c", [" c"], [0], first_id=2 if "max_drafts" in body else 9)
        return Answer([event(chunk(" a b", [" a", " b"], [0, 0])), event(third), DONE])

    server.answer = answer
    write(page)
    assert text(page, "#status").startswith("The two texts differ from token 3:")
    server.answer = lambda body: Answer([plain([" a", " b"] if "max_drafts" in body else [" a", " b", " c"])])
    write(page)
    assert text(page, "#status").startswith("The two texts differ from token 3:")


def test_of_a_long_prompt_the_end_is_shown(page: Page, server: PretendedServer) -> None:
    prompt = "👩" * 200 + "é" * 200
    write(page, prompt=prompt)
    assert text(page, ".prompt") == "… " + prompt[-300:]
    assert {body["prompt"] for body, _ in server.asked} == {prompt}


def test_each_step_is_listed_in_words_too(page: Page, server: PretendedServer) -> None:
    server.answer = lambda body: Answer(
        [
            event(chunk("In the be\n", ["In", " the", " be", "\n"], [0, 1, 2, 0])),
            event(chunk("", reason="stop")),
            DONE,
        ]
    )
    write(page, compare=False)
    assert text(page, ".ending") == "The model ended the text."
    page.evaluate("document.querySelector('details').open = true")
    rows = (
        "[...document.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    page.wait_for(f"({rows}).length === 2")
    assert page.evaluate(rows) == [["prompt", "", '"In"'], ["1", '" the" " be"', r'"\n"']]


def test_a_step_is_listed_when_it_is_complete(page: Page, server: PretendedServer) -> None:
    server.answer = lambda body: Answer([event(chunk(" a b", [" a", " b"], [0, 1]))], held=True)
    page.evaluate("document.getElementById('write').click()")
    page.wait_for("document.querySelector('.answer')?.textContent === ' a b'")
    page.evaluate("document.querySelector('details').open = true")
    page.wait_for("document.querySelector('tbody').rows.length === 1")
    page.press("Escape")
    page.wait_for(f"{IDLE} && document.querySelector('tbody').rows.length === 2")


@pytest.mark.parametrize("by", ["button", "Escape"])
def test_stopping_disconnects_and_keeps_the_text_so_far(page: Page, server: PretendedServer, by: str) -> None:
    server.answer = lambda body: Answer([event(chunk(" a b", [" a", " b"], [0, 0]))], held=True)
    page.evaluate("document.getElementById('write').click()")
    page.wait_for(f"({PIECES}).filter(([shown]) => shown === ' a b').length === 2")
    assert text(page, "#status") == "Writing …"
    page.evaluate("document.getElementById('write').click()")  # nothing, while it writes
    page.evaluate("document.getElementById('stop').focus()")
    page.press("Escape" if by == "Escape" else "Enter")
    page.wait_for(IDLE)
    assert [server.num_vanished.acquire(timeout=10) for _ in range(2)] == [True, True]
    assert len(server.asked) == 2
    assert text(page, ".ending") == "Stopped." and page.evaluate(PIECES)[0][0] == " a b"
    assert text(page, "#status") == "Stopped: 2 tokens in 1 step. Seed 1."
    assert page.evaluate("document.activeElement.id") == "write", "a disabled button cannot keep the focus"
    assert page.evaluate("document.getElementById('problem').hidden"), "to stop is no failure"


def failed(status: int, message: str, **headers: str) -> Answer:
    return Answer([json.dumps({"error": {"message": message}}).encode()], status, headers)


BEGUN = event(chunk(" a", [" a"], [0]))
FAILURES = {
    "a bad value": (
        failed(400, "max_tokens: too many"),
        "The server rejected the request: max_tokens: too many",
    ),
    "a full queue": (
        failed(429, "full", **{"Retry-After": "1"}),
        "The server is busy. Try again in 1 second.",
    ),
    "a full queue, no time": (failed(429, "full"), "The server is busy. Try again later."),
    "not ready": (failed(503, "warming up"), "The server cannot answer now: warming up"),
    "a failed engine": (failed(500, "the engine ended"), "The server failed: the engine ended"),
    "a proxy": (Answer([b"<html>"], 502), "The server failed: status 502"),
    "an error without words": (
        Answer([b'{"error": {}}'], 400),
        "The server rejected the request: status 400",
    ),
    "a failure on the way": (
        Answer([BEGUN, event({"error": {"message": "the engine ended"}}), DONE]),
        "The server ended the answer: the engine ended",
    ),
    "an answer without end": (Answer([BEGUN]), "The connection closed before the answer ended."),
    "a broken connection": (Answer([BEGUN], headers={"Content-Length": "9999"}), "The connection was lost."),
    "no JSON": (Answer([b"data: {\n\n"]), "Cannot read the server’s response: "),
    "another server": (Answer([event({"object": "x"})]), "Cannot read the server’s response: "),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_shown_in_words(page: Page, server: PretendedServer, name: str) -> None:
    answer, words = FAILURES[name]
    server.answer = lambda body: answer
    write(page)
    assert text(page, "#problem").startswith(words)
    assert text(page, "#status") == ""
    server.answer = lambda body: Answer([plain([" fine"])])
    write(page)
    assert page.evaluate("document.getElementById('problem').hidden"), "the next answer clears it"
    assert page.evaluate(PIECES)[0][0] == " fine"


def test_one_sides_failure_ends_the_other(page: Page, server: PretendedServer) -> None:
    server.answer = lambda body: failed(400, "no") if "max_drafts" in body else Answer([BEGUN], held=True)
    write(page)
    page.wait_for("!document.querySelector('[aria-busy=true]')")
    assert server.num_vanished.acquire(timeout=10)
    assert text(page, "#problem") == "The server rejected the request: no"


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"data": []}'])
def test_a_server_that_names_no_model_is_reported(page: Page, server: PretendedServer, body: bytes) -> None:
    server.models = Answer([body])
    page.open(server.url)
    page.wait_for("!document.getElementById('problem').hidden")
    assert text(page, "#problem").startswith("Cannot read the server’s response: ")


def test_a_server_that_is_gone_is_reported(page: Page) -> None:
    with pretended_server() as server:
        page.open(server.url)
        page.wait_for("document.getElementById('model').textContent === 'Model: small'")
    write(page)
    assert text(page, "#problem") == "The server does not respond. Is it running?"


def test_a_key_is_asked_for_sent_and_kept_nowhere(page: Page, server: PretendedServer) -> None:
    server.key = "sk-right"
    page.open(server.url)
    page.wait_for("document.activeElement.id === 'key'")
    assert text(page, "#problem") == "The server requires an API key."
    for wrong, words in [
        ("sk-wrong", "The server rejected this API key: wrong key"),
        ("ключ", "The API key has invalid characters."),
    ]:
        write(page, key=wrong)
        assert text(page, "#problem") == words and not server.asked
    page.evaluate("document.getElementById('key').value = ''; document.getElementById('key').focus()")
    page.type(" sk-right ")
    page.press("Enter")
    page.wait_for(f"{IDLE} && document.querySelectorAll('.answer').length === 2")
    assert {headers["Authorization"] for _, headers in server.asked} == {"Bearer sk-right"}
    assert page.evaluate(
        "[localStorage.length, sessionStorage.length, document.cookie, location.search]"
    ) == [0, 0, "", ""]


# ---- accessibility and layout


def test_it_uses_no_other_server(page: Page, server: PretendedServer) -> None:
    write(page)
    asked = {event["request"]["url"] for event in page.events("Network.requestWillBeSent")}
    assert {url for url in asked if not url.startswith("data:")} == {
        server.url, f"{server.url}v1/models", f"{server.url}v1/completions"
    }  # fmt: skip
    assert not page.events("Log.entryAdded")
    blocked = """new Promise(done => {
        document.addEventListener('securitypolicyviolation', event => done(event.effectiveDirective));
        fetch('http://127.0.0.1:1/').catch(() => {}); })"""
    assert page.evaluate(blocked) == "connect-src"
    addresses = set(re.findall(r"https?://[^'\"\s]*", PAGE.read_text(encoding="utf-8")))
    assert addresses == {"http://www.w3.org/2000/svg"}, "one file, no network"


def test_the_keyboard_reaches_everything_and_shows_where_it_is(page: Page, server: PretendedServer) -> None:
    write(page)
    page.evaluate("document.activeElement.blur(); document.getElementById('prompt').focus()")
    where = "document.activeElement.id || document.activeElement.textContent"
    has_outline = "(style => style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2)"
    names = [
        "prompt",
        "prose",
        "Python",
        "max-tokens",
        "temperature",
        "seed",
        "max-drafts",
        "compare",
        "write",
    ]
    for name in [*names, "Step by step", "Step by step"]:
        assert page.evaluate(where) == name
        assert page.evaluate(f"{has_outline}(getComputedStyle(document.activeElement))"), name
        page.press("Tab")
    page.evaluate("document.getElementById('seed').focus()")
    page.press("Tab", SHIFT)
    assert page.evaluate(where) == "temperature"
    server.asked.clear()
    page.evaluate("document.getElementById('prompt').focus(); document.getElementById('prompt').select()")
    page.type("typed")
    page.press("Enter", CONTROL)
    page.wait_for(f"{IDLE} && document.querySelector('.prompt').textContent === 'typed'")
    assert len(server.asked) == 2


def test_a_screen_reader_hears_names_and_news(page: Page, server: PretendedServer) -> None:
    write(page)
    page.evaluate("document.getElementById('key-field').hidden = false")
    nodes = [node for node in page.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    heard = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes]
    for expected in [
        ("textbox", "Prompt"),
        ("textbox", "API key"),
        ("button", "prose"),
        ("spinbutton", "Tokens"),
        ("spinbutton", "Temperature"),
        ("spinbutton", "Seed"),
        ("spinbutton", "Maximum drafts"),
        ("checkbox", "Compare with no drafts"),
        ("button", "Write"),
        ("button", "Stop"),
        ("heading", "mla-compile: speculation, live"),
        ("region", "With drafts"),
        ("region", "Without"),
        ("list", "Where a token came from"),
    ]:
        assert expected in heard
    assert all(
        name for role, name in heard if role in {"button", "textbox", "spinbutton", "checkbox", "region"}
    )
    (status,) = (node for node in nodes if node["role"]["value"] == "status")
    assert {"name": "live", "value": {"type": "token", "value": "polite"}} in status["properties"]
    assert not page.evaluate(
        "document.querySelector('.text').closest('[aria-live], [role=status], [role=alert]')"
    )


# The contrast of every text with what is behind it, of placeholders, and of what a control is known by.
CONTRASTS = """(() => {
    const linear = v => v <= 10.31475 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) + 0.05;
    const parse = colour => colour.match(/[\\d.]+/g).map(Number);
    const behind = node => { for (; node; node = node.parentElement) {
        const colour = parse(getComputedStyle(node).backgroundColor);
        if (colour.length === 3 || colour[3] === 1) return colour; } };
    const found = [];
    const take = (name, least, colour, node) => {
        const [a, b] = [light(parse(colour)), light(behind(node))];
        found.push([name, least, Math.max(a / b, b / a)]);
    };
    for (const node of document.body.querySelectorAll('*')) {
        const style = getComputedStyle(node);
        if (!node.checkVisibility() || node.closest('script, template')) continue;
        if ([...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()) || node.value)
            take(node.id || node.className || node.tagName, 4.5, style.color, node);
        if (node.placeholder)
            take('placeholder', 4.5, getComputedStyle(node, '::placeholder').color, node);
        if (node.matches('input, textarea, button:enabled:not(.plain)') && !node.matches('[type=submit]'))
            take(node.id, 3, style.borderTopColor, node.parentElement);
        if (node.matches('.token:not([data-draft="0"])')) {
            const [, line] = /gradient\\(to top, (rgb[^)]*\\))/.exec(style.backgroundImage);
            take('lines ' + node.dataset.draft, 3, line, node);
        }
    }
    return found;
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_lines_and_edges_have_contrast(page: Page, server: PretendedServer, scheme: str) -> None:
    tokens, drafts = [" a", " b", " c", " d", " e", " f"], [0, 1, 2, 3, 4, 0]
    server.answer = lambda body: Answer([event(chunk("".join(tokens), tokens, drafts)), DONE])
    page.open(server.url, prefers_color_scheme=scheme)
    write(page)
    page.evaluate("document.querySelectorAll('[hidden]').forEach(node => node.hidden = false)")
    page.evaluate("document.getElementById('problem').textContent = 'wrong'")
    page.evaluate("document.querySelectorAll('details').forEach(node => node.open = true)")
    found = page.evaluate(CONTRASTS)
    names = {name for name, _, _ in found}
    assert {
        "problem",
        "status",
        "write",
        "placeholder",
        "token",
        "TD",
        *(f"lines {n}" for n in range(1, 5)),
    } <= names
    assert not [(name, least, round(has, 2)) for name, least, has in found if has < least]
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(24, 23, 21)"
    assert dark == (scheme == "dark")


def test_drafts_are_distinguishable_without_colour(page: Page) -> None:
    page.evaluate("document.querySelectorAll('[hidden]').forEach(node => node.hidden = false)")
    legend = "[...document.querySelectorAll('.legend .token')]"
    lines = "[style.backgroundSize, style.backgroundImage.match(/[\\d.]+px/g)].join()"
    looks = page.evaluate(f"{legend}.map(node => getComputedStyle(node)).map(style => {lines})")
    assert len(looks) == len(set(looks)) == 4
    page.call("Emulation.setEmulatedMedia", features=[{"name": "forced-colors", "value": "active"}])
    looks = page.evaluate(f"{legend}.map(node => getComputedStyle(node).textDecorationStyle)")
    assert len(set(looks)) == 4


@pytest.mark.parametrize("width", [320, 360, 768])
def test_nothing_runs_over_the_edge(page: Page, server: PretendedServer, width: int) -> None:
    word = "x" * 300
    server.models = Answer([json.dumps({"data": [{"id": word}]}).encode()])
    server.answer = lambda body: Answer([plain([word, "y" * 200])])
    page.open(server.url, width=width, height=640)
    write(page, prompt=word)
    page.evaluate("document.querySelectorAll('details').forEach(node => node.open = true)")
    page.evaluate(
        f"document.querySelectorAll('[hidden]').forEach(node => node.hidden = false); showProblem('{word}')"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width


PARTS = "h1, #model, header > p, #prompt, .settings, #status, .legend, #sides, footer"
BOXES = (
    f"[...document.querySelectorAll('{PARTS}')]"
    + """
    .map(node => { const box = node.getBoundingClientRect();
        return [node.id || node.className || node.tagName, box.left, box.top, box.right, box.bottom]; })"""
)


def test_at_every_width_each_part_has_a_place_of_its_own(page: Page, server: PretendedServer) -> None:
    rng = random.Random(0)
    for width in [1600, 1200, 800, 400, 320, *(rng.randint(320, 1900) for _ in range(8))]:
        drafter = rng.choice([{}, {"drafter": "ngram", "num_speculative_tokens": 9}])
        model = {"id": "m" * rng.choice([1, 20, 80])} | drafter
        server.models = Answer([json.dumps({"data": [model]}).encode()])
        page.open(server.url, width=width)
        write(page, prompt="word " * rng.choice([1, 50]), compare=rng.random() < 0.5)
        boxes = page.evaluate(BOXES)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        title, name, explanation, *parts = boxes
        assert explanation[2] >= max(title[4], name[4]), f"the explanation has lines of its own at {width}"
        assert explanation[1] == title[1] and explanation[3] <= width
        for one, other in zip([explanation, *parts], parts):
            assert other[2] >= one[4], f"{other[0]} is below {one[0]} at {width}"
        is_beside = name[2] < title[4] and name[4] > title[2]
        assert name[1] >= title[3] if is_beside else name[2] >= title[4]


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_nothing_moves_with_reduced_motion(page: Page, server: PretendedServer, motion: str) -> None:
    server.answer = lambda body: Answer([BEGUN], held=True)
    page.open(server.url, prefers_reduced_motion=motion)
    page.evaluate("document.getElementById('write').click()")
    page.wait_for(f"({PIECES}).filter(([shown]) => shown === ' a').length === 2")
    assert page.evaluate("document.getAnimations().length > 0") == (motion != "reduce")
