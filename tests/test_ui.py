"""The page at /ui: in a real Chromium, on a real admin port beside a real server and engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from browser import Browser, Tab
from kvboost.metrics import Metrics, by_source
from kvboost.server.admin import make_admin_app
from kvboost.server.tenants import Caller
from kvboost.server.ui import SCRIPTS, make_page
from kvboost.shadow import MIN_CHECKS
from kvboost.tokenmap import MEANING, token_texts
from kvboost.types import Kind, Segment
from server_run import eventually, open_service, serving, stories
from ui_site import (
    CONTRAST,
    HOSTILE,
    KINDS,
    LONG_PROMPT,
    MIXED,
    OTHER,
    PLAIN,
    STOPS,
    STORY,
    TOKEN,
    Site,
    amount,
    apps,
    assert_quiet,
    drawn,
    rows,
    signed_in,
    tiles,
    x_ray,
)


@pytest.fixture(scope="module")
def site(shared_data: Path) -> Iterator[Site]:
    with stories(shared_data, **PLAIN) as kv, open_service(kv) as service:
        api, admin = apps(kv, service)
        session = api.state.backend.namespaces.session(Caller(), None, None)
        with serving(api) as url, serving(admin) as admin_url:
            made = Site(kv, url, admin_url, session)
            for number, text in enumerate((STORY + OTHER, MIXED, MIXED, "A cat.")):
                made.complete(text, **{"x-request-id": f"r{number}"})
            eventually(lambda: len(made.ask("/admin/requests")["requests"]) == 4)
            yield made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


# --- what is served ---------------------------------------------------------------------------------------------------


@pytest.fixture
def admin(site: Site) -> TestClient:
    return TestClient(make_admin_app(site.kv, Metrics(site.kv, model="m", process=False), token=TOKEN))


def test_the_page_needs_no_token_and_nothing_else_is_told_without_it(admin: TestClient) -> None:
    assert admin.get("/ui").status_code == 200
    for method, path in (("POST", "/ui"), ("HEAD", "/ui"), ("GET", "/ui/"), ("GET", "/ui/x"), ("GET", "/UI")):
        assert admin.request(method, path, follow_redirects=False).status_code == 401, (method, path)
    assert admin.get("/admin/overview").status_code == 401
    assert admin.request("GET", "/ui", content=iter([b"x"])).status_code == 411, "bodies are limited here too"


def test_the_page_is_one_file_that_may_do_little(admin: TestClient) -> None:
    answer = admin.get("/ui")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy["script-src"])
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy["style-src"])
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"
    page = answer.text
    assert TOKEN not in page
    assert re.findall(r"(?:src|href)=['\"](?!data:|#)", page) == []
    assert set(re.findall(r"https?://[^'\"\s]+", page)) <= {"http://www.w3.org/2000/svg"}, "a name, not a place"
    assert page.count("</script>") == page.count("</style>") == 1
    assert all(meaning in page for meaning in MEANING.values()), "kinds are explained as everywhere else"


def test_an_open_port_is_reached_under_its_own_name_only(site: Site) -> None:
    app = make_admin_app(site.kv, Metrics(site.kv, model="m", process=False), token=None, without_token=True)
    client = TestClient(app)
    assert client.get("/ui", headers={"Host": "localhost:1"}).status_code == 200
    assert client.get("/ui", headers={"Host": "evil.example"}).status_code == 401


def test_no_script_of_the_page_makes_markup_of_text() -> None:
    page = make_page(token_needed=True).body.decode()
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "localStorage",
        "Function(",
    ):
        assert sink not in page, sink
    assert len(SCRIPTS) == 4


def test_a_pasted_prompt_is_planned_as_a_request_without_a_key_would_be(site: Site) -> None:
    bare = make_admin_app(site.kv, Metrics(site.kv, model="m", process=False), token="t")
    nobody = TestClient(bare, headers={"Authorization": "Bearer t"})
    body = {"text": STORY[:60] + "Then. " + OTHER}
    assert nobody.post("/admin/xray", json=body).json()["counts"]["moved"] == 0, "a session of its own"
    assert nobody.post("/admin/xray", json={**body, "session": site.session}).json()["counts"]["moved"] > 0
    served = httpx.post(
        f"{site.admin_url}/admin/xray", json=body, headers={"Authorization": f"Bearer {TOKEN}".encode()}, timeout=60
    )
    assert served.json()["counts"]["moved"] > 0


# --- the overview -----------------------------------------------------------------------------------------------------


def test_percentiles_are_those_of_the_requests_themselves(site: Site) -> None:
    took = [r["ttft_s"] for r in site.ask("/admin/requests")["requests"]]
    recent = site.ask("/admin/overview")["recent"]
    assert recent["requests"] == len(recent["points"]) == len(took)
    assert recent["ttft_p50_s"] == pytest.approx(np.quantile(took, 0.5))
    assert recent["ttft_p95_s"] == pytest.approx(np.quantile(took, 0.95))


def test_the_overview_shows_what_the_engine_has(browser: Browser, site: Site) -> None:
    tab = signed_in(browser, site)
    site.kv.stats.count_fallback(HOSTILE)
    tab.wait("tick().then(() => $('fallbacks').innerText.includes('onerror'))")
    stats, told = site.kv.stats.snapshot(), site.ask("/admin/overview")
    everything = by_source(stats.tokens)
    assert all(everything.values()), "the requests above have tokens of every kind"
    recent = told["recent"]["tokens"]
    assert {k: [c[0], c[2]] for k, c in rows(tab, "sources").items()} == {
        kind: [f"{recent[kind]:,}", f"{everything[kind]:,}"] for kind in KINDS
    }
    hits = {("moved, epic" if k == "epic" else k): f"{n:,}" for k, n in stats.chunk_hits.items()}
    assert {k: c[0] for k, c in rows(tab, "served").items()} == hits
    assert rows(tab, "served")["moved, epic"][1] == f"{everything['repaired']:,}"
    assert rows(tab, "fallbacks") == {reason: [f"{n:,}"] for reason, n in stats.fallbacks.items()}
    memory = site.kv.store.stats()
    assert rows(tab, "tiers")["memory"][3:5] == [f"{memory.entries:,}", f"{memory.pinned_entries:,}"]
    assert amount(rows(tab, "tiers")["memory"][1]) == pytest.approx(memory.bytes_used, rel=0.01)
    assert amount(rows(tab, "tiers")["memory"][2]) == pytest.approx(memory.bytes_limit, rel=0.01)
    finished = {f"ended: {why}": [f"{n:,}"] for why, n in told["service"]["finished"].items() if n}
    assert finished.items() <= rows(tab, "outcomes").items()
    assert rows(tab, "settings")["recompute_strategy"] == ["epic", "flag"]
    shown = tiles(tab)
    assert amount(shown["First token, median"][0]) == pytest.approx(told["recent"]["ttft_p50_s"], rel=0.01)
    assert amount(shown["First token, p95"][0]) == pytest.approx(told["recent"]["ttft_p95_s"], rel=0.01)
    reused = sum(recent[k] for k in KINDS[:3]) / sum(recent.values())
    assert shown["From the cache"][0] == f"{100 * reused:.1f} %"
    assert tab.js("document.querySelectorAll('#ttft circle').length") == told["recent"]["requests"]
    assert tab.js("document.querySelectorAll('#fallbacks img, #fallbacks script, #fallbacks b').length") == 0
    assert_quiet(tab, site)


def test_evictions_are_told_by_reason_and_tier(browser: Browser, shared_data: Path, tmp_path: Path) -> None:
    with stories(shared_data, **PLAIN, disk_directory=str(tmp_path)) as kv, open_service(kv) as service:
        _, admin = apps(kv, service, token=None)
        kv.generate(STORY, max_new_tokens=2, do_sample=False, pad_token_id=0)
        assert kv.flush()
        removed = kv.store.stats().entries
        kv.forget()
        with serving(admin) as url:
            tab = browser.open(f"{url}/ui")
            tab.wait("$('evictions').innerText.includes('deleted')")
            assert list(rows(tab, "evictions").values()) == [[f"{removed:,}", f"{removed:,}"]]
            assert set(rows(tab, "tiers")) == {"memory", "disk"}
            assert "No request has been answered" in tab.text("#ttft")
            tab.close()


def test_what_is_switched_off_or_suspended_is_said_at_once(browser: Browser, site: Site) -> None:
    tab = signed_in(browser, site)
    assert tab.text("#alerts") == ""
    site.kv.live.set({"disable": True})
    tab.wait("tick().then(() => $('alerts').innerText.includes('switched off (disable, from: admin)'))")
    site.kv.live.set({"disable": False, "mode": "observe"})
    tab.wait("tick().then(() => $('alerts').innerText.includes('Only observing'))")
    site.kv.live.clear()
    ids = torch.tensor([site.kv.encode(STORY)])
    for seed in range(MIN_CHECKS):
        wrong = torch.randn(site.kv.model.config.vocab_size, generator=torch.Generator().manual_seed(seed))
        checked = site.kv.shadow.offer(ids, wrong, 0.01)
        assert checked is not None
        checked.result(60)
    tab.wait("tick().then(() => $('alerts').innerText.includes('Moved text is not served'))")
    assert "nat" in rows(tab, "shadow")["KL, p95 of the last checks"][0]
    site.kv.shadow.resume()
    tab.wait("tick().then(() => $('alerts').innerText === '')")
    assert_quiet(tab, site)


def test_a_server_that_does_not_answer_is_noticed_and_so_is_its_return(browser: Browser, site: Site) -> None:
    tab = signed_in(browser, site)
    throughput = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    tab.call("Network.emulateNetworkConditions", offline=True, **throughput)
    tab.wait("tick().then(() => $('alerts').innerText.includes('No news from the server'))")
    assert "old" in tab.text("#alerts")
    assert tab.text("#link") == "not reachable"
    tab.call("Network.emulateNetworkConditions", offline=False, **throughput)
    tab.wait("tick().then(() => $('alerts').innerText === '')")
    assert tab.text("#link").startswith("live")
    assert tab.js("$('said').textContent") == "The server answers again."
    tab.close()


def assert_tick_asks_nothing(tab: Tab) -> int:
    """Returns how many requests the page has made."""
    asked = len(tab.requested())
    tab.js("tick()")
    assert len(tab.requested()) == asked
    return asked


def test_nothing_is_asked_while_the_page_is_paused_or_hidden(browser: Browser, site: Site) -> None:
    tab = signed_in(browser, site)
    tab.tab_to("#pause", back=True)
    tab.press("Enter")
    tab.wait("!poll.asking && $('link').textContent.startsWith('paused')")
    assert_tick_asks_nothing(tab)
    tab.press("Enter")
    tab.wait("!poll.asking && $('link').textContent.startsWith('live')")
    tab.js("Object.defineProperty(document, 'hidden', {get: () => true, configurable: true})")
    asked = assert_tick_asks_nothing(tab)
    tab.js("delete document.hidden, document.dispatchEvent(new Event('visibilitychange'))")
    tab.wait("!poll.asking")
    assert len(tab.requested()) > asked
    assert_quiet(tab, site)


# --- the X-ray --------------------------------------------------------------------------------------------------------


def test_an_xray_colours_each_token_as_the_plan_says(browser: Browser, site: Site) -> None:
    tab = signed_in(browser, site, "xray")
    text = STORY[:60] + "Then. " + OTHER + "What now?"
    x_ray(tab, text)
    plan, texts = site.plan(text), token_texts(site.kv.encode(text), site.kv.tokenizer)
    assert {s.kind for s in plan} == {Kind.EXACT, Kind.MOVED, Kind.FRESH}
    assert drawn(tab) == [[[f"t {s.kind.value}", "".join(texts[s.span.start : s.span.stop])]] for s in plan]
    counts = {k: c[0] for k, c in rows(tab, "counts").items()}
    assert counts == {k: f"{plan.count(Kind(k)) if k != 'repaired' else 0:,}" for k in KINDS}
    for number, segment in enumerate(plan, 1):
        assert_row(rows(tab, "segments")[str(number)], segment)
    badges = tab.js("[...document.querySelectorAll('.seg')].map(s => s.dataset.badge)")
    assert badges == [badge(s) for s in plan]
    assert f"{plan.num_tokens:,} tokens, ≈" in tab.text("#cost")
    assert "about" in tab.text("#cost"), "which moved rows would be repaired is not known yet"
    assert_quiet(tab, site)


def assert_row(cells: list[str], segment: Segment) -> None:
    kind, start, length, _, source, shift, age, hits, tier, lineage = cells
    assert (kind, start, length) == (segment.kind.value, f"{segment.span.start:,}", f"{len(segment.span):,}")
    if segment.kind is Kind.FRESH:
        assert source == shift == age == hits == tier == lineage == ""
        return
    assert source == f"{segment.source_position:,}"
    assert shift == (signed(segment.shift) if segment.kind is Kind.MOVED else "0")
    assert re.fullmatch(r"\d+ (s|min)", age)
    assert hits.isdigit()
    assert (tier, lineage) == ("memory", "bit-exact")


def badge(segment: Segment) -> str:
    return segment.kind.value[0].upper() + (signed(segment.shift) if segment.kind is Kind.MOVED else "")


def signed(number: int) -> str:
    return f"{number:+,}".replace("-", "−")


def test_a_kept_request_is_shown_as_it_was_answered(browser: Browser, site: Site) -> None:
    tab = signed_in(browser, site, "xray")
    tab.wait("document.querySelectorAll('#kept button').length")
    tab.js("[...document.querySelectorAll('#kept button')].find(b => b.innerText === 'r1').click()")
    tab.wait("!$('result').hidden")
    kept = site.ask("/admin/requests/r1")
    assert kept["counts"]["repaired"] == kept["repaired_tokens"] > 0 < kept["counts"]["moved"]
    kinds = [run[0].removeprefix("t ") for segment in drawn(tab) for run in segment for _ in run[1]]
    assert kinds == [t["kind"] for t in kept["tokens"] for _ in t["text"]]
    assert {k: c[0] for k, c in rows(tab, "counts").items()} == {k: f"{kept['counts'][k]:,}" for k in KINDS}
    assert "request r1" in tab.text("#h-result")
    assert tab.js("$('session').value") == site.session
    tab.js("$('copy').click()")
    assert tab.js("$('prompt').value").removeprefix("<s>").strip() == MIXED.strip()
    tab.js("[...document.querySelectorAll('#kept button')].find(b => b.innerText === 'r2').click()")
    tab.wait("$('h-result').innerText.includes('r2')")
    assert {"t exact", "t continued"} <= {run[0] for segment in drawn(tab) for run in segment}
    assert_quiet(tab, site)


def test_a_chat_is_looked_at_as_its_template_renders_it(browser: Browser, site: Site) -> None:
    tab = signed_in(browser, site, "xray")
    messages = [{"role": "user", "content": STORY}]
    for given in (messages, {"model": "stories", "messages": messages}):
        x_ray(tab, json.dumps(given), messages=True)
        shown = "".join(run[1] for segment in drawn(tab) for run in segment)
        assert len(site.kv.encode(messages)) == sum(map(int, (c[0] for c in rows(tab, "counts").values())))
        assert STORY in shown
    for wrong, told in (
        ("{", "no JSON"),
        ("[]", "a list such as"),
        ("[1]", "messages.0"),
        ("", "paste"),
    ):
        x_ray(tab, wrong, messages=True)
        assert told in tab.text("#ask-error"), wrong
        assert tab.js("$('prompt').getAttribute('aria-invalid')") == "true"
    tab.close()


def test_text_of_a_prompt_stays_text(browser: Browser, site: Site) -> None:
    site.complete(HOSTILE, **{"x-request-id": "h//1=@"})
    tab = signed_in(browser, site, "xray")
    tab.wait("document.querySelectorAll('#kept button').length")
    x_ray(tab, HOSTILE)
    assert HOSTILE in "".join(run[1] for segment in drawn(tab) for run in segment)
    tab.js("[...document.querySelectorAll('#kept button')].find(b => b.innerText === 'h//1=@').click()")
    tab.wait("$('h-result').innerText.includes('h//1=@')")
    assert HOSTILE in "".join(run[1] for segment in drawn(tab) for run in segment)
    assert tab.js("typeof hit") == "undefined"
    assert tab.js("$('view-xray').querySelectorAll('#result :is(img, script, b)').length") == 0
    assert_quiet(tab, site)


def test_the_browser_itself_refuses_markup_made_of_strings(browser: Browser, site: Site) -> None:
    tab = signed_in(browser, site)
    for attempt in ("document.body.innerHTML = '<b>'", "document.createElement('script').textContent = 'hit=1'"):
        with pytest.raises(RuntimeError, match="Trusted"):
            tab.js(attempt)
    tab.close()


def test_a_long_prompt_has_few_elements(browser: Browser, site: Site) -> None:
    tab = signed_in(browser, site, "xray")
    tab.js(LONG_PROMPT)
    assert tab.js("document.querySelectorAll('#map *').length") <= 80 + 2 * 400 + 80
    assert tab.js("document.querySelector('#map').textContent").count("word") == 10000
    assert tab.js("document.querySelector('#strip').children.length") <= 801
    tab.close()


# --- who may look -----------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused_with_a_clear_word(browser: Browser, site: Site) -> None:
    tab = browser.open(f"{site.admin_url}/ui")
    tab.wait("document.activeElement.id === 'token'")
    assert tab.js("getComputedStyle($('nav')).display") == "none"
    tab.type("wrong")
    tab.press("Enter")
    tab.wait("$('token-error').textContent")
    assert tab.text("#token-error") == "The server does not accept this token."
    assert tab.js("[sessionStorage.length, localStorage.length, document.cookie]") == [0, 0, ""]
    tab.js("$('token').value = ''")
    tab.type(TOKEN)
    tab.press("Enter")
    tab.wait("document.querySelectorAll('#tiles dd').length")
    assert tab.js("[...Object.values(sessionStorage)]") == [TOKEN]
    assert tab.js("localStorage.length") == 0
    assert TOKEN not in str(tab.requested()), "it travels in a header"
    tab.js("token.set('revoked'), tick()")
    tab.wait("$('token-error').textContent.includes('any more')")
    assert tab.js("[sessionStorage.length, $('tiles').children.length]") == [0, 0]
    tab.close()


def test_a_token_is_forgotten_on_demand(browser: Browser, site: Site) -> None:
    tab = signed_in(browser, site, "xray")
    x_ray(tab, STORY)
    tab.js("$('forget').click()")
    assert tab.js("sessionStorage.length") == 0
    left = tab.js("document.querySelector('main').textContent")
    assert "Lily" not in left
    assert tab.js("$('prompt').value + $('session').value") == ""
    assert_quiet(tab, site)


def test_an_open_port_is_not_asked_a_token(browser: Browser, site: Site) -> None:
    with open_service(site.kv) as service, serving(apps(site.kv, service, token=None, keep=0)[1]) as url:
        tab = browser.open(f"{url}/ui#xray")
        tab.wait("$('kept').innerText.includes('--keep-requests')")
        assert tab.js("[$('view-sign-in').hidden, $('forget').hidden, $('view-xray').hidden]") == [True, True, False]
        assert tab.complaints() == []
        tab.close()


# --- everybody --------------------------------------------------------------------------------------------------------


def test_everything_can_be_done_with_the_keyboard(browser: Browser, site: Site) -> None:
    tab = signed_in(browser, site)
    tab.wait("document.activeElement.id === 'h-overview'")
    tab.tab_to("#to-xray", back=True)
    tab.press("Enter")
    tab.wait("document.activeElement.id === 'h-xray' && !$('view-xray').hidden")
    assert tab.js("$('to-xray').getAttribute('aria-current')") == "page"
    tab.tab_to("#prompt")
    tab.type(STORY[:60] + "Then. " + OTHER)
    tab.tab_to("#look")
    tab.press("Enter")
    tab.wait("document.activeElement.id === 'h-result'")
    tab.tab_to(".seg")
    last = len(drawn(tab)) - 1
    assert last >= 2
    for key, times, index in (
        ("ArrowRight", 1, 1), ("ArrowDown", 1, 2), ("ArrowLeft", 2, 0), ("ArrowUp", 1, 0),
        ("End", 1, last), ("ArrowRight", 1, last), ("Home", 1, 0), ("PageDown", 3, last),
    ):  # fmt: skip
        tab.press(key, times)
        assert tab.js("[...$('map').children].indexOf(document.activeElement)") == index, key
        assert tab.js(
            "[...document.querySelectorAll('[aria-selected=true]')].map(s => s === document.activeElement)"
        ) == [True]
        assert tab.text("#detail").startswith(f"{index + 1} of {last + 1}: ")
        assert tab.js("document.querySelector('#segments tr.current').cells[0].innerText") == str(index + 1)
    label = tab.js("document.activeElement.getAttribute('aria-label')")
    assert label.startswith(f"Chunk {last + 1} of {last + 1}: fresh")
    tab.tab_to("#copy")
    assert_quiet(tab, site)


def test_every_stop_of_the_tab_key_is_seen_and_named(browser: Browser, site: Site) -> None:
    tab = signed_in(browser, site, "xray")
    tab.wait("document.querySelectorAll('#kept button').length")
    x_ray(tab, MIXED)
    tab.js("document.querySelector('.skip').focus()")
    stops = tab.js(STOPS)
    assert len(stops) > 12
    for html, style, width, name in stops:
        assert style not in ("none", "hidden"), html
        assert width >= 2, html
        assert name, html
    tab.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_is_read_on_a_phone_by_day_and_by_night(browser: Browser, site: Site, dark: bool) -> None:
    tab = signed_in(browser, site, width=360, height=740, dark=dark)
    site.kv.live.set({"mode": "observe"})
    tab.wait("tick().then(() => $('alerts').innerText.includes('observing'))")
    site.kv.live.clear()
    for view in ("overview", "xray"):
        tab.js(f"location.hash = '{view}'")
        tab.wait(f"!$('view-{view}').hidden")
        if view == "xray":
            tab.wait("document.querySelectorAll('#kept button').length")
            x_ray(tab, MIXED)
        assert tab.js("document.documentElement.scrollWidth") <= 360, view
        seen = tab.js(CONTRAST)
        assert len(seen) > 40
        assert [(round(ratio, 2), what) for ratio, what in seen if ratio < 4.5] == []
    assert_quiet(tab, site)


def test_nothing_moves_for_those_who_do_not_want_it(browser: Browser, site: Site) -> None:
    tab = signed_in(browser, site)
    moving = "getComputedStyle(document.querySelector('.bar i')).transitionDuration"
    assert tab.js(moving) != "0s"
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    assert tab.js(moving) == "0s"
    tab.close()
