"""Checks of `Host` and `Origin`: drawn at random, and compared with what a browser may read."""

import asyncio
import json
import logging
import random
import re
from typing import Any

import pytest
from starlette.applications import Starlette

from benchmarks.http_client import metrics
from mla_compile.errors import MLAError
from mla_compile.serving.messages import Update
from mla_compile.serving.origins import is_loopback, listening_at, warn_if_open
from mla_compile.serving.server import _Printable
from mla_compile.serving.settings import ServerSettings
from tests.serving.browser import CHROMIUM, chromium
from tests.serving.pretended_server import pretended_server
from tests.serving.servers import served
from tests.serving.test_app import BODY, app_of, ask

NAMES = ["localhost", "127.0.0.1", "127.8.9.250", "[::1]", "LocalHost"]
OTHERS = [
    *(
        "evil.example",
        "127.evil.example",
        "localhost.evil.example",
        "xlocalhost",
        "10.0.0.1",
        "0.0.0.0",
        "[::2]",
    ),
    *(
        "",
        "localhost@evil.example",
        "localhost/",
        "127.0.0.1.",
        "[::1",
        "::1",
        "evil.example:80:localhost",
        "*",
    ),
    "localhost, evil.example",
]


def asked(
    app: Starlette, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], Any]:
    given = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    status, answered, content = asyncio.run(ask(app, method, path, body, given))
    is_json = answered.get("content-type") == "application/json"
    return status, answered, json.loads(content) if is_json else content


def test_only_this_machine_is_loopback() -> None:
    rng = random.Random(0)
    for _ in range(200):
        address = ".".join(str(rng.choice([0, 1, 127, 128, rng.randrange(256)])) for _ in range(4))
        assert is_loopback(address) == address.startswith("127.")
    assert is_loopback("::1") and is_loopback("localhost")
    assert not any(map(is_loopback, ["::", "0.0.0.0", "127.evil.example", "127", "", "example.com"]))


@pytest.mark.parametrize(("host", "keys", "warns"), [
    ("0.0.0.0", (), True), ("192.0.2.1", (), True), ("0.0.0.0", ("secret",), False), ("127.0.0.1", (), False),
    ("localhost", (), False),
])  # fmt: skip
def test_a_server_that_other_machines_reach_without_a_key_says_so(
    host: str, keys: tuple[str, ...], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_open(host, ServerSettings(api_keys=keys))
    assert [f"no API key: whatever reaches {host}" in record.message for record in caplog.records] == [
        True
    ] * warns


def test_a_server_on_this_machine_answers_to_its_names_only() -> None:
    settings = listening_at("127.0.0.1", ServerSettings(allowed_hosts=("api.example", "10.1.2.3")))
    app, _ = app_of(allowed_hosts=settings.allowed_hosts)
    rng = random.Random(0)
    for _ in range(150):
        is_good = rng.random() < 0.5
        host = rng.choice([*NAMES, "api.example", "API.example", "10.1.2.3"] if is_good else OTHERS)
        host += rng.choice(
            ["", ":80", f":{rng.randrange(65536)}", ":"] if is_good or ":" not in host else [""]
        )
        path = rng.choice(["/", "/v1/models", "/metrics", "/nowhere"])
        status, _, answer = asked(app, rng.choice(["GET", "POST", "OPTIONS"]), path, host=host)
        assert (status != 421) == is_good, host
        if not is_good:
            assert answer["error"]["message"].startswith("Host: expected a name in --allowed-hosts, got ")
        assert asked(app, "GET", rng.choice(["/health", "/ready"]), host=host)[0] == 200
    assert asked(app, "GET", "/v1/models")[0] == 421, "without any"


@pytest.mark.parametrize("listens_at", ["0.0.0.0", "::", "192.168.0.7", "name.example"])
def test_a_server_for_others_answers_to_any_name_unless_names_are_given(listens_at: str) -> None:
    settings = listening_at(listens_at, ServerSettings())
    assert settings.allowed_hosts == ()
    app, _ = app_of(allowed_hosts=settings.allowed_hosts)
    assert all(asked(app, "GET", "/v1/models", host=host)[0] == 200 for host in [*NAMES, *OTHERS])
    app, _ = app_of(allowed_hosts=("api.example",))
    assert asked(app, "GET", "/v1/models", host="localhost")[0] == 421
    app, _ = app_of(allowed_hosts=("*",))
    assert asked(app, "GET", "/v1/models", host="localhost")[0] == 200


PAGES = ["https://chat.example", "http://chat.example:8080", "chrome-extension://abcdef"]
FOREIGN = [
    *(
        "null",
        "https://evil.example",
        "http://chat.example",
        "https://chat.example.evil.example",
        "https://chat.example/",
    ),
    *("", "https://chat.example:443", "HTTPS://CHAT.EXAMPLE", "http://localhost:8001", "file://", "*"),
    "ftp://localhost:8000",
]


def test_pages_of_others_are_refused_whatever_they_ask_and_allowed_ones_can_read_each_answer() -> None:
    def fails(answer: Any) -> None:
        answer.put(0, Update(finish_reason="error", error="the engine failed"), 0.0)

    app, server = app_of(fails, allowed_origins=tuple(PAGES), api_keys=("key",))
    good, engine = {"authorization": "Bearer key"}, server._client
    body = json.dumps(BODY).encode()
    requests: list[tuple[int, str, str, bytes, dict[str, str]]] = [
        (200, "GET", "/v1/models", b"", good),
        (200, "GET", "/metrics", b"", {}),
        (401, "POST", "/v1/completions", body, {}),
        (400, "POST", "/v1/completions", b"{", good | {"content-type": "text/plain"}),
        (500, "POST", "/v1/completions", body, good),
        (404, "GET", "/nowhere", b"", good),
        (405, "DELETE", "/v1/models", b"", good),
        (429, "POST", "/v1/completions", body, good),
        (500, "POST", "/tokenize", json.dumps({"prompt": "a"}).encode(), good),
    ]
    rng = random.Random(0)
    for _ in range(300):
        at = rng.randrange(len(requests))
        expected, method, path, body, headers = requests[at]
        # The queue cannot be filled without an engine.
        engine._has_places = lambda *_, expected=expected: expected != 429  # type: ignore[method-assign]
        kind = rng.choice(["own", "allowed", "foreign", "none"])
        own = rng.choice(["http://localhost:8000", "https://localhost:8000"])
        origin = {"own": own, "allowed": rng.choice(PAGES), "foreign": rng.choice(FOREIGN), "none": None}[
            kind
        ]
        given = headers | {"host": "localhost:8000"} | ({} if origin is None else {"origin": origin})
        if path == "/tokenize":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("mla_compile.serving.app.tokenize_object", lambda *_: 1 / 0)
                status, answered, answer = asked(app, method, path, body, **given)
        else:
            status, answered, answer = asked(app, method, path, body, **given)
        assert status == (403 if kind == "foreign" else expected), (at, origin, answer)
        assert answered.get("access-control-allow-origin") == (origin if kind == "allowed" else None)
        if kind == "foreign":
            assert "Origin: expected one of --allowed-origins, got " in answer["error"]["message"]
        elif kind == "allowed":
            assert "Origin" in answered["vary"]
            assert "retry-after" not in answered or answered["access-control-expose-headers"] == "Retry-After"


def test_a_browser_that_asks_first_is_answered() -> None:
    app, _ = app_of(allowed_origins=tuple(PAGES), api_keys=("key",))
    asks = {
        "access_control_request_method": "POST",
        "access_control_request_headers": "authorization, content-type, x-stainless-os",
        "access_control_request_private_network": "true",
    }
    for origin in [*PAGES, *FOREIGN]:
        status, answered, _ = asked(app, "OPTIONS", "/v1/completions", origin=origin, **asks)
        assert status == (200 if origin in PAGES else 403)
        if origin in PAGES:
            assert answered["access-control-allow-origin"] == origin
            assert "x-stainless-os" in answered["access-control-allow-headers"]
            assert "POST" in answered["access-control-allow-methods"]
            assert "access-control-allow-credentials" not in answered
    app, _ = app_of()
    assert asked(app, "OPTIONS", "/v1/completions", origin=PAGES[0], **asks)[0] == 403


def test_any_page_may_be_allowed_but_none_without_an_origin() -> None:
    app, _ = app_of(allowed_origins=("*",))
    assert (
        asked(app, "GET", "/v1/models", origin="https://any.example")[1]["access-control-allow-origin"] == "*"
    )
    assert asked(app, "GET", "/v1/models", origin="null")[0] == 403


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("allowed_hosts", host) for host in ["", "a b", "a:80", "http://a", "[::1]", "A", "a/"]],
        *[
            ("allowed_origins", origin)
            for origin in ["", "null", "a.example", "https://a/", "https://A", "a\n"]
        ],
    ],
)
def test_a_name_or_page_that_never_comes_is_a_mistake(name: str, value: str) -> None:
    with pytest.raises(MLAError, match=f"^{name}: expected .*, got {re.escape(repr(value))}"):
        ServerSettings(**{name: (value,)})


def test_a_model_name_stands_in_the_log_as_it_is_or_is_refused() -> None:
    rng = random.Random(0)
    for _ in range(300):
        name = "".join(
            chr(rng.choice([rng.randrange(0xA0), rng.randrange(0x2000, 0x2070), 65])) for _ in range(3)
        )
        if name.isprintable():
            assert ServerSettings(served_model_name=name).served_model_name == name
        else:
            with pytest.raises(MLAError, match=r"^served_model_name: expected printable") as caught:
                ServerSettings(served_model_name=name)
            assert str(caught.value).isprintable()


def test_a_record_of_the_log_is_one_line_whatever_is_in_it() -> None:
    rng = random.Random(0)
    formatter = _Printable("mla-compile: %(message)s")
    for _ in range(300):
        text = "".join(
            chr(rng.choice([10, 13, 27, 0, 0x85, 0x2028, 0xD800, 0x202E, 65, 0xE9])) for _ in range(8)
        )
        record = logging.LogRecord("x", logging.ERROR, "", 0, "failed: %s", (text,), None)
        line = formatter.format(record)
        assert line.isprintable() and line.startswith("mla-compile: failed: ")
        try:
            raise ValueError(text)
        except ValueError as error:
            record.exc_info = (type(error), error, error.__traceback__)
        first, *others = formatter.format(record).split("\n")
        assert first == line and all(each.isprintable() and each.startswith("  ") for each in others)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_may_use_the_servers_page_and_an_allowed_one_and_no_other() -> None:
    """`fetch` gives the status of what the page may read, and raises for all else."""
    answer = """fetch('%s/v1/completions', {method: 'POST', %s body: '{"model": "shipped", "prompt": "a"}'})
        .then(async answer => [answer.status, (await answer.json()).error?.message], error => error.name)"""
    as_text, with_key = "", "headers: {'Content-Type': 'application/json', Authorization: 'Bearer key'},"
    with pretended_server() as allowed, pretended_server() as other, chromium() as browser:
        origin = allowed.url.rstrip("/")
        with served("--allowed-origins", origin, MLA_COMPILE_API_KEY="key") as server:
            url, page = server.url(), browser.page()
            page.open(f"{url}/")
            page.wait_for("document.activeElement.id === 'key'")
            page.type("key")
            page.press("Enter")
            page.wait_for("/Seed/.test(document.getElementById('status').textContent)", timeout=60)
            page.open(f"{origin}/a-page")
            assert page.evaluate(answer % (url, as_text)) == [401, "the API key is missing or wrong"]
            assert page.evaluate(answer % (url, with_key))[0] == 200
            for place in (f"{other.url}a-page", "data:text/html,a"):
                page.open(place)
                assert page.evaluate(answer % (url, as_text)) == "TypeError"
                assert page.evaluate(answer % (url, with_key)) == "TypeError"
                # A form, or what reads no answer, needs no leave of the server before it sends.
                blind = answer.partition(".then")[0] % (url, "mode: 'no-cors',")
                page.evaluate(blind + ".then(() => {}, () => {})")
            text = asyncio.run(metrics(url))
    statuses = {name: value for name, value in text.items() if name.startswith("mla_requests_total")}
    assert statuses['mla_requests_total{endpoint="/v1/completions",status="200"}'] == 3, (
        "the page's two, and one"
    )
    assert statuses['mla_requests_total{endpoint="/v1/completions",status="401"}'] == 1, (
        "others' never came so far"
    )
