"""The chat page in a real browser: it asks a server with a fake engine, and runs nothing that a model writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from tessera.inference.loaded import LoadedProcessor
from tests.toys.browser import Browser, browser, find_browser
from tests.toys.chat_service import make_processor, make_service
from tests.toys.live_page import ChatPage, serving

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_browser() is None, reason="there is no Chromium here")]
LOOK = os.environ.get("TESSERA_SCREENSHOTS")  # a folder to keep screenshots in, for eyes
TEXT = "one two three four five"
HOSTILE = """<img src=x onerror="window.evil=1"><script>window.evil=1</script> **bold <b>tag</b>** `code`

[link](javascript:window.evil=1) ![image](https://example.com/x.png)

- first
  1. inner

```html
<iframe src="javascript:window.evil=1"></iframe>
```

| a | b |
|---|---|
| <svg onload="window.evil=1"> | *c* |
"""
# A file made in the page reaches it as a person's does, by the clipboard or dropped.
SEND_FILE = """(() => {{
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob(document.querySelector('#images img').src.split(',')[1]), c => c.charCodeAt(0));
  data.items.add(new File([bytes], '{kind}.png', {{ type: 'image/png' }}));
  const options = {{ bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data }};
  document.body.dispatchEvent(new {event}('{kind}', options));
}})()"""


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> LoadedProcessor:
    return make_processor(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


@pytest.fixture
def page(window: Browser) -> ChatPage:
    return ChatPage(window)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "house.png"
    Image.effect_noise((400, 300), 90).convert("RGB").save(path)
    return path


def test_an_image_is_uploaded_and_answered_while_the_answer_streams(
    page: ChatPage, processor: LoadedProcessor, image: Path
) -> None:
    service = make_service(processor)
    engine: Any = service.engine
    engine.delay_s = 0.1
    with serving(service) as address:
        page.open(address)
        page.models_are_listed()
        page.choose_file(image)
        page.until("document.querySelectorAll('#images img').length === 1")
        page.ask("what is in this picture")
        page.until("document.querySelector('.text')?.innerText.startsWith('one')")
        assert page.value("document.querySelector('.answer').ariaBusy") == "true"  # the rest is still to come
        page.answered()
        assert page.text(".text") == TEXT
        assert page.text(".question p") == "what is in this picture"
        assert page.count(".question img") == 1
        assert page.count("#images img") == 0
        assert "tokens/s" in page.text(".facts")
        assert page.text(".error") == ""
        (request,) = engine.requests
        assert request.prompt["pixels"].numel() > 1000
        origins = page.value("performance.getEntriesByType('resource').map(entry => new URL(entry.name).origin)")
        assert set(origins) == {address.rstrip("/")}


def test_images_are_pasted_dropped_and_removed(page: ChatPage, processor: LoadedProcessor, image: Path) -> None:
    with serving(make_service(processor)) as address:
        page.open(address)
        page.models_are_listed()
        page.choose_file(image)
        page.until("document.querySelectorAll('#images img').length === 1")
        for kind, event in (("paste", "ClipboardEvent"), ("drop", "DragEvent")):
            page.value(SEND_FILE.format(kind=kind, event=event))
            page.until(f"document.querySelector('#images li:last-child img').alt === '{kind}.png'")
        assert page.count("#images img") == 3
        page.click("#images li:nth-child(2) button")
        assert page.value("[...document.querySelectorAll('#images img')].map(image => image.alt)") == [
            "house.png",
            "drop.png",
        ]
        image.with_suffix(".txt").write_text("no image")
        page.choose_file(image.with_suffix(".txt"))
        page.until("document.querySelector('#notice').innerText.includes('house.txt')")
        assert page.count("#images img") == 2


def test_images_are_made_smaller_only_if_the_server_needs_it(
    page: ChatPage, processor: LoadedProcessor, image: Path
) -> None:
    assert image.stat().st_size > 200_000
    sizes = []
    for limit in (64 << 20, 150_000):
        service = make_service(processor, max_body=limit)
        with serving(service) as address:
            page.open(address)
            page.models_are_listed()
            page.value("window.sizes = []; window.real = fetch")
            page.value("window.fetch = (url, options) => (sizes.push(options.body?.length ?? 0), real(url, options))")
            page.choose_file(image)
            page.until("document.querySelectorAll('#images img').length === 1")
            page.ask("hi")
            page.answered()
            assert page.text(".text") == TEXT
            sizes += page.value("sizes")
    assert sizes[0] > image.stat().st_size
    assert 10_000 < sizes[1] <= 150_000


def test_stop_aborts_in_the_engine_and_regenerate_asks_again(page: ChatPage, processor: LoadedProcessor) -> None:
    service = make_service(processor)
    engine: Any = service.engine
    engine.delay_s = 0.4
    with serving(service) as address:
        page.open(address)
        page.models_are_listed()
        page.ask("hi")
        page.until("document.querySelector('.text')?.innerText")
        page.click("#stop")
        page.answered()
        engine.wait_until_idle()
        assert engine.aborted == [0]
        assert TEXT.startswith(page.text(".text"))
        assert page.text(".text") != TEXT
        assert page.text(".facts") == "stopped"
        engine.delay_s = 0.0
        page.click(".again")
        page.until(f"document.querySelector('.text').innerText === '{TEXT}'")
        page.answered()
        engine.delay_s = 0.4
        page.click(".again")
        page.until("document.querySelector('.text').innerText === 'one'")
        page.press("Escape")
        page.answered()
        engine.wait_until_idle()
        assert engine.aborted == [0, 2]
        page.click("#clear")
        assert page.count("article") == 0


def test_what_a_model_writes_is_never_markup(page: ChatPage, processor: LoadedProcessor) -> None:
    service = make_service(processor, max_length=4096)
    engine: Any = service.engine
    engine.text = HOSTILE
    with serving(service) as address:
        page.open(address)
        page.models_are_listed()
        page.ask("<b onclick=1>hi</b>")
        page.answered()
        assert page.value("window.evil") is None
        assert page.count(".text :is(img, script, iframe, svg, a, b)") == 0
        assert page.text(".text strong") == "bold <b>tag</b>"
        assert page.text(".text p").startswith('<img src=x onerror="window.evil=1"><script>')
        assert page.text(".text ul > li > ol") == "inner"
        assert page.text(".text pre") == '<iframe src="javascript:window.evil=1"></iframe>'
        assert page.text(".text td em") == "c"
        assert page.text(".question p") == "<b onclick=1>hi</b>"


def test_long_and_deep_markdown_is_drawn_at_once(page: ChatPage, processor: LoadedProcessor) -> None:
    with serving(make_service(processor)) as address:
        page.open(address)
        page.models_are_listed()
        draw = """(async () => {{
          const {{ Markdown }} = await import('/page/markdown.js');
          const begun = performance.now();
          new Markdown(document.createElement('div')).show({text});
          window.took = performance.now() - begun;
        }})()"""
        deep = "'- '.repeat(50000) + 'x'", "'*'.repeat(100000)", "'**a*** '.repeat(20000)", "'`'.repeat(99999)"
        for text in (*deep, "'| - '.repeat(30000)", "Array(5000).fill('- a').join('\\n')", "'*a '.repeat(40000)"):
            page.value("window.took = null")
            page.value(draw.format(text=text))
            page.until("window.took !== null")
            assert page.value("window.took") < 10_000, text  # a quadratic renderer needs minutes


def test_two_models_answer_side_by_side_each_with_its_own_conversation(
    page: ChatPage, processor: LoadedProcessor
) -> None:
    service = make_service(processor, max_length=512)
    service.adapters["tuned"] = "unused"
    engine: Any = service.engine
    with serving(service) as address:
        page.open(address)
        page.models_are_listed(2)
        page.click("#compare")
        page.ask("hi")
        page.answered(2)
        assert [page.text(f".answer:nth-child({n}) h2") for n in (1, 2)] == ["toy", "tuned"]
        assert {request.adapter for request in engine.requests} == {None, "tuned"}
        first, second = page.value("[...document.querySelectorAll('.answer')].map(node => node.offsetLeft)")
        assert second > first + 300
        engine.text = "six seven"
        page.click(".answer:nth-child(2) .again")
        page.until("document.querySelector('.answer:nth-child(2) .text').innerText === 'six seven'")
        page.answered(2)
        page.ask("and now")
        page.answered(4)
        prompts = {
            request.adapter: service.tokens.decode(request.prompt["tokens"].flatten().tolist())
            for request in engine.requests[3:]
        }
        assert TEXT in prompts[None]
        assert TEXT not in prompts["tuned"]
        assert "six seven" in prompts["tuned"]


def test_a_second_server_joins_if_it_allows_the_page(page: ChatPage, processor: LoadedProcessor) -> None:
    with serving(make_service(processor)) as address:
        page.open(address)
        page.models_are_listed()
        other = make_service(processor, name="other", allow_origins=(address.rstrip("/"),))
        with serving(make_service(processor)) as closed, serving(other) as allowed:
            page.click("[popovertarget]")
            page.type("#second-server", closed)
            page.press("Enter")
            page.until(f"document.querySelector('#notice').innerText.includes('--allow-origin {address.rstrip('/')}')")
            page.type("#second-server", f"{allowed}v1/")
            page.press("Enter")
            page.models_are_listed(2)
            assert page.text("#notice") == ""
            page.click("#compare")
            page.ask("hi")
            page.answered(2)
            assert len(other.engine.requests) == 1  # type: ignore[attr-defined]
            assert page.text(".answer:nth-child(2) h2").startswith("other · 127.0.0.1:")


def test_the_tokens_of_a_prompt_are_listed(page: ChatPage, processor: LoadedProcessor, image: Path) -> None:
    service = make_service(processor)
    engine: Any = service.engine
    with serving(service) as address:
        page.open(address)
        page.models_are_listed()
        page.choose_file(image)
        page.until("document.querySelectorAll('#images img').length === 1")
        page.ask("what")
        page.answered()
        page.click(".tokens summary")
        page.until("document.querySelectorAll('.tokens li').length > 5")
        entries = page.value("[...document.querySelectorAll('.tokens small')].map(node => node.innerText)")
        listed: list[int] = []
        for entry in entries:
            token, _, times = entry.partition(" ×")
            listed += [int(token)] * int(times or 1)
        assert listed == engine.requests[0].prompt["tokens"].flatten().tolist()
        assert page.text(".tokens p") == f"{len(listed)} tokens; the context has 256"


def test_settings_are_sent_and_kept(page: ChatPage, processor: LoadedProcessor) -> None:
    service = make_service(processor)
    engine: Any = service.engine
    values = {"temperature": "0.5", "top_p": "0.9", "top_k": "7", "max_tokens": "5", "seed": "3", "system": "be brief"}
    with serving(service) as address:
        for visit in range(2):
            page.open(address)
            page.models_are_listed()
            if visit == 0:
                page.click("[popovertarget]")
                for name, value in values.items():
                    page.type(f"[name={name}]", value)
                page.press("Escape")
                assert page.count("#settings:popover-open") == 0
            page.ask("hi")
            page.answered()
            assert "stopped at the limit of tokens" in page.text(".facts")
        for request in engine.requests:
            sampling = request.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
            assert (sampling.seed, request.max_new_tokens) == (engine.requests[0].sampling.seed, 5)
        assert "be brief" in service.tokens.decode(engine.requests[0].prompt["tokens"].flatten().tolist())


def test_the_page_asks_for_a_key_and_shows_errors(page: ChatPage, processor: LoadedProcessor) -> None:
    with serving(make_service(processor, api_key="secret")) as address:
        page.open(address)
        page.until("document.querySelector('#key').open")
        page.type("#key input", "secret")
        page.press("Enter")
        page.models_are_listed()
        assert page.text("#notice") == ""
        page.ask("what " * 500)
        page.until("document.querySelector('.answer .error').innerText")
        assert "256 tokens" in page.text(".answer .error")
        page.ask("hi")  # a turn without an answer is no part of the conversation
        page.until(f"document.querySelector('article:last-child .text')?.innerText === '{TEXT}'")


class Thinking:
    """Return the first two tokens of an answer as reasoning."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, text: str) -> list[dict[str, str]]:
        self.count += 1
        return [{"reasoning" if self.count <= 2 else "content": text}]

    def close(self) -> list[dict[str, str]]:
        return []


def test_reasoning_is_folded(page: ChatPage, processor: LoadedProcessor) -> None:
    service = make_service(processor)
    service.split = lambda request: Thinking
    with serving(service) as address:
        page.open(address)
        page.models_are_listed()
        page.ask("hi")
        page.answered()
        assert page.value("document.querySelector('.reasoning').open") is False
        thought = page.value("document.querySelector('.reasoning pre').textContent")
        assert thought + page.value("document.querySelector('.text').textContent") in (TEXT, TEXT.replace(" ", ""))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
def test_the_page_fits_narrow_and_wide_windows_in_both_languages(
    page: ChatPage, processor: LoadedProcessor, image: Path, tmp_path: Path, language: str, width: int, dark: bool
) -> None:
    service = make_service(processor, max_length=4096)
    service.adapters["tuned"] = "unused"
    engine: Any = service.engine
    engine.text = HOSTILE + "word" * 50
    name = f"chat-{language[:2]}-{width}-{'dark' if dark else 'light'}"
    with serving(service) as address:
        page.open(address, language, width, dark)
        page.models_are_listed(2)
        page.click("#compare")
        page.choose_file(image)
        page.until("document.querySelectorAll('#images img').length === 1")
        page.ask("what is in this picture? " * 5)
        page.answered(2)
        page.click(".tokens summary")
        page.until("document.querySelectorAll('.tokens li').length > 5")
        page.browser.screenshot(Path(LOOK or tmp_path) / f"{name}.png")
        page.click("[popovertarget]")
        page.browser.screenshot(Path(LOOK or tmp_path) / f"{name}-settings.png")
        assert page.text("#send") == {"en-US": "Send", "zh-CN": "发送"}[language]
        assert page.value("document.documentElement.lang") == language[:2]
        outside = "[...document.querySelectorAll('body *')].filter(node => node.checkVisibility() && "
        outside += "!node.closest('.wide, pre, .tokens ol, code') && node.getBoundingClientRect().right > innerWidth)"
        assert page.value(f"{outside}.map(node => node.outerHTML.slice(0, 200))") == []
        page.click("#language")
        assert page.text("#send") == {"en-US": "发送", "zh-CN": "Send"}[language]
        assert page.text(".again") == {"en-US": "重新生成", "zh-CN": "Regenerate"}[language]


def test_every_control_has_a_name_and_is_reached_by_keys(page: ChatPage, processor: LoadedProcessor) -> None:
    with serving(make_service(processor)) as address:
        page.open(address)
        page.models_are_listed()
        nodes = page.browser.call("Accessibility.getFullAXTree")["nodes"]
        controls = {"button", "combobox", "textbox", "spinbutton"}
        named = [node for node in nodes if node.get("role", {}).get("value") in controls]
        assert len(named) >= 8
        assert [node for node in named if not node["name"]["value"]] == []
        focused = set()
        for _ in range(12):
            page.press("Tab")
            focused.add(page.value("document.activeElement.id || document.activeElement.textContent"))
        assert {"model", "compare", "clear", "Settings", "language", "attach", "send"} <= focused
